"""A run over several machines: `loadgen burst --distributed` on one, `loadgen worker` on the others.

    protocol        the messages between the commands, the frames between a command and its Locust process, the
                    shared token, and the clock exchange
    locust_process  Locust's side: sockets, heartbeats, handshakes and clock exchanges, in a separate process
    master, worker  the two commands

LoadgenError
└── DistributedError    the run cannot begin, or a machine cannot do its part
    └── TokenError      the shared token is missing, too short or wrong
"""

from loadgen.errors import LoadgenError


class DistributedError(LoadgenError):
    """The run cannot begin, or a machine cannot do its part."""


class TokenError(DistributedError):
    """The shared token is missing, too short or wrong."""
