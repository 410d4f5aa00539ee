"""A run over several machines: `loadgen burst --distributed` on one, `loadgen worker` on the others.

    protocol        what the commands say to each other, the frames in which each talks to its own Locust process, the
                    shared token, and how far another machine's clock is ahead
    locust_process  Locust's side: sockets, heartbeats, handshakes, clock exchanges; in a process of its own
    master, worker  the two commands

LoadgenError
└── DistributedError    the machines could not begin, or one of them cannot do its part
    └── TokenError      the shared token is missing, too short or wrong
"""

from loadgen.errors import LoadgenError


class DistributedError(LoadgenError):
    """The machines could not begin, or one of them cannot do its part."""


class TokenError(DistributedError):
    """The shared token is missing, too short or wrong."""
