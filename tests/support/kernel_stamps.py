"""A fixture of the integration and system tests: kernel timestamps of packets for all sockets of the test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadgen.servers.wire.timestamps import SocketTimestamps


@pytest.fixture(scope="session", autouse=True)
def kernel_stamps() -> Iterator[None]:
    """Keep a timestamp source open. While a source is open, as in a worker, the kernel timestamps packets."""
    source = SocketTimestamps.open()
    yield
    if source is not None:
        source.close()
