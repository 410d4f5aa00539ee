"""Reads the URL of a server in the forms that users paste, and splits it into base, query and endpoint.

Examples:

    Pasted text                            Result
    gpu-host:8000                          base http://gpu-host:8000
    http://h:8000/v1/chat/completions      base http://h:8000, endpoint chat
    https://h/base/v1/?api-version=1#top   base https://h/base, query api-version=1
    unix:/run/vllm.sock                    base unix:/run/vllm.sock (a Unix socket)
    unix:/run/vllm.sock:/base/v1           base unix:/run/vllm.sock:/base
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from loadgen.servers.auth import normalise_url, require_no_credentials
from loadgen.servers.backends import BACKENDS
from loadgen.servers.target import UNIX_SCHEME

API_PATH = "/v1"
"""Path of the OpenAI routes below the base of a server."""
PAGES = (f"{API_PATH}/models", "/metrics", "/health", "/docs", "/openapi.json")
"""Other pages of servers that users paste from a browser."""
UNIX_PATH_BYTES = 107
"""Maximum length of the path of a Unix socket in bytes (sun_path of unix(7), without the final zero byte)."""
_GENERATE = ("/generate", "generate")
_SCHEME = re.compile(r"(?i)(https?):?/*(?<=[:/])(?=[^/:])")
_OTHER_SCHEME = re.compile(r"(?i)[a-z][a-z\d+.-]*:/")
_HOST_AND_PORT = re.compile(r"(?P<host>\[[\da-fA-F:.]+\]|[\w-]+(?:\.[\w-]+)*\.?)(?::(?P<port>\d{1,5}))?(?=[/?#]|$)")
_PRIVATE_DOMAINS = (".local", ".internal", ".lan", ".localhost", ".svc", ".test")


_AZURE_HOST = re.compile(r"(?i)\.(?:openai|cognitiveservices|services\.ai)\.azure\.(?:com|us|cn)\.?")
_AZURE_DEPLOYMENT = re.compile(r"/openai/deployments/([^/?]+)")
AZURE_VERSION_QUERY = "api-version"
"""Name of the query field that Azure OpenAI requires on every request to a deployment."""


class ServerUrl(NamedTuple):
    """A server's URL, split into the parts that loadgen uses."""

    base: str
    """Base of all paths, without a trailing slash and without `/v1`."""
    query: str = ""
    """Query to send with every request. Empty: none."""
    endpoint: str = ""
    """Endpoint that the URL names, such as `chat`. Empty: the URL names no endpoint."""

    @property
    def url(self) -> str:
        """The base URL with the query, if there is a query."""
        return f"{self.base}?{self.query}" if self.query else self.base


def parse_server_url(text: str) -> ServerUrl:
    """Split the URL of a server. A missing scheme is added, and the path of an endpoint or page is removed.

    Raises ValueError for text that cannot be a URL, and SecretError for a URL with credentials."""
    text = require_no_credentials(text.strip().strip("<>\"'`"))
    if re.search(r"[\x00-\x20\x7f]", text):
        raise ValueError("must not contain spaces or control characters")
    if text.lower().startswith(UNIX_SCHEME):
        return _parse_unix_url(text)
    address, _, query = _with_scheme(text).partition("#")[0].partition("?")
    plain = urlsplit(normalise_url(address))
    if not query.isascii():
        raise ValueError("may end in a query, in ASCII (write ü as %C3%BC)")
    path = re.sub("/{2,}", "/", plain.path).rstrip("/")
    suffix, endpoint = next(
        ((suffix, endpoint) for suffix, endpoint in _endpoint_paths() if path.endswith(suffix)), ("", "")
    )
    if not suffix:
        suffix = next((page for page in PAGES if path.endswith(page)), "")
    path = path.removesuffix(suffix).removesuffix(API_PATH).rstrip("/")
    return ServerUrl(urlunsplit((plain.scheme, plain.netloc, path, "", "")), query, endpoint)


def _parse_unix_url(text: str) -> ServerUrl:
    """Parse the URL of a server that listens on a Unix socket, such as `unix:/run/vllm.sock:/v1/completions`.

    The URL consists of the path of the socket, a colon, and the path of the requests. The second path may be missing.
    Raises ValueError if the first path cannot be that of a socket.
    """
    address, question_mark, query = text[len(UNIX_SCHEME) :].partition("?")
    socket_path, _, http_path = address.partition(":/")
    socket_path = re.sub("^/{2,}", "/", socket_path)
    if not socket_path.startswith("/"):
        raise ValueError("must name the socket with its full path: unix:/PATH")
    if len(socket_path.encode()) > UNIX_PATH_BYTES:
        raise ValueError(f"must name a socket whose path has at most {UNIX_PATH_BYTES} bytes")
    server = parse_server_url(f"http://localhost/{http_path}{question_mark}{query}")
    base_path = urlsplit(server.base).path
    base = f"{UNIX_SCHEME}{socket_path}" + (f":{base_path}" if base_path else "")
    return ServerUrl(base, server.query, server.endpoint)


def azure_deployment(url: str) -> str:
    """Return the name of the Azure OpenAI deployment in a URL, or "" if the URL names none.

    Gateways in front of Azure use such paths too: `https://gateway/openai/deployments/NAME`."""
    deployment = _AZURE_DEPLOYMENT.search(url)
    return unquote(deployment[1]) if deployment else ""


def takes_azure_key(url: str) -> bool:
    """Return True if the server at `url` takes the API key in Azure's header `api-key`."""
    host = "" if url.startswith(UNIX_SCHEME) else parse_host(url)
    return bool(azure_deployment(url) or _AZURE_HOST.search(host))


def parse_host(url: str) -> str:
    """Return the host name in a URL, or "" if there is none. The URL may lack the scheme, as in `gpu-host:8000`."""
    with suppress(ValueError):
        return urlsplit(_with_scheme(url.strip())).hostname or ""
    return ""


def check_server_url(text: str) -> str:
    """Return the URL without surrounding spaces. Raises the errors of `parse_server_url` for an invalid URL."""
    parse_server_url(text)
    return text.strip()


def describe_repair(text: str, address: ServerUrl) -> str:
    """Return one line about what `parse_server_url` changed in a URL, or "" if it changed nothing important.

    `text` is the URL as the user wrote it, and `address` is the result. A trailing slash and a trailing `/v1` are part
    of many base URLs, so removing them is not reported.
    """
    if address == ServerUrl(text.rstrip("/").removesuffix(API_PATH).rstrip("/")):
        return ""
    endpoint = f", endpoint {address.endpoint}" if address.endpoint else ""
    query = f", with ?{address.query} on every request" if address.query else ""
    return f"{text}: using {address.base}{endpoint}{query}"


def fixed_number(urls: Sequence[str]) -> int | None:
    """Return the number of servers at these URLs, or None if the number may change during a run.

    The number is fixed if every host is an IP address or a Unix socket. A host name may get more addresses later.
    """
    if all(url.lower().startswith(UNIX_SCHEME) or _is_ip_address(parse_host(url)) for url in urls):
        return len(urls)
    return None


def has_fixed_address(url: str) -> bool:
    """Return True if the host of a URL is an IP address, `localhost` or a Unix socket.

    Two URLs with such hosts lead to the same server if they have the same address. The result is False for any other
    host name, because a gateway at one address can then choose the server by the host name.
    """
    host = parse_host(url)
    return url.lower().startswith(UNIX_SCHEME) or host == "localhost" or _is_ip_address(host)


def _is_ip_address(host: str) -> bool:
    """Return True if the host is an IPv4 or IPv6 address, without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _with_scheme(text: str) -> str:
    """Return the URL with `http://` or `https://` at its start. A missing scheme is added, a doubled scheme removed.

    Text without a scheme must begin in one of these ways:

    - a port number such as `8000`, which means this machine
    - `localhost`, an IPv6 address in brackets, or a name with a dot
    - any name with a port, such as `gpu-host:8000`

    Raises ValueError for other text. Port 443 and public host names without a port get https, all other hosts get http.
    """
    scheme = _SCHEME.match(text)
    if scheme:
        rest = text[scheme.end() :]
        # http://http://host results from pasting a URL after a prefix that was already in the input field.
        return _with_scheme(rest) if "://" in rest[:8] else f"{scheme[1].lower()}://{rest}"
    if text.lower().startswith(("http://", "https://")):
        return text.lower()  # without a host, so that the caller refuses it
    text = text.removeprefix("//")
    local = re.match(r":?(\d{2,5})(?=/|$)", text)
    if local:
        return f"http://127.0.0.1:{local[1]}{text[local.end() :]}"
    host = None if _OTHER_SCHEME.match(text) else _HOST_AND_PORT.match(text)
    if not host or not (host["port"] or "." in host["host"] or host["host"] in ("localhost",) or "[" in host["host"]):
        raise ValueError("must start with http:// or https://")
    secure = host["port"] == "443" or (host["port"] is None and _is_public(host["host"]))
    return f"{'https' if secure else 'http'}://{text}"


def _is_public(host: str) -> bool:
    """Return True if `host` looks like a public host name. Such a name has dots and no private ending, such as
    `.local`.

    Return False for an IP address.
    """
    with suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return False
    return "." in host and not host.endswith(_PRIVATE_DOMAINS)


def _endpoint_paths() -> list[tuple[str, str]]:
    """Return pairs (end of the URL path, name) for the endpoints of all backends, longest path first."""
    dialects = (dialect for backend in BACKENDS.values() for dialect in backend.dialects.values())
    paths = {dialect.path.removeprefix(API_PATH): dialect.endpoint for dialect in dialects}
    return sorted([*paths.items(), _GENERATE], key=lambda pair: -len(pair[0]))
