"""What master and worker machines say to each other, and what each command says to its own Locust process.

    command <── frames ──> Locust process <══ Locust's messages, sealed ══> Locust process <── frames ──> command
    master                 MasterRunner                                     WorkerRunner                  worker

`Words` pass from command to command; the Locust processes seal and open them and do not read them. `Events` and
`Orders` are between a command and its own Locust process.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Worker to master: here I am."""

    version: str
    """Of loadgen. The same seed gives the same prompts in the same version only."""
    host: dict[str, Any]
    folder: str
    """Where its part files are, should it be unable to send them."""


class Assign(msgspec.Struct, tag=True, frozen=True):
    """Master to worker: what to do. Prompts are drawn from the plan's seed."""

    plan: dict[str, Any]
    """`workers` is that of all machines together, and the url is the one that the master found."""
    first: int
    """The first of its workers' numbers."""
    workers: int
    """How many of them it runs."""


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """Worker to master: it has found the server and drawn its prompts."""

    prints: list[bytes]
    """A digest of the first bytes that each of its workers will send."""
    server: dict[str, Any]
    """Who answers, as seen from there."""


class Connect(msgspec.Struct, tag=True, frozen=True):
    """Master to worker: everybody is prepared, so encode and connect. Not earlier: servers close connections that idle
    for some seconds."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Worker to master: everything is encoded and connected."""

    stamps: str


class Unable(msgspec.Struct, tag=True, frozen=True):
    """Worker to master: it cannot do what was assigned."""

    message: str
    hint: str


class Start(msgspec.Struct, tag=True, frozen=True):
    """Master to worker: begin at this instant of your CLOCK_MONOTONIC."""

    at_ns: int


class Started(msgspec.Struct, tag=True, frozen=True):
    """Worker to master: the order came this long before the instant; below zero it came too late."""

    ahead_ns: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Master to worker: end the run and keep what came."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Worker to master, twice a second: the sums of loadgen.engine.health.Counts, in its order."""

    counts: list[int]
    due: list[int]
    """Of each worker: how many of its requests had their turn."""


class Piece(msgspec.Struct, tag=True, frozen=True):
    """Worker to master: bytes of a worker's part file, from this offset on."""

    worker: int
    offset: int
    data: bytes


class Taken(msgspec.Struct, tag=True, frozen=True):
    """Master to worker: this worker's part is written down up to this offset."""

    worker: int
    offset: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """Worker to master, after its last Piece."""

    at_ns: int
    """When its last request had ended, on its own CLOCK_MONOTONIC."""
    due: list[int]
    exits: list[str]
    """Of each worker: its exit code or signal, in words."""
    interrupted: bool
    """Somebody interrupted it there."""


class Wait(msgspec.Struct, tag=True, frozen=True):
    """Master to worker: not needed now, and why. Another run may need it."""

    reason: str


class Bye(msgspec.Struct, tag=True, frozen=True):
    """Master to worker: that was all. With `kept` everything received is written down."""

    reason: str
    kept: bool


Words = (
    Hello
    | Assign
    | Prepared
    | Connect
    | Ready
    | Unable
    | Start
    | Started
    | Stop
    | Progress
    | Piece
    | Taken
    | Ended
    | Wait
    | Bye
)


class Bound(msgspec.Struct, tag=True, frozen=True):
    """Event at the master: listening."""

    port: int


class Joined(msgspec.Struct, tag=True, frozen=True):
    """Event: the other side has proven itself."""

    node: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Event: somebody has not proven itself; at the worker: this machine was not let in."""

    node: str
    reason: str


class Gone(msgspec.Struct, tag=True, frozen=True):
    """Event: the other side left, or was not heard of for too long."""

    node: str
    reason: str


class Exchanged(msgspec.Struct, tag=True, frozen=True):
    """Event at the master: stamps were exchanged. Fields as in loadgen.distributed.offsets.Sample."""

    node: str
    at_ns: int
    offset_ns: int
    round_trip_ns: int


class Measured(msgspec.Struct, tag=True, frozen=True):
    """Event at the master: the series of exchanges that was ordered is over."""

    node: str


class Heard(msgspec.Struct, tag=True, frozen=True):
    """Event: a sealed message was opened."""

    node: str
    body: bytes


Events = Bound | Joined | Refused | Gone | Exchanged | Measured | Heard


class Tell(msgspec.Struct, tag=True, frozen=True):
    """Order: seal this and send it."""

    node: str
    body: bytes


class Measure(msgspec.Struct, tag=True, frozen=True):
    """Order at the master: a series of exchanges with this machine."""

    node: str


Orders = Tell | Measure
