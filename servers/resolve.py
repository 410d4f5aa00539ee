"""Which server answers: the URL given, the environment's, the one on this machine's usual port, else none."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from servers.errors import UnreachableError, WrongServerError
from servers.find import TITLES, ServerFacts, probe

if TYPE_CHECKING:
    import ssl

PORTS = {"vllm": 8001, "tgi": 8002, "lightllm": 8003}
"""The ports that docker-compose.yml publishes."""

CONNECT_TIMEOUT_S = 0.2


def resolve(
    server: str,
    url: str | None,
    environ: Mapping[str, str],
    *,
    real: bool = False,
    api_key: str | None = None,
    verify: ssl.SSLContext | bool = True,
    ports: Mapping[str, int] = PORTS,
) -> ServerFacts | None:
    """Find the server, or None: then the simulated one is meant.

    `url` wins, then LOADGEN_<SERVER>_URL; what answers there must be the server named. Then the usual port on this
    machine, if the server named answers there. `real` makes finding none an error. Raises what `probe` raises.
    """
    variable = f"LOADGEN_{server.upper()}_URL"
    given = url or environ.get(variable)
    if given:
        return probe(given, server, api_key=api_key, verify=verify)
    port = ports.get(server)
    if port and _listens(port):
        try:
            return probe(f"http://127.0.0.1:{port}", server, api_key=api_key, verify=verify)
        except (UnreachableError, WrongServerError):
            if real:
                raise
    if not port:
        raise UnreachableError(f"--server {server} has no usual port", f"pass --url, or set {variable}")
    if real:
        raise UnreachableError(
            f"no {TITLES[server]} answers on port {port} of this machine", f"start it, pass --url, or set {variable}"
        )
    return None


def _listens(port: int) -> bool:
    # A plain connect keeps the common case, no server, below a millisecond: no HTTP client is imported for it.
    try:
        socket.create_connection(("127.0.0.1", port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
