"""Gateways that name themselves in the headers of their responses."""

import pytest

from loadgen.servers.gateways import counting_gateway, gateways_in_head, gateways_without_remedy, streaming_remedies


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (["Server: nginx/1.22.1"], {"nginx/1.22.1 (Server)"}),
        (
            ["server: envoy", "x-envoy-upstream-service-time: 3"],
            {"Envoy (x-envoy-upstream-service-time)"},
        ),
        (["server: uvicorn", "x-litellm-call-id: 1", "x-litellm-version: 1.80"], {"LiteLLM (x-litellm-call-id)"}),
        (["Via: 1.1 google"], {"1.1 google (Via)"}),
        (["VIA:1.1 Caddy", "Server: Caddy"], {"1.1 Caddy (Via)", "Caddy (Server)"}),
        (["CF-Ray: 8f", "Server: cloudflare"], {"Cloudflare (cf-ray)"}),
    ],
)
def test_gateways_are_named(lines: list[str], names: set[str]) -> None:
    """Names come from `Server` and `Via`, or from the names of other headers; each gateway has one such header."""
    head = "\r\n".join(["HTTP/1.1 200 OK", "content-type: text/event-stream", *lines])
    assert gateways_in_head(head.encode()) == names


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\nx-request-id: 7",
        b"HTTP/1.1 200 OK\r\nServer: \r\nVia:\r\n",
        b"HTTP/1.1 200 OK\r\nx-compute-type: 1-nvidia\r\nx-inference-time: 5",
        b"\xff\x00 nothing like HTTP",
        b"",
    ],
)
def test_inference_servers_are_not_gateways(head: bytes) -> None:
    """The libraries of inference servers, empty values and malformed heads name no gateway."""
    assert gateways_in_head(head) == set()


def test_a_name_is_short_and_printable() -> None:
    """A long value is cut, and control characters are left out."""
    (name,) = gateways_in_head(b"HTTP/1.1 200 OK\r\nVia: \x1b[31m" + b"x" * 500)
    assert name == "[31m" + "x" * 56 + " (Via)"


NGINX, HAPROXY = "`proxy_buffering off` in nginx", "`option http-no-delay` in haproxy"


@pytest.mark.parametrize(
    ("names", "remedies"),
    [
        ([], [NGINX, HAPROXY]),
        (["LiteLLM (x-litellm-call-id)"], [NGINX, HAPROXY]),
        (["nginx/1.22.1 (Server)"], [NGINX, HAPROXY]),
        (["haproxy (Server)"], [HAPROXY]),
        (["Envoy (x-envoy-upstream-service-time)"], ["no filter `envoy.filters.http.buffer` in Envoy", HAPROXY]),
    ],
)
def test_remedies_are_those_of_the_named_gateways(names: list[str], remedies: list[str]) -> None:
    """The remedy of haproxy is always included, because haproxy does not name itself."""
    assert streaming_remedies(names) == remedies


def test_gateways_without_a_known_setting_are_named() -> None:
    """Their versions and headers are left out."""
    names = ["LiteLLM (x-litellm-call-id)", "nginx/1.22.1 (Server)", "1.1 varnish (Via)"]
    assert gateways_without_remedy(names) == ["LiteLLM", "1.1 varnish"]


@pytest.mark.parametrize(
    ("header", "endpoint", "name"),
    [
        ("x-litellm-version", "completions", "LiteLLM"),
        ("x-litellm-version", "chat", ""),
        ("x-envoy-upstream-service-time", "completions", ""),
    ],
)
def test_a_gateway_counts_tokens_on_some_endpoints(header: str, endpoint: str, name: str) -> None:
    """LiteLLM counts the tokens of completions itself, and passes the server's counts on in chat."""
    assert counting_gateway({"server": "uvicorn", header: "1"}, endpoint) == name
