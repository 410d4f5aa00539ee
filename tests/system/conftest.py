"""The fixture of the integration tests, for the system tests."""

from tests.support.kernel_stamps import kernel_stamps  # noqa: F401
