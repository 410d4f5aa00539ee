"""Recognises gateways and proxies by the headers that they add to responses.

A gateway between the client and the server can change latencies and hide replicas, so a run records which gateways name
themselves. Many do not: haproxy and Traefik add no header by default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MAX_NAME = 60
"""Maximum number of characters of a name that comes from a header."""
SERVER_PRODUCTS = re.compile(
    r"nginx|openresty|tengine|envoy|istio|haproxy|caddy|traefik|apache|cloudflare|cloudfront|awselb|kong|varnish|litellm"
    r"|google frontend|gws|microsoft-iis|microsoft-httpapi|akamai|squid|lighttpd",
    re.IGNORECASE,
)
"""Products in a `Server` header that are gateways. Inference servers name their HTTP library there, such as uvicorn."""
HEADER_OWNERS = {
    "x-envoy-": "Envoy",
    "x-litellm-": "LiteLLM",
    "x-kong-": "Kong",
    "cf-ray": "Cloudflare",
    "x-amz-cf-": "Amazon CloudFront",
    "x-amz-apigw-": "Amazon API Gateway",
    "apim-request-id": "Azure API Management",
    "x-portkey-": "Portkey",
    "x-bf-": "Bifrost",
    "helicone-": "Helicone",
}
"""Gateways by the beginning of the header names that they add, in lower case."""
COUNTING_GATEWAYS = {"litellm": ("completions",)}
"""Gateways that replace the server's token counts by counts of their own, and the endpoints on which they do so.

The names are in lower case. LiteLLM 1.99.4 drops the usage of a streamed completion, and counts the text with its own
tokenizer (`TextCompletionStreamWrapper` in litellm/utils.py). On its other endpoints, it passes the server's usage on.
"""
STREAMING_REMEDIES = {
    "nginx": "`proxy_buffering off` in nginx",
    "openresty": "`proxy_buffering off` in OpenResty",
    "tengine": "`proxy_buffering off` in Tengine",
    "haproxy": "`option http-no-delay` in haproxy",
    "envoy": "no filter `envoy.filters.http.buffer` in Envoy",
    "caddy": "`flush_interval -1` in Caddy",
    "traefik": "`flushInterval: -1ms` in Traefik",
    "apache": "`flushpackets=on` in Apache's ProxyPass",
}
"""Settings with which a gateway passes each token on at once, by the beginning of its name in lower case."""
USUAL_GATEWAYS = ("nginx", "haproxy")
"""Gateways that hold tokens back and are common. haproxy does not name itself."""
_LINE = re.compile(rb"^([!-9;-~]+):[ \t]*([^\r\n]*)", re.MULTILINE)


def gateways_in_head(head: bytes) -> set[str]:
    """Return the names of the gateways that the head of an HTTP response reveals, such as `nginx/1.22.1 (Server)`.

    Three kinds of headers reveal a gateway. A malformed head raises no error.

    - `Via`: the value is the name of a gateway (RFC 9110, section 7.6.3).
    - `Server`: the value is the name of a gateway if it contains a product of SERVER_PRODUCTS.
    - Headers that only certain gateways add. HEADER_OWNERS maps the beginning of such a header's name to its gateway.
    """
    return gateways_in_headers(
        (match[1].decode("latin-1"), match[2].decode("latin-1")) for match in _LINE.finditer(head)
    )


def gateways_in_headers(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Return the names of the gateways that response headers reveal, as `gateways_in_head` describes.

    `headers` contains the name and the value of each header.
    """
    names = set[str]()
    for name, value in headers:
        header = name.lower()
        if header in ("server", "via"):
            gateway = "".join(letter for letter in value if letter.isprintable())[:MAX_NAME].strip()
            if gateway and (header == "via" or SERVER_PRODUCTS.search(gateway)):
                names.add(f"{gateway} ({header.title()})")
            continue
        names |= {f"{owner} ({header})" for start, owner in HEADER_OWNERS.items() if header.startswith(start)}
    return _one_header_each(names)


def counting_gateway(headers: Mapping[str, str], endpoint: str) -> str:
    """Return the name of the gateway, such as `LiteLLM`, that replaces the server's token counts with its own counts.

    `headers` are the headers of a response, which may reveal the gateway. The result is empty if they reveal no gateway
    that replaces token counts on `endpoint`.
    """
    names = sorted(name.partition(" (")[0] for name in gateways_in_headers(headers.items()))
    return next((name for name in names if endpoint in COUNTING_GATEWAYS.get(name.lower(), ())), "")


def streaming_remedies(gateways: Iterable[str]) -> list[str]:
    """Return the settings that make gateways pass each token on at once.

    `gateways` are the names of the gateways that `gateways_in_head` found in responses. The list begins with the
    settings of these gateways. It always contains the setting of haproxy, because haproxy does not name itself in
    responses. If `gateways` contains no known gateway, the list also contains the setting of nginx.
    """
    named = [
        remedy
        for product, remedy in STREAMING_REMEDIES.items()
        if any(name.lower().startswith(product) for name in gateways)
    ]
    usual = [STREAMING_REMEDIES[product] for product in (USUAL_GATEWAYS[1:] if named else USUAL_GATEWAYS)]
    return list(dict.fromkeys([*named, *usual]))


def gateways_without_remedy(gateways: Iterable[str]) -> list[str]:
    """Return the names of the gateways for which no setting of STREAMING_REMEDIES is known, without versions.

    `gateways` are the names that `gateways_in_head` found in responses, such as `LiteLLM (x-litellm-version)`.
    """
    products = [name.partition(" (")[0].partition("/")[0] for name in gateways]
    return [product for product in products if not product.lower().startswith(tuple(STREAMING_REMEDIES))]


def _one_header_each(names: set[str]) -> set[str]:
    """Return `names` without repetitions of a gateway.

    A name consists of a gateway and of the response header that reveals it, such as `nginx/1.22.1 (Server)`. If several
    headers reveal the same gateway, only the name that comes first in alphabetical order is kept.
    """
    kept = dict[str, str]()
    for name in sorted(names):
        kept.setdefault(name.partition(" (")[0].lower(), name)
    return set(kept.values())
