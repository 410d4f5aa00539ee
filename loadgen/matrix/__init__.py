"""The matrix: servers x hosts x models x workloads, each measured several times, in one command.

Two nouns that a single run does not need, both here. A *cell* is one server on one host with one model under one
workload; what is compared with one another are cells. A *start* is one server coming up, serving the runs of its cells,
and going down again; runs that share a start share whatever that process has warmed up.

    plan      what is to be measured: one TOML file, all mistakes at once
    (here)    which cells that makes, and in which order they are measured: pure functions of the plan and its seed
    state     what has been measured already: the run files themselves, and matrix.jsonl
    estimate  how long the rest will take
    run       measures it

The repeats of each cell are dealt to `starts` rounds. A round visits every server on every host once, in random order,
and within a start the runs of all workloads are shuffled too. So with two rounds or more whatever drifts over the hours
falls on all cells alike; with one round it does not, and only what happens within a start is averaged out (randomised
blocks: Montgomery, "Design and Analysis of Experiments", chapter 4). With equal work the leading server comes first in
each round, because the others need its output lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from loadgen.matrix.plan import Case, HostChoice, Launch, MatrixPlan, Model, Server


class Cell(NamedTuple):
    """What is compared: one server on one host with one model under one workload, by their names."""

    server: str
    host: str
    model: str
    workload: str

    @property
    def folder(self) -> Path:
        """Where its runs lie, below the matrix's folder."""
        return Path("cells") / self.host / self.model / self.server / self.workload

    def __str__(self) -> str:
        return f"{self.server} on {self.host}, {self.model}, {self.workload}"


class Repeat(NamedTuple):
    """One run of a cell; `number` counts from 1, in the order in which they are measured."""

    cell: Cell
    number: int

    @property
    def folder(self) -> Path:
        """Where this run lies, below the matrix's folder."""
        return self.cell.folder / f"repeat-{self.number}"


@dataclass(frozen=True, slots=True)
class Start:
    """One server coming up, and the runs it serves, in order."""

    number: int
    """From 1, over the whole matrix."""
    round: int
    server: Server
    host: HostChoice
    model: Model
    launch: Launch
    options: Mapping[str, Any]
    repeats: tuple[Repeat, ...]

    def __str__(self) -> str:
        return f"{self.server.name} on {self.host.name}, {self.model.name}"


def cells(plan: MatrixPlan) -> list[Cell]:
    """All cells that are measured, in the order of the plan."""
    return [cell for triple in _triples(plan) for cell in _served(plan, *triple)]


def skipped(plan: MatrixPlan) -> dict[str, str]:
    """`server on host, model` and why it is not measured."""
    found = {}
    for server, host, model in product(plan.servers, plan.hosts, plan.models):
        if reasons := [case.skip for case in _cases(plan, server, host, model) if case.skip]:
            found[f"{server.name} on {host.name}, {model.name}"] = "; ".join(reasons)
    return found


def starts(plan: MatrixPlan) -> list[Start]:
    """Every start of the matrix, in order. The same plan gives the same order."""
    random = Random(f"{plan.seed}/order")  # noqa: S311 - an order, not a secret
    numbers = Counter[Cell]()
    found: list[Start] = []
    for turn in range(1, plan.starts + 1):
        share = plan.repeats // plan.starts + (turn <= plan.repeats % plan.starts)  # repeats of a cell in this round
        triples = list(_triples(plan))
        random.shuffle(triples)
        triples.sort(key=lambda triple: triple[0].name != (plan.equal_work or triple[0].name))
        for server, host, model in triples:
            order = [cell for cell in _served(plan, server, host, model) for _ in range(share)]
            random.shuffle(order)
            repeats = []
            for cell in order:
                numbers[cell] += 1
                repeats.append(Repeat(cell, numbers[cell]))
            launch, options = server.launch or plan.launch, _options(plan, server, host, model)
            found.append(Start(len(found) + 1, turn, server, host, model, launch, options, tuple(repeats)))
    return found


def _triples(plan: MatrixPlan) -> Iterator[tuple[Server, HostChoice, Model]]:
    for triple in product(plan.servers, plan.hosts, plan.models):
        if not any(case.skip for case in _cases(plan, *triple)):
            yield triple


def _served(plan: MatrixPlan, server: Server, host: HostChoice, model: Model) -> list[Cell]:
    return [Cell(server.name, host.name, model.name, str(workload["name"])) for workload in plan.workloads]


def _cases(plan: MatrixPlan, server: Server, host: HostChoice, model: Model) -> list[Case]:
    wanted = {"server": server.name, "host": host.name, "model": model.name}
    return [case for case in plan.cases if all(getattr(case, kind) in (None, name) for kind, name in wanted.items())]


def _options(plan: MatrixPlan, server: Server, host: HostChoice, model: Model) -> dict[str, Any]:
    """The options of this start, the more particular ones winning; before all of them what a simulated server takes
    from the words of the plan."""
    found: dict[str, Any] = {}
    if (server.launch or plan.launch) == "simulated":
        named = {"gpu": host.gpu, "model_shape": model.shape}
        found = {"clock": "batching"} | {name: value for name, value in named.items() if value}
    cases = [case.options for case in _cases(plan, server, host, model)]
    for options in (plan.options, server.options, host.options, model.options, *cases):
        found |= options
    return found
