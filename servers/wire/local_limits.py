"""Explains connection errors that the client's own machine causes, and how to fix them.

A load test must not blame the server for such errors. Code that opens connections raises a LocalLimitError in place of
the OSError. Requests that fail with a LocalLimitError have the error kind `client_limit` and make the run invalid.

An error is local if the kernel returns it at once, before it sends a packet: no free port, no free file descriptor, no
route, or no permission. "No route to host" can also be reported later. In that case, the network or the server is the
cause. The cause of "Connection refused" is always the network or the server.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from loadgen.servers.errors import LocalLimitError
from loadgen.servers.target import Address, address_text

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
PORT_RANGE_DEFAULT = (32_768, 60_999)
"""The default of Linux, for systems without the file PORT_RANGE."""
FILE_MAX = Path("/proc/sys/fs/file-max")
CONNECTED = (0, errno.EINPROGRESS, errno.EISCONN)


def port_range() -> tuple[int, int]:
    """Return the first and the last local port that this machine uses for outgoing connections."""
    with suppress(OSError, ValueError):
        first, last = map(int, PORT_RANGE.read_text("ascii").split())
        return first, last
    return PORT_RANGE_DEFAULT


def _no_port(_: Address) -> str:
    first, last = port_range()
    return (
        f"this machine has no free local port: net.ipv4.ip_local_port_range is {first} to {last}, which allows "
        f"{last - first + 1:,} connections to one address, closing ones (TIME_WAIT) included. Widen it: "
        "sysctl -w net.ipv4.ip_local_port_range='1024 65535'. Or have fewer requests in flight"
    )


def _no_file(_: Address) -> str:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"this process has no free file: {soft:,} open files are allowed. Raise ulimit -n, or use more --workers"


def _no_file_on_machine(_: Address) -> str:
    limit = ""
    with suppress(OSError):
        limit = f" ({FILE_MAX.read_text('ascii').strip()})"
    return (
        f"this machine has no free file: fs.file-max{limit} is reached. Raise it with sysctl, or close other programs"
    )


def _no_route(address: Address) -> str:
    server = address_text(address)
    return f"this machine has no route to {server}. Check `ip route get {server}`, its network and VPN, and --url"


def _no_memory(_: Address) -> str:
    return "this machine has no memory for more sockets. Raise net.ipv4.tcp_mem, or have fewer requests in flight"


def _not_permitted(address: Address) -> str:
    server = address_text(address)
    return (
        f"this machine does not permit connections to {server}. Check its firewall (nft, iptables), routes and sandbox"
    )


def _no_family(address: Address) -> str:
    family = "IPv6" if address[0] == socket.AF_INET6 else "IPv4"
    return f"this machine has no {family} address from which it could reach {address_text(address)}"


_EXPLAIN: dict[int, Callable[[Address], str]] = {
    errno.EADDRNOTAVAIL: _no_port,
    errno.EMFILE: _no_file,
    errno.ENFILE: _no_file_on_machine,
    errno.ENETUNREACH: _no_route,
    errno.EHOSTUNREACH: _no_route,
    errno.ENETDOWN: _no_route,
    errno.EINVAL: _no_route,  # a blackhole route
    errno.ENOBUFS: _no_memory,
    errno.ENOMEM: _no_memory,
    errno.EACCES: _not_permitted,
    errno.EPERM: _not_permitted,
    errno.EAFNOSUPPORT: _no_family,
}
_NEVER_REMOTE = (errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAFNOSUPPORT)
"""Errors that no packet from the network can cause."""
NO_BUFFER_ERRORS = (errno.ENOBUFS, errno.ENOMEM)
"""Errors of a `send` call that this machine causes."""


def explain_local_limit(error: OSError, address: Address) -> OSError:
    """Return a LocalLimitError that explains how to fix `error`, if a limit of this machine caused the error.

    The kernel returned `error` immediately when a connection to `address` was opened. If a limit of this machine cannot
    cause an error of this type, the error is returned unchanged.
    """
    explain = _EXPLAIN.get(error.errno or 0)
    if explain is None or isinstance(error, LocalLimitError):
        return error
    if error.errno == errno.EADDRNOTAVAIL and not _has_source(address):
        explain = _no_family
    return LocalLimitError(error.errno, f"{os.strerror(error.errno or 0)}: {explain(address)}")


def explain_late_error(error: OSError, address: Address) -> OSError:
    """Return a LocalLimitError if this machine caused a connection error, otherwise return the error unchanged.

    The kernel has reported the error some time after the connection attempt, so the network may also be the cause. To
    find out, the function tries to connect again. If the kernel reports the same error at once, this machine is the
    cause. Some types of error never come from the network.
    """
    if error.errno not in _EXPLAIN:
        return error
    if error.errno in _NEVER_REMOTE or _refused_at_once(address) == error.errno:
        return explain_local_limit(error, address)
    return error


def _refused_at_once(address: Address) -> int:
    """Start to connect, and return the error number if the kernel refuses at once, otherwise 0.

    At once means before the kernel sends a packet.
    """
    family, peer = address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            code = sock.connect_ex(peer)
    except OSError as error:
        return error.errno or 0
    return 0 if code in CONNECTED else code


def _has_source(address: Address) -> bool:
    """Return True if this machine has an address from which it can reach the server.

    The function connects a UDP socket, which requires a route and a source address but no free TCP port."""
    family, peer = address
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(peer)
        return True
    return False


def local_limit_of_host(host: str, port: int, error: OSError) -> LocalLimitError | None:
    """Return a LocalLimitError if this machine caused a failure to connect to a host, otherwise None.

    `error` is the error of the failed attempt. To find the cause, the function tries to connect to each address of the
    host. If a connection to at least one address can be started, this machine is not the cause.
    """
    try:
        results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        no_file = out_of_files()  # resolving a name opens files
        if no_file is None:
            return None
        results = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]
        error = no_file
    else:
        if error.errno not in _EXPLAIN:
            return None
    limits = []
    for family, _, _, _, peer in results:
        address = int(family), tuple(peer)
        code = _refused_at_once(address) or (error.errno if error.errno in _NEVER_REMOTE else 0)
        local = explain_local_limit(OSError(code, os.strerror(code or 0)), address)
        if not isinstance(local, LocalLimitError):
            return None
        limits.append(local)
    return limits[0] if limits else None


def out_of_files() -> OSError | None:
    """Return the error if this process cannot open another file descriptor, or None if it can."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error if error.errno in (errno.EMFILE, errno.ENFILE) else None
    return None
