"""Tells the replicas of a server apart.

A response header may name the replica that answered. If each replica has a separate URL, the network addresses of two
URLs show whether both lead to the same replica.
"""

from __future__ import annotations

import socket
from os.path import realpath
from urllib.parse import urlsplit

from loadgen.servers.auth import hide_secrets
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.server_url import parse_server_url
from loadgen.servers.target import Address, split_unix_url

REPLICA_NAME_MAX = 80
"""Maximum number of characters of a replica's name."""

Place = tuple[Address, str, str]
"""An address, and the path and the query of the URL that leads to it."""


def replica_name(header: str) -> str:
    """Return the name of the replica that answered, or "" if the header names none.

    `header` is the value of the response header that names the replica. nginx lists every server that it has tried for
    a request, such as `10.0.0.9:80, 10.0.0.2:80`. The last server in the list has answered.
    """
    names = [name.strip() for name in header.split(",") if name.strip()]
    return one_line(hide_secrets(names[-1]), REPLICA_NAME_MAX) if names else ""


def find_places(url: str) -> frozenset[Place]:
    """Return the addresses of the server at `url`. Each address comes with the path and the query of this URL.

    The result is empty if the host name has no address.
    """
    server = parse_server_url(url)
    unix = split_unix_url(server.base)
    if unix:
        return frozenset({((int(socket.AF_UNIX), realpath(unix[0])), unix[1], server.query)})
    parts = urlsplit(server.base)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        results = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset(((int(family), address), parts.path.rstrip("/"), server.query) for family, *_, address in results)
