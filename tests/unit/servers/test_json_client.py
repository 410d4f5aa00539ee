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


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *(("7", 7.0), ("0.5", 0.5), ("inf", float("inf"))),
        *(("", None), ("0", None), ("-1", None), ("nan", None), ("soon", None), ("5, 6", None), ("\xe9", None)),
        *(("Wed, 21 Oct 2015 07:28:00 GMT", None), ("Wed, 99 Oct 2015 07:28:00 GMT", None)),
    ],
)
def test_retry_after_states_a_time_or_none(value: str, seconds: float | None) -> None:
    """A busy server that sends 0, NaN, nonsense or a past date is asked again only a few times."""
    assert JsonResponse(429, b"", retry_after=value).retry_after_s == seconds


def test_a_long_redirect_is_shortened_in_messages() -> None:
    """The address of a redirect may have any length."""
    words = JsonResponse(302, b"", location="http://h/" + "a" * 50_000).words
    assert words.startswith("302, a redirect to http://h/aaa")
    assert len(words) < 400
