"""What the integration tests share."""

from collections.abc import Iterator

import pytest

from servers.wire.stamps import SocketStamps


@pytest.fixture(scope="session", autouse=True)
def _kernel_stamps() -> Iterator[None]:
    """The kernel stamps packets while this source is open, as it does in a worker."""
    source = SocketStamps.open()
    yield
    if source is not None:
        source.close()
