"""What the integration tests share."""

import socket
from collections.abc import Iterator

import pytest

from tests.support.kernel_stamps import kernel_stamps  # noqa: F401


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that listens and never answers: connections stay in its queue, and `accept` raises if there is none."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setblocking(False)
        yield sock
