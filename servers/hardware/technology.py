"""Derives hypothetical GPUs from real ones: with another technology node, memory generation or network.

The published figures are in tables in the folder `data`, which also name the sources:

- technologies.csv: logic density, speed, power and SRAM density of each node, relative to the node in the row above.
- memories.csv: bandwidth and capacity of one stack of HBM, or of one device of other memory.
- networks.csv: bandwidth of the links of one GPU, and the latency of collectives.
- gpu_technologies.csv: the node and the memory of real GPUs.

A hypothetical GPU has the area, the power and the architecture of the real GPU. It also has the same number of memory
stacks, unless the user names another number. No hypothetical GPU was compared with measurements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import log
from typing import Any

from loadgen.servers.hardware import (
    FOLDER,
    SCALINGS,
    Change,
    Gpu,
    HardwareError,
    Link,
    builtin_table,
    find_entry,
    gpu_links,
    read_number,
)

TECHNOLOGIES = "data/technologies"
MEMORIES = "data/memories"
NETWORKS = "data/networks"
GPU_TECHNOLOGIES = "data/gpu_technologies"
PROJECTED = "projected"
"""Value in the column `kind` of nodes that are not in production."""


@dataclass(frozen=True, slots=True)
class Technology:
    """A technology node. Each figure is relative to the first node of technologies.csv."""

    name: str
    density: float  # Logic per area
    speed: float  # Clock of the same circuit at the same power
    power: float  # Power of the same circuit at the same clock
    sram_density: float  # Bits of SRAM per area
    projected: bool
    source: str


@dataclass(frozen=True, slots=True)
class MemoryGeneration:
    """A memory generation. Each figure is that of one stack of HBM, or of one device of other memory."""

    name: str
    family: str  # HBM, GDDR or LPDDR
    bytes_per_s: float
    capacity_bytes: float
    source: str


@dataclass(frozen=True, slots=True)
class NetworkGeneration:
    """A generation of a network, with the link that it gives to one GPU.

    The network connects the GPUs of one machine, or GPUs in different machines if `between_machines` is True.
    """

    name: str
    between_machines: bool
    link: Link


@dataclass(frozen=True, slots=True)
class ScaledGpu:
    """A hypothetical GPU: a real GPU with another technology node, memory or network.

    `changes` lists the figures that differ from those of the real GPU.
    """

    gpu: Gpu
    changes: Sequence[Change] = ()
    limited_by: str = ""
    """`power` if the power budget lowers the clock, `area` if the area is the only limit of the number of SMs. Empty if
    the technology node is that of the original GPU."""
    notes: Sequence[str] = ()
    """Sentences on nodes that are projections."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """The technology node and the memory of a real GPU, from its row in gpu_technologies.csv."""

    technology: Technology
    memory: MemoryGeneration
    stacks: int


def technologies() -> dict[str, Technology]:
    """Return every technology node by name, the oldest first."""
    nodes = {}
    density = speed = power = sram = 1.0
    for name, row in builtin_table(FOLDER, TECHNOLOGIES).items():
        density *= read_number(name, row, "density")
        speed *= read_number(name, row, "speed")
        power *= read_number(name, row, "power")
        sram *= read_number(name, row, "sram_density")
        nodes[name] = Technology(name, density, speed, power, sram, row["kind"] == PROJECTED, str(row["source"]))
    return nodes


def technology(name: str) -> Technology:
    """Return a technology node by name, such as `5nm` or `N5`. Raises HardwareError for an unknown name."""
    return find_entry("technology", name, TECHNOLOGIES, lambda row_name, _row: technologies()[row_name])


def memory(name: str) -> MemoryGeneration:
    """Return a memory generation by name, such as `HBM3E`. Raises HardwareError for an unknown name."""
    return find_entry("memory", name, MEMORIES, _memory_from_row)


def network(name: str) -> NetworkGeneration:
    """Return a network by name, such as `NVLink 5` or `InfiniBand NDR`. Raises HardwareError for an unknown name."""
    return find_entry("network", name, NETWORKS, _network_from_row)


def known_names(table: str) -> list[str]:
    """Return the names in the first column of `table`, in the order of the rows."""
    return list(builtin_table(FOLDER, table))


def technology_names(text: str) -> list[str]:
    """Parse a list of nodes such as `12nm..3nm` or `7nm,5nm`. Raises HardwareError for an unknown node."""
    return _names(text, lambda name: technology(name).name, TECHNOLOGIES)


def memory_names(text: str) -> list[str]:
    """Return the names in `text`, a list of memories such as `HBM3,8 x HBM4`, or a range such as `HBM2E..HBM4`.

    `8 x HBM4` stands for 8 stacks of HBM4. Raises HardwareError for an invalid list.
    """
    return _names(text, _memory_name, MEMORIES)


def network_names(text: str) -> list[str]:
    """Parse a list of networks such as `NVLink 4,NVLink 5+InfiniBand XDR`. Raises HardwareError for an unknown name."""
    return _names(text, lambda name: " + ".join(network(part).name for part in name.split("+")), NETWORKS)


def scaled_gpu(
    gpu: Gpu, technology_name: str | None = None, memory_name: str | None = None, network_name: str | None = None
) -> ScaledGpu:
    """Return a hypothetical GPU with another technology node, memory generation or network.

    - Technology: the area and the power of the GPU do not change. See `_with_technology`.
    - Memory: `HBM4` keeps the number of memory stacks, and `8 x HBM4` sets it to 8. A change between HBM, GDDR and
      LPDDR requires a number.
    - Network: `NVLink 5` replaces the links within a machine, `InfiniBand NDR` replaces the links to other machines,
      and `NVLink 5+InfiniBand NDR` replaces both.

    If an argument is None, the GPU keeps this part. Raises HardwareError for an unknown name, and for a GPU whose node
    or memory is unknown.
    """
    result = ScaledGpu(gpu)
    names = []
    if technology_name:
        node = technology(technology_name)
        result = _with_technology(result, _origin(gpu), node)
        names.append(node.name)
    if memory_name:
        result = _with_memory(result, _origin(gpu), memory_name)
        names.append(_memory_name(memory_name))
    for part in (network_name or "").split("+"):
        if part.strip():
            result = _with_network(result, network(part))
            names.append(network(part).name)
    name = f"{gpu.name} ({', '.join(names)})" if names else gpu.name
    return replace(result, gpu=replace(result.gpu, name=name, changes=tuple(result.changes)))


def sort_names(text: str) -> tuple[str | None, str | None, str | None]:
    """Sort the names in `text`, a list such as `3nm, HBM4, NVLink 5`, into technology, memory and network.

    Return one text for each of these three, or None if the list has no such name. Several networks are joined with `+`.
    Raises HardwareError if a name is unknown, or if the list contains several technologies or memories.
    """
    finders: Sequence[Callable[[str], str]] = (
        lambda name: technology(name).name,
        _memory_name,
        lambda name: network(name).name,
    )
    groups: tuple[list[str], ...] = ([], [], [])
    for part in (part.strip() for part in re.split(r"[,+]", text)):
        for group, find in zip(groups, finders, strict=True):
            with suppress(HardwareError):
                group.append(find(part))
                break
        else:
            known = [*known_names(TECHNOLOGIES), *known_names(MEMORIES), *known_names(NETWORKS)]
            raise HardwareError(
                f"{part!r} is no technology node, memory or network of a hypothetical GPU: choose from "
                f"{', '.join(known)}"
            )
    nodes, memories, networks = groups
    if len(nodes) > 1 or len(memories) > 1:
        raise HardwareError(f"({text}) names several nodes or several memories: a GPU has one of each")
    return nodes[0] if nodes else None, memories[0] if memories else None, "+".join(networks) or None


def scaling_changes(technology_name: str | None, memory_name: str | None, network_name: str | None) -> list[str]:
    """Return texts that describe the change of a GPU to another technology node, memory or network.

    For example, the text for the technology node `3nm` is `technology=3nm`. An argument that is None or empty adds no
    text. The function `with_changes` accepts these texts.
    """
    values = (technology_name, memory_name, network_name)
    return [f"{name}={value}" for name, value in zip(SCALINGS, values, strict=True) if value]


def unused_networks(names: Iterable[str], *, in_machine: bool, between_machines: bool) -> list[str]:
    """Return the networks among `names`, such as `NVLink 5 + InfiniBand XDR`, over which nothing is sent.

    `in_machine` is True if GPUs of a machine communicate, and `between_machines` if machines do.
    """
    parts = [network(part) for name in names if name for part in name.split("+")]
    unused = [part.name for part in parts if not (between_machines if part.between_machines else in_machine)]
    return list(dict.fromkeys(unused))


def network_notes(changes: Iterable[str], *, in_machine: bool, between_machines: bool) -> list[str]:
    """Return a sentence for each network in `changes` over which nothing is sent. The sentences have no full stop.

    - `changes` are changes of a GPU, such as `network=NVLink 5` (see `scaling_changes`).
    - `in_machine` is True if the GPUs of a machine send data to each other.
    - `between_machines` is True if machines send data to each other.
    """
    names = [value for name, _, value in (change.partition("=") for change in changes) if name.strip() == "network"]
    unused = unused_networks(names, in_machine=in_machine, between_machines=between_machines)
    senders = {name: "machines" if network(name).between_machines else "the GPUs of a machine" for name in unused}
    return [f"--network {name} has no effect: nothing is sent between {senders[name]}" for name in unused]


def refuse_unused_networks(changes: Iterable[str], *, in_machine: bool, between_machines: bool) -> None:
    """Raise HardwareError if `changes` contains a network over which nothing is sent, such as `network=NVLink 5`.

    `in_machine` is True if the GPUs of a machine exchange data. `between_machines` is True if machines do.
    """
    for note in network_notes(changes, in_machine=in_machine, between_machines=between_machines):
        raise HardwareError(f"{note}; leave it out")


def _with_technology(scaled: ScaledGpu, origin: _Origin, node: Technology) -> ScaledGpu:
    """Return the GPU `scaled` on the technology node `node`, with an unchanged area and an unchanged power.

    `origin` contains the node of the real GPU, called the old node here. On the new node, the number of SMs grows with
    the density of logic, and the size of L2 with the density of SRAM. The clock is the highest clock at which the new
    chip draws no more power than the original chip.

    The clock is computed from three figures of the new node. All are relative to the old node:

    - `density` is the number of circuits on an equal area.
    - `speed` is the clock at which a circuit draws an equal power.
    - `power` is the power that a circuit draws at an equal clock.

    The last two figures are two points of a curve: the power of a circuit over its clock. No other points are
    published. The curve is assumed to be a power law through these two points. With power and clock relative to the old
    node:

        power of the circuit = power * clock**e,    e = log(1 / power) / log(speed)

    The new chip has `density` times as many circuits as the original chip. It draws the power of the original chip at
    this clock:

        clock = (1 / (density * power))**(1 / e)
    """
    old = origin.technology
    if node.name == old.name:
        return scaled
    gpu = scaled.gpu
    density = node.density / old.density
    speed = node.speed / old.speed
    power = node.power / old.power
    draw = density * power  # power of the whole chip at the original clock
    clock = (1 / draw) ** (log(speed) / log(1 / power))
    sms = max(1, round(gpu.sms * density))
    compute = sms / gpu.sms * clock
    # The constants of the architecture include what power does to the clock. They stay as they are, because the power
    # budget is respected above.
    architecture = replace(gpu.architecture, watts_per_TFLOP=gpu.architecture.watts_per_TFLOP / compute)
    limited_by = "power" if draw > 1 else "area"
    if limited_by == "power":
        reason = f"power is the limit: {draw:.2f} times the power at the old clock"
    else:
        reason = f"area is the limit: {draw:.2f} times the power at the old clock"
    new = replace(
        gpu,
        architecture=architecture,
        peaks={name: rate * compute for name, rate in gpu.peaks.items()},
        sms=sms,
        clock_hz=gpu.clock_hz * clock,
        l2_bytes=gpu.l2_bytes * node.sram_density / old.sram_density,
    )
    sram = node.sram_density / old.sram_density
    changes = [
        Change("SMs", f"{gpu.sms:,}", f"{sms:,}", f"{density:.3g} times the logic on the same area"),
        Change("clock", f"{gpu.clock_hz / 1e9:.2f} GHz", f"{new.clock_hz / 1e9:.2f} GHz", reason),
        Change("bf16 peak", _tera(gpu.flops_per_s, "FLOP/s"), _tera(new.flops_per_s, "FLOP/s"), "SMs and clock"),
    ]
    if gpu.l2_bytes and node.sram_density != old.sram_density:
        before, after = (f"{size / 1e6:,.0f} MB" for size in (gpu.l2_bytes, new.l2_bytes))
        changes.append(Change("L2", before, after, f"{sram:.3g} times the SRAM on the same area"))
    notes = [f"{node.name} is a projection: {node.source}"] if node.projected else []
    return ScaledGpu(new, [*scaled.changes, *changes], limited_by, [*scaled.notes, *notes])


def _with_memory(scaled: ScaledGpu, origin: _Origin, text: str) -> ScaledGpu:
    """Return the GPU `scaled` with another memory, whose name is `text`. Examples are `HBM4` and `8 x HBM4`.

    `origin` contains the memory of the real GPU. The number in `text` is the number of HBM stacks, or the number of
    devices of another type of memory. Without a number, the GPU keeps its number of stacks or devices.

    HBM, GDDR and LPDDR are different families of memory. A change to another family needs a number in `text`. Without
    the number, HardwareError is raised.

    The standard of a memory defines a data rate and a capacity. Many GPUs use only a part of both, for example 90%.
    With a new memory of the same family, the GPU uses the same part. With a memory of another family, the GPU uses the
    full data rate and capacity.
    """
    count, generation = _parse_memory(text)
    old, gpu = origin.memory, scaled.gpu
    related = generation.family == old.family
    if count is None and not related:
        raise HardwareError(
            f"{gpu.name} has {origin.stacks} x {old.name}, and {generation.name} is of another family: name a number, "
            f"such as {2 * origin.stacks} x {generation.name}"
        )
    stacks = count or origin.stacks
    if (stacks, generation.name) == (origin.stacks, old.name):
        return scaled
    rate_share = gpu.memory_bytes_per_s / (origin.stacks * old.bytes_per_s) if related else 1.0
    size_share = gpu.memory_bytes / (origin.stacks * old.capacity_bytes) if related else 1.0
    new = replace(
        gpu,
        memory_bytes_per_s=rate_share * stacks * generation.bytes_per_s,
        memory_bytes=size_share * stacks * generation.capacity_bytes,
    )
    rate = f"{stacks} x {generation.bytes_per_s / 1e9:,.4g} GB/s"
    size = f"{stacks} x {generation.capacity_bytes / 1e9:,.4g} GB"
    changes = [
        Change(
            "memory bandwidth",
            _tera(gpu.memory_bytes_per_s, "B/s"),
            _tera(new.memory_bytes_per_s, "B/s"),
            _with_share(rate, rate_share, old.name),
        ),
        Change(
            "memory",
            f"{gpu.memory_bytes / 1e9:,.0f} GB",
            f"{new.memory_bytes / 1e9:,.0f} GB",
            _with_share(size, size_share, old.name),
        ),
    ]
    return replace(scaled, gpu=new, changes=[*scaled.changes, *changes])


def _with_network(scaled: ScaledGpu, new: NetworkGeneration) -> ScaledGpu:
    gpu = scaled.gpu
    old = gpu.machine_link if new.between_machines else gpu.link
    where = "link to other machines" if new.between_machines else "link to GPUs"
    changed = replace(gpu, network=new.link) if new.between_machines else replace(gpu, link=new.link)
    before, after = (f"{link.name}, {2 * link.bytes_per_s / 1e9:,.0f} GB/s" for link in (old, new.link))
    if old == new.link:
        return scaled
    change = Change(where, before, after, "both directions together")
    return replace(scaled, gpu=changed, changes=[*scaled.changes, change])


def _with_share(text: str, share: float, memory_name: str) -> str:
    return text if abs(share - 1) < 0.005 else f"{text}, {100 * share:.0f}% of it as with {memory_name}"


def _tera(value: float, unit: str) -> str:
    return f"{value / 1e12:,.3g} T{unit}" if value < 1e15 else f"{value / 1e12:,.0f} T{unit}"


def _origin(gpu: Gpu) -> _Origin:
    """Return the technology node and the memory of the real GPU `gpu`, as gpu_technologies.csv states them.

    Raises HardwareError if the table does not contain this GPU.
    """
    rows = builtin_table(FOLDER, GPU_TECHNOLOGIES)
    row = rows.get(gpu.name)
    if row is None:
        raise HardwareError(
            f"the technology node and the memory of {gpu.name} are not known, so no other GPU can be derived from it: "
            f"choose one of {', '.join(rows)}"
        )
    return _Origin(technology(row["technology"]), memory(row["memory"]), int(read_number(gpu.name, row, "stacks")))


def original_technology(gpu: Gpu) -> tuple[str, str]:
    """Return the names of the node and of the memory generation of a real GPU.

    Raises HardwareError if gpu_technologies.csv lacks the GPU.
    """
    origin = _origin(gpu)
    return origin.technology.name, origin.memory.name


def later_memories(gpu: Gpu) -> list[str]:
    """Return the memory generation of a real GPU and the later generations of the same family.

    Raises HardwareError if gpu_technologies.csv lacks the GPU.
    """
    old = _origin(gpu).memory
    generations = [memory(name) for name in known_names(MEMORIES)]
    return [generation.name for generation in generations[generations.index(old) :] if generation.family == old.family]


def _parse_memory(text: str) -> tuple[int | None, MemoryGeneration]:
    """Parse `HBM4` or `8 x HBM4`. Return the number of stacks or None, and the memory generation."""
    match = re.fullmatch(r"\s*(?:([1-9]\d{0,2})\s*x\s*)?(\S.*?)\s*", text, re.IGNORECASE)
    if match is None:
        raise HardwareError("the name of the memory is empty: write HBM4, or 8 x HBM4")
    return int(match[1]) if match[1] else None, memory(match[2])


def _memory_name(text: str) -> str:
    count, generation = _parse_memory(text)
    return f"{count} x {generation.name}" if count else generation.name


def _names(text: str, find: Callable[[str], str], table: str) -> list[str]:
    """Parse a list of names such as `a,b..d`. Return the names as they are written in the table `table`.

    `b..d` stands for all rows of the table from `b` to `d`. If `d` comes before `b` in the table, the rows are returned
    in reverse order. `find` is a function that takes a name as the user writes it, for example in lower case, and
    returns the name as it is written in the table.
    """
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dots, last = part.partition("..")
        if not dots:
            names.append(find(part))
            continue
        rows = known_names(table)
        ends = find(first), find(last)
        if not set(ends) <= set(rows):
            raise HardwareError(f"{part}: a range has no numbers and no +: write the names one by one")
        start, end = map(rows.index, ends)
        names += rows[start : end + 1] if start <= end else rows[end : start + 1][::-1]
    if not names:
        raise HardwareError(f"{text!r} names nothing: choose from {', '.join(known_names(table))}")
    return list(dict.fromkeys(names))


def _memory_from_row(name: str, row: Mapping[str, Any]) -> MemoryGeneration:
    return MemoryGeneration(
        name,
        str(row["family"]),
        bytes_per_s=1e9 * read_number(name, row, "GBps"),
        capacity_bytes=1e9 * read_number(name, row, "GB"),
        source=str(row["source"]),
    )


def _network_from_row(name: str, row: Mapping[str, Any]) -> NetworkGeneration:
    """Return the network generation that a row of networks.csv describes.

    The column `based_on` names a link of links.csv. The network's link is a copy of that link with the bandwidth of
    `row`. If `row` states a latency (`step_us`), the copy also has this latency.
    """
    link = replace(gpu_links()[row["based_on"]], name=name, bytes_per_s=1e9 * read_number(name, row, "GBps") / 2)
    step_us = read_number(name, row, "step_us", 0)
    if step_us:
        link = replace(link, step_s=1e-6 * step_us)
    return NetworkGeneration(name, row["scope"] == "cluster", link)
