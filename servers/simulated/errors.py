"""What can be wrong with what a simulated server is told.

SimulatedError
├── ConfigError     a value that no simulated server can work with
├── FaultError      a fault that is not written as docs/simulated.md says
└── StartError      the child process did not come up
"""

from __future__ import annotations


class SimulatedError(ValueError):
    """A mistake of the person who started the simulated server; the message says what to change."""


class ConfigError(SimulatedError):
    """Lists every mistake in a SimulatedConfig."""


class FaultError(SimulatedError):
    """A fault that does not exist or is written wrongly."""


class StartError(SimulatedError):
    """A simulated server in a child process did not come up; the message holds its last words."""
