"""Calls beside the load: one JSON question, one JSON answer, and errors that say what to do."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from servers.errors import UnauthorizedError, UnreachableError

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 10.0


def open_client(url: str, api_key: str | None, verify: ssl.SSLContext | bool) -> httpx.Client:
    """Open a client whose paths count from `url`. Proxy settings of the environment are not followed: they would
    have a proxy measured."""
    import httpx

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    tls = verify if url.startswith("https:") else False  # a context that nobody uses takes 20 ms to make
    return httpx.Client(base_url=url, headers=headers, verify=tls, timeout=TIMEOUT_S, trust_env=False)


def call(client: httpx.Client, path: str, body: object = None) -> tuple[int, Any]:
    """GET `path`, or POST `body` to it: HTTP status and JSON, which is None when the answer is not JSON.

    Raises UnreachableError and UnauthorizedError.
    """
    import httpx

    try:
        answer = client.get(path) if body is None else client.post(path, json=body)
    except httpx.TransportError as error:
        raise _unreachable(client, error) from error
    if answer.status_code in (401, 403):
        raise UnauthorizedError(
            f"{client.base_url} answers {answer.status_code} to {path}: it wants an API key, or another one",
            "put the key into the environment variable that --api-key-env names (LOADGEN_API_KEY)",
        )
    try:
        return answer.status_code, answer.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return answer.status_code, None


def _unreachable(client: httpx.Client, error: Exception) -> UnreachableError:
    import httpx

    url = str(client.base_url)
    causes = list(_causes(error))
    if isinstance(error, httpx.TimeoutException):
        return UnreachableError(f"{url} did not answer within {TIMEOUT_S:g} s", "is the server still loading?")
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return UnreachableError(f"{url}: no such host", "check the host name in --url")
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return UnreachableError(f"{url}: {error}", "pass the authority with --ca-file, or --insecure to skip the check")
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return UnreachableError(f"{url} does not speak TLS: {error}", "use http:// instead of https://")
    if isinstance(error, httpx.ConnectError):
        return UnreachableError(
            f"nothing listens at {url}: {error}", "start the server, or check host and port in --url"
        )
    return UnreachableError(f"{url} does not answer in HTTP: {error or type(error).__name__}", "check --url")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__
