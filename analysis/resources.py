"""Of a run's summary what is known of machines: memory, the server's counters, clocks. See `analysis.summary`."""

from __future__ import annotations

import msgspec


class MemoryLevels(msgspec.Struct, kw_only=True):
    """Bytes in use of one thing, from one reading per second."""

    of: str
    """`GPU 0`, `process 123` or `host`."""
    idle_bytes: int | None
    """Before the first request."""
    loaded_bytes: int | None
    """After the last."""
    peak_bytes: int | None
    """The largest in between."""
    readings: int


class GpuMemory(MemoryLevels, kw_only=True):
    """Memory of a GPU."""

    name: str
    total_bytes: int | None


class ProcessMemory(MemoryLevels, kw_only=True):
    """Memory of a process, on a GPU or the host."""

    on: str
    """`GPU 0` or `host`."""
    name: str


class HostMemoryLevels(MemoryLevels, kw_only=True):
    """Memory of the host."""

    total_bytes: int | None


class KvCache(msgspec.Struct, kw_only=True):
    """The share of the server's KV cache in use, by its own gauge."""

    idle_share: float | None
    mean_share: float | None
    peak_share: float | None
    readings: int
    tokens: int | None
    """How many fit into it."""


class MemoryReserved(msgspec.Struct, kw_only=True):
    """How much of a card the engine takes when it starts, whatever the load."""

    share: float | None
    """By the server's own word."""
    note: str


class Memory(msgspec.Struct, kw_only=True):
    """Memory before, during and after the run."""

    gpus: list[GpuMemory]
    processes: list[ProcessMemory]
    host: HostMemoryLevels | None
    kv_cache: KvCache | None
    taken_at_start: MemoryReserved | None
    not_measured: dict[str, str]
    """What could not be read, and why."""
    gaps: dict[str, dict[str, int]]
    """By source, how many readings failed for which reason."""


class CounterCheck(msgspec.Struct, kw_only=True):
    """What the server counted over the run, warm-up included, against the client's count.

    Of requests that are not complete nobody knows what the server counted: the client's count lies between `client`
    and `client_most` then, and `difference` is that to the nearer end."""

    server: int
    client: int | None = None
    client_most: int | None = None
    difference: int | None = None
    agree: bool | None = None
    """None where there is nothing to compare; `why` says so."""
    resets: int
    """How often the server began to count anew."""
    why: str = ""


class MachineClock(msgspec.Struct, kw_only=True):
    """One machine of a run over several, and how well its clock is known against the master's."""

    name: str
    workers: list[int]
    requests: int
    complete: int
    offset_s: float
    drift_s: float
    uncertainty_s: float
