"""The forms of a server's URL that users paste, and what is said about each repair."""

from __future__ import annotations

import pytest

from loadgen.servers.errors import SecretError
from loadgen.servers.server_url import (
    ServerUrl,
    azure_deployment,
    check_server_url,
    describe_repair,
    parse_server_url,
    takes_azure_key,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://h:8000", ServerUrl("http://h:8000")),
        ("http://h:8000/", ServerUrl("http://h:8000")),
        ("http://h:8000/v1", ServerUrl("http://h:8000")),
        ("http://h:8000//v1//", ServerUrl("http://h:8000")),
        ("https://h/models/a/v1", ServerUrl("https://h/models/a")),
        ("http://[::1]:8000/v1?x=1#y", ServerUrl("http://[::1]:8000", "x=1")),
        ("http://h/v10", ServerUrl("http://h/v10")),
        ("http://h/api/v3", ServerUrl("http://h/api/v3")),
        ("h:8000", ServerUrl("http://h:8000")),
        ("gpu-host:8080/v1/", ServerUrl("http://gpu-host:8080")),
        ("localhost", ServerUrl("http://localhost")),
        (":8000", ServerUrl("http://127.0.0.1:8000")),
        ("8000", ServerUrl("http://127.0.0.1:8000")),
        ("10.1.2.3", ServerUrl("http://10.1.2.3")),
        ("[::1]:8000", ServerUrl("http://[::1]:8000")),
        ("gpu.lan", ServerUrl("http://gpu.lan")),
        ("api.example.com/v1", ServerUrl("https://api.example.com")),
        ("h:443", ServerUrl("https://h:443")),
        ("//h:1", ServerUrl("http://h:1")),
        ("HTTP://h:1", ServerUrl("http://h:1")),
        ("http:/h:1", ServerUrl("http://h:1")),
        ("http//h:1", ServerUrl("http://h:1")),
        ("http://http://h:1", ServerUrl("http://h:1")),
        (" 'http://h:1' ", ServerUrl("http://h:1")),
        ("http://h:1/v1/chat/completions", ServerUrl("http://h:1", endpoint="chat")),
        ("http://h:1/v1/completions/", ServerUrl("http://h:1", endpoint="completions")),
        ("http://h:1/v1/embeddings", ServerUrl("http://h:1", endpoint="embeddings")),
        ("http://h:1/v1/rerank", ServerUrl("http://h:1", endpoint="rerank")),
        ("h:1/generate_stream", ServerUrl("http://h:1", endpoint="generate")),
        ("h:1/generate", ServerUrl("http://h:1", endpoint="generate")),
        ("http://h/api/v4/chat/completions", ServerUrl("http://h/api/v4", endpoint="chat")),
        ("http://h/d/gpt/chat/completions?api-version=2", ServerUrl("http://h/d/gpt", "api-version=2", "chat")),
        ("http://h:1/v1/models", ServerUrl("http://h:1")),
        ("http://h:1/metrics", ServerUrl("http://h:1")),
        ("http://h:1/docs#/default", ServerUrl("http://h:1")),
        ("http://bücher.example:80", ServerUrl("http://xn--bcher-kva.example:80")),
        ("unix:/run/vllm.sock", ServerUrl("unix:/run/vllm.sock")),
        ("unix:///run/vllm.sock", ServerUrl("unix:/run/vllm.sock")),
        ("unix:/run/v.sock:/base/v1/chat/completions?a=1", ServerUrl("unix:/run/v.sock:/base", "a=1", "chat")),
        (
            "https://n.openai.azure.com/openai/deployments/d/chat/completions?api-version=2024-10-21",
            ServerUrl("https://n.openai.azure.com/openai/deployments/d", "api-version=2024-10-21", "chat"),
        ),
        ("https://n.openai.azure.com/openai/v1/", ServerUrl("https://n.openai.azure.com/openai")),
    ],
)
def test_each_form_is_split(text: str, address: ServerUrl) -> None:
    """The scheme is added, paths of endpoints and pages are removed, a prefix and a query are kept."""
    assert parse_server_url(text) == address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm", "must start with http"),
        ("ftp://h", "must start with http"),
        ("unix:vllm.sock", "full path"),
        (f"unix:/{'a' * 107}", "at most 107 bytes"),
        ("ws://h:1", "must start with http"),
        ("::1", "must start with http"),
        ("http://", "no valid host name"),
        ("h:99999", "not a valid URL"),
        ("http://[::1", "not a valid URL"),
        ("a b:1", "must not contain spaces"),
        ("http://h/ü", "in ASCII"),
        ("http://h?ü=1", "in ASCII"),
    ],
)
def test_text_that_cannot_be_a_url_is_refused(text: str, words: str) -> None:
    """The reason is named, and no traceback of a parser comes through."""
    with pytest.raises(ValueError, match=words):
        check_server_url(text)


@pytest.mark.parametrize("text", ["me:pass@h:1", "http://me@h", "http://h/v1?api_key=abc"])
def test_credentials_are_refused_in_every_form(text: str) -> None:
    """Also without a scheme."""
    with pytest.raises(SecretError):
        check_server_url(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("http://h:1", ""),
        ("http://h:1/", ""),
        ("http://h:1/v1/", ""),
        ("h:1", "h:1: using http://h:1"),
        ("http://h:1/v1/chat/completions", "http://h:1/v1/chat/completions: using http://h:1, endpoint chat"),
        ("http://h?a=1", "http://h?a=1: using http://h, with ?a=1 on every request"),
    ],
)
def test_a_repair_is_described(text: str, line: str) -> None:
    """A trailing slash and `/v1` are ordinary and not worth a line; a query is always one."""
    described = describe_repair(text, parse_server_url(text))
    assert described == line


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://n.openai.azure.com/openai/v1", True),
        ("n.cognitiveservices.azure.com", True),
        ("https://n.services.ai.azure.com/models", True),
        ("https://gateway.test/openai/deployments/gpt?api-version=1", True),
        ("https://api.groq.com/openai/v1", False),
        ("http://127.0.0.1:8000", False),
        ("unix:/run/vllm.sock", False),
        ("", False),
    ],
)
def test_servers_that_take_the_key_of_azure_are_recognised(url: str, expected: bool) -> None:
    """Azure's hosts do, and gateways with the paths of Azure's deployments."""
    assert takes_azure_key(url) is expected


def test_the_deployment_is_read_from_the_path() -> None:
    """A name may be encoded. Other paths name no deployment."""
    assert azure_deployment("https://h/openai/deployments/gpt%204/chat") == "gpt 4"
    assert azure_deployment("https://h/openai/v1") == ""
