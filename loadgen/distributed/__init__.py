"""Distributed runs: `loadgen burst --distributed` runs on one machine, `loadgen worker` on the others.

    protocol        the messages between the commands, the frames between a command and its Locust process, the
                    shared token, and the clock exchange.
    locust_process  the Locust process of a command: sockets, heartbeats, handshakes and clock exchanges.
    master, worker  the two commands.

LoadgenError
└── DistributedError    the run cannot begin, or a machine cannot carry out its share of the run
    └── TokenError      the shared token is missing, too short or wrong
"""

from loadgen.errors import LoadgenError


class DistributedError(LoadgenError):
    """A distributed run cannot begin, or one of its machines cannot send its part of the requests."""


class TokenError(DistributedError):
    """The shared token is missing, too short or wrong."""
