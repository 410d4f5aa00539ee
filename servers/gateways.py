"""Recognises gateways and proxies by the headers that they add to responses.

A gateway between the client and the server can change latencies and hide replicas, so a run records which gateways name
themselves. Many do not: haproxy and Traefik add no header by default.
"""

from __future__ import annotations

import re

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
_LINE = re.compile(rb"^([!-9;-~]+):[ \t]*([^\r\n]*)", re.MULTILINE)


def gateways_in_head(head: bytes) -> set[str]:
    """Return the names of the gateways that the head of an HTTP response states, such as `nginx/1.22.1 (Server)`.

    `Server` and `Via` state names. The other headers of HEADER_OWNERS reveal a gateway by their own names. The source
    of `Via` is RFC 9110, section 7.6.3. A malformed head does not raise an error.
    """
    names = set[str]()
    for match in _LINE.finditer(head):
        header = match[1].decode("latin-1").lower()
        if header in ("server", "via"):
            value = "".join(letter for letter in match[2].decode("latin-1") if letter.isprintable())[:MAX_NAME].strip()
            if value and (header == "via" or SERVER_PRODUCTS.search(value)):
                names.add(f"{value} ({header.title()})")
            continue
        names |= {f"{owner} ({header})" for start, owner in HEADER_OWNERS.items() if header.startswith(start)}
    return _one_header_each(names)


def _one_header_each(names: set[str]) -> set[str]:
    """Keep one entry per gateway: if several headers reveal the same gateway, the first entry in alphabetical order."""
    kept = dict[str, str]()
    for name in sorted(names):
        kept.setdefault(name.partition(" (")[0], name)
    return set(kept.values())
