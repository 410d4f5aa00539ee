"""What the integration tests share."""

import socket
from collections.abc import Iterator

import pytest

from loadgen.servers.wire.timestamps import SocketTimestamps


@pytest.fixture(scope="session", autouse=True)
def _kernel_stamps() -> Iterator[None]:
    """The kernel stamps packets while this source is open, as it does in a worker."""
    source = SocketTimestamps.open()
    yield
    if source is not None:
        source.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that listens and never answers: connections stay in its queue, and `accept` raises if there is none."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setblocking(False)
        yield sock
