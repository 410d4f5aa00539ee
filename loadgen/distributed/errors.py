"""What can go wrong between machines.

LoadgenError
└── DistributedError    the machines could not begin, or one of them cannot do its part
    ├── TokenError      the shared token is missing, too short or wrong
    └── LocustError     Locust is not installed, or its process ended on its own
"""

from __future__ import annotations

from loadgen.errors import LoadgenError


class DistributedError(LoadgenError):
    """The machines could not begin, or one of them cannot do its part."""


class TokenError(DistributedError):
    """The shared token is missing, too short or wrong."""


class LocustError(DistributedError):
    """Locust is not installed, or its process ended on its own."""
