"""Responses to requests outside the load."""

from __future__ import annotations

import pytest

from loadgen.servers.json_client import JsonResponse


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (404, b"404: Not Found", "404: Not Found"),
        (503, b"503 Service Unavailable", "503: Service Unavailable"),
        (503, b'{"error":"Loading model"}', "503: Loading model"),
        (500, b"", "500"),
        (200, b"{}", "200"),
    ],
)
def test_a_status_is_named_once(status: int, content: bytes, words: str) -> None:
    """aiohttp and proxies repeat the status in the body."""
    assert JsonResponse(status, content).words == words
