"""What the integration tests share."""

from collections.abc import Iterator

import pytest

from servers.wire.stamps import hold_stamps


@pytest.fixture(scope="session", autouse=True)
def _kernel_stamps() -> Iterator[None]:
    """The kernel stamps packets while this socket is open, as it does in a worker."""
    sock = hold_stamps()
    yield
    if sock is not None:
        sock.close()
