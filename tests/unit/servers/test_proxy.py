"""URLs of proxies, their credentials, and the response to CONNECT."""

from __future__ import annotations

from base64 import b64encode

import pytest

from loadgen.servers.errors import SecretError
from loadgen.servers.proxy import Proxy, ProxyError, Tunnel, normalise_proxy_url, proxy_at, unused_proxy_hint

PROXY = Proxy("proxy.test", 3128)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://proxy.test:8080", "http://proxy.test:8080"),
        ("HTTP://proxy.test:8080/", "http://proxy.test:8080"),
        ("proxy.test:8080", "http://proxy.test:8080"),
        ("proxy.test", "http://proxy.test:3128"),
        ("http://[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_forms_of_a_url_are_accepted(text: str, url: str) -> None:
    """The scheme and the port may be missing."""
    assert normalise_proxy_url(text) == url
    assert proxy_at(url, {}).url == url


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("socks5://proxy.test:1080", "socks5:// proxies are not supported"),
        ("https://proxy.test", "https:// proxies are not supported"),
        ("http://proxy.test/path", "must be written"),
        ("http://", "must be written"),
        ("http://h:99999", "not a valid URL"),
        ("a b", "must be written"),
    ],
)
def test_other_urls_are_refused(text: str, message: str) -> None:
    """The message names the form that is expected."""
    with pytest.raises(ValueError, match=message):
        normalise_proxy_url(text)


@pytest.mark.parametrize("text", ["http://me:correct-horse@proxy.test", "me:correct-horse@proxy.test:3128"])
def test_credentials_in_a_url_are_refused(text: str) -> None:
    """The URL is stored with the run. The message names the variable and does not show the password."""
    with pytest.raises(SecretError) as caught:
        normalise_proxy_url(text)
    assert "LOADGEN_PROXY_AUTH" in caught.value.hint
    assert "correct-horse" not in f"{caught.value} {caught.value.hint}"


def test_credentials_come_from_the_environment() -> None:
    """They are sent as Basic authentication. Other forms are refused."""
    proxy = proxy_at("http://proxy.test:3128", {"LOADGEN_PROXY_AUTH": "me:correct-horse"})
    assert proxy.headers == {"Proxy-Authorization": f"Basic {b64encode(b'me:correct-horse').decode()}"}
    for content in ("correct-horse", "me:", ":correct-horse", "me:correct\nhorse"):
        with pytest.raises(SecretError, match="USER:PASSWORD"):
            proxy_at("http://proxy.test:3128", {"LOADGEN_PROXY_AUTH": content})


def test_a_tunnel_opens_in_any_division() -> None:
    """The response may arrive byte by byte, with other headers and another 2xx status."""
    tunnel = Tunnel(PROXY, "::1", 443)
    assert tunnel.take_request() == b"CONNECT [::1]:443 HTTP/1.1\r\nHost: [::1]:443\r\n\r\n"
    assert tunnel.take_request() == b""
    response = b"HTTP/1.0 200 OK\r\nVia: test\r\n\r\n"
    opened = [tunnel.receive(response[index : index + 1]) for index in range(len(response))]
    assert opened == [False] * (len(response) - 1) + [True]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (b"", "closed the connection instead of opening a tunnel"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "answers 403 Forbidden to CONNECT h:443"),
        (b"HTTP/1.1 407 Auth\r\n\r\n", "put USER:PASSWORD into LOADGEN_PROXY_AUTH"),
        (b"SSH-2.0-OpenSSH\r\n", "does not answer in HTTP"),
        (b"HTTP/2 200\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000, "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "sent data before the server"),
    ],
)
def test_a_proxy_that_opens_no_tunnel_is_named(response: bytes, message: str) -> None:
    """The error names the proxy and its answer."""
    with pytest.raises(ProxyError, match=message) as caught:
        Tunnel(PROXY, "h", 443).receive(response)
    assert "http://proxy.test:3128" in str(caught.value)


def test_refused_credentials_are_told_from_missing_ones() -> None:
    """Status 407 has another advice if credentials were sent."""
    proxy = Proxy("proxy.test", 3128, {"Proxy-Authorization": "Basic x"})
    with pytest.raises(ProxyError, match="it refuses the user and password in LOADGEN_PROXY_AUTH"):
        Tunnel(proxy, "h", 443).receive(b"HTTP/1.1 407 Auth\r\n\r\n")


def test_a_proxy_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint names the variable of the URL's scheme. There is none without a variable, or for hosts in NO_PROXY."""
    environ = {"https_proxy": "http://me:correct-horse@p.test:1", "NO_PROXY": "inner.test"}
    for name in ("http_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, content in environ.items():
        monkeypatch.setenv(name, content)
    hint = unused_proxy_hint("https://h.test", environ)
    assert hint.startswith("https_proxy is set")
    assert "--proxy http://p.test:1, with its USER:PASSWORD in LOADGEN_PROXY_AUTH" in hint
    assert "correct-horse" not in hint
    assert unused_proxy_hint("http://h.test", environ) == ""
    assert unused_proxy_hint("https://inner.test", environ) == ""
