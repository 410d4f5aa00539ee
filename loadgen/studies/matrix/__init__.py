"""The matrix: servers x hosts x models x workloads, each measured several times, in one command.

Two nouns that a single run does not need, both here. A *cell* is one server on one host with one model under one
workload; what is compared with one another are cells. A *start* is one server coming up, serving the runs of its cells,
and going down again; runs that share a start share whatever that process has warmed up.

    (here)    what is to be measured: one TOML file, of which all mistakes, also those of the runs it leads to, are told
              at once; which cells that makes, and in which order they are measured: pure functions of plan and seed;
              and what has been measured already
    run       measures the rest, and says how long that will take

The repeats of each cell are dealt to `starts` rounds. A round visits every server on every host once, in random order,
and within a start the runs of all workloads are shuffled too. So with two rounds or more whatever drifts over the hours
falls on all cells alike; with one round it does not, and only what happens within a start is averaged out (randomised
blocks: Montgomery, "Design and Analysis of Experiments", chapter 4). A workload that is a sweep is measured once, in
the first round: it has runs and an interval of its own. With equal work the leading server comes first in each round,
because the others need its output lengths.

The state of a matrix is its files: a repeat is finished when its run file has a footer that does not say interrupted,
or its sweep has ended. Beside them lies `matrix.jsonl`, append-only, with what no run file holds:

    {"type": "plan", "plan": {...}, ...}                         the first line
    {"type": "up", "start": 3, "seconds": 41.2, "facts": {...}}  a server that came up
    {"type": "begin", "cell": {...}, "repeat": 1, "start": 3, "place": 0}   a run; place 0 is the first of its start
    {"type": "end", "cell": {...}, "repeat": 1, "seconds": 18.4}
    {"type": "failure", "cell": {...}, "repeat": 1, "kind": "LaunchError", "reason": "...", "hint": "...", "log": "..."}
    {"type": "down", "start": 3}, {"type": "resumed", ...}, {"type": "interrupted", ...}
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from loadgen.errors import PlanError
from loadgen.journal import JournalKind, JournalLine, open_journal, read_footer, read_journal
from loadgen.plan import KNOWN_BACKEND, KNOWN_ENDPOINT, Plan
from loadgen.plan_fields import from_catalog, read_plan
from loadgen.servers.launch.spec import LOCAL, Host, LaunchMethod, read_hosts
from loadgen.studies.sweep import ARRIVALS, SWEEP, Over, default_duration, parse_loads
from loadgen.studies.sweep import is_finished as sweep_finished
from loadgen.workloads.spec_syntax import WorkloadError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$"
"""Names become folders."""
MATRIX_SETTINGS = (
    *("server", "url", "model", "platform", "label", "seed", "real", "speed", "repeat", "repeats"),
    *("server_pid", "dcgm_url", "gpu_model"),
)
"""Settings of a run that the matrix makes itself."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Named(_Strict):
    """Something with a name, which alone is enough to stand for it."""

    name: str = Field(pattern=NAME_PATTERN)
    options: dict[str, Any] = {}
    """For its launches."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        given = {"name": given} if isinstance(given, str) else given
        of_kind = "server" in cls.model_fields and isinstance(given, dict) and "name" in given
        return {"server": given["name"], **given} if of_kind else given


class Server(_Named):
    """One server of the matrix; the same kind may stand there twice, under two names and with other options."""

    server: Annotated[str, AfterValidator(KNOWN_BACKEND)] = "openai"
    """Which kind it is; the name by default."""
    launch: LaunchMethod | None = None
    """How it is started; as the whole matrix by default."""
    endpoint: Annotated[str, AfterValidator(KNOWN_ENDPOINT)] | None = None


class HostChoice(_Named):
    """Where servers run: a host of the hosts file, or this machine under a platform's label."""

    platform: str = Field("", max_length=60)
    """Its label in the report; of a host that is not in the hosts file it says that this machine is meant."""
    gpu: str = ""
    """The card's name in servers/hardware/gpus.csv: for the estimate, a simulated server, and the limit in reports."""
    dcgm_url: str | None = None
    """A DCGM exporter on that host, which tells of its GPUs."""
    gpu_hour_cost: float | None = Field(None, ge=0)
    """Price of one of its GPUs for an hour: for sweeps."""


class Model(_Named):
    """A model, by the name of its folder on every host."""

    path: str = ""
    """What a server is started with instead, such as a folder of this machine or a name on a hub."""
    shape: str = ""
    """Its name in servers/hardware/models.csv: likewise."""


class SweepOptions(_Strict):
    """How the load of a workload grows: the options of `loadgen sweep`, by their names."""

    objectives: list[str] = []
    over: Over = "rate"
    rates: str | None = None
    concurrency: str | None = None
    start: float = Field(1.0, ge=1e-3)
    precision: float = Field(0.1, gt=0, lt=1)
    confidence: float = Field(0.95, gt=0, lt=1)
    max_runs: int = Field(8, ge=1, le=100)
    max_time_s: float | None = Field(None, gt=0)

    @property
    def load_dimension(self) -> Over:
        """What does: fixed loads say so themselves."""
        return "rate" if self.rates else "concurrency" if self.concurrency else self.over

    @property
    def loads(self) -> tuple[float, ...]:
        """Those that are fixed beforehand. Raises PlanError."""
        text = self.rates or self.concurrency
        return (
            parse_loads(text, f"sweep.{self.load_dimension}", whole=self.load_dimension == "concurrency")
            if text
            else ()
        )

    @property
    def max_steps(self) -> int:
        return len(self.loads) or self.max_runs


class CellOverride(_Strict):
    """What holds for some cells only: those that match every name given here."""

    server: str | None = None
    host: str | None = None
    model: str | None = None
    options: dict[str, Any] = {}
    skip: str = ""
    """Why these cells are not measured."""


class Reference(_Strict):
    """Something published elsewhere, which the report quotes as such: it is not drawn beside what was measured."""

    of: str
    says: str
    source: str


class MatrixPlan(_Strict):
    """The whole file. `run` and each workload hold settings of a run, under the names of loadgen.plan.Plan."""

    name: str = Field(pattern=NAME_PATTERN)
    servers: list[Server] = Field(min_length=1)
    hosts: list[HostChoice] = Field(default_factory=lambda: [HostChoice.model_validate("local")], min_length=1)
    models: list[Model] = Field(min_length=1)
    workloads: list[dict[str, Any]] = Field(min_length=1)
    """`name`, `catalog` where it starts from a named workload, and settings of a run; `sweep` where its load grows."""
    cases: list[CellOverride] = []
    references: list[Reference] = []
    launch: LaunchMethod = "compose"
    hosts_file: Path | None = None
    """Relative to the plan's own folder."""
    options: dict[str, Any] = {}
    """For every launch; a server's, a host's, a model's and a case's own win over them, in this order."""
    run: dict[str, Any] = {}
    repeats: int = Field(3, ge=1, le=100)
    starts: int = Field(1, ge=1, le=100)
    """Over how many starts of each server the repeats are spread. More starts see what differs between starts, and
    spread drift over time evenly; each costs the time to load a model."""
    seed: int = 0
    equal_work: str | None = None
    """A server that is measured first: the others get the output lengths that it produced."""

    @field_validator("servers", "hosts", "models", "workloads")
    @classmethod
    def _different(cls, items: list[Any]) -> list[Any]:
        names = Counter(str(item.get("name") if isinstance(item, dict) else item.name) for item in items)
        if twice := sorted(name for name, number in names.items() if number > 1):
            raise ValueError(f"{', '.join(twice)} stands there twice")
        return items

    @model_validator(mode="after")
    def _whole(self) -> MatrixPlan:
        if mistakes := dict.fromkeys(_mistakes(self)):
            raise ValueError("\n".join(mistakes))
        return self


def read_matrix_plan(path: Path) -> MatrixPlan:
    """Read a plan. Raises PlanError with one line per mistake."""
    given = read_plan(path)
    if isinstance(given.get("hosts_file"), str):
        given["hosts_file"] = path.parent / given["hosts_file"]
    try:
        return MatrixPlan(**given)
    except ValidationError as error:
        lines = [f"{path.name}: {line}" for item in error.errors() for line in _lines(item)]
        raise PlanError("\n".join(lines), "Nothing was started. Mend the plan.") from None


def resolve_hosts(plan: MatrixPlan) -> dict[str, Host]:
    """The plan's hosts with where they are, by name. Raises PlanError, or ServerError for a wrong hosts file."""
    known = {LOCAL.name: LOCAL} if plan.hosts_file is None else read_hosts(plan.hosts_file)
    if missing := [host.name for host in plan.hosts if not (host.name in known or host.platform)]:
        file = plan.hosts_file or "no hosts_file is named"
        raise PlanError(
            f"hosts: {', '.join(missing)} stands in no hosts file ({file})",
            "Add it there; or give it a platform, which says that this machine is meant.",
        )
    hosts = {}
    for each in plan.hosts:
        host = known.get(each.name) or replace(LOCAL, name=each.name)
        hosts[each.name] = replace(host, platform=each.platform or host.platform or host.name)
    return hosts


def run_settings(plan: MatrixPlan, workload: str, **owned: Any) -> Plan:
    """The plan of one run."""
    given = next(each for each in plan.workloads if each["name"] == workload)
    return Plan(**{"label": f"{plan.name}-{workload}"[:60], **plan.run, **_settings(given), **owned})


def sweep_options(plan: MatrixPlan, workload: str) -> SweepOptions | None:
    """How its load grows; None for a workload of one load."""
    given = next(each for each in plan.workloads if each["name"] == workload)
    return SweepOptions(**given["sweep"]) if "sweep" in given else None


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
    def key(self) -> dict[str, Any]:
        """As the journal names it."""
        return {"cell": self.cell._asdict(), "repeat": self.number}

    @property
    def folder(self) -> Path:
        return self.cell.folder / f"repeat-{self.number}"


class Start(NamedTuple):
    """One server coming up, and the runs it serves, in order."""

    number: int
    """From 1, over the whole matrix."""
    round: int
    server: Server
    host: HostChoice
    model: Model
    launch: LaunchMethod
    options: Mapping[str, Any]
    repeats: tuple[Repeat, ...]

    def __str__(self) -> str:
        return f"{self.server.name} on {self.host.name}, {self.model.name}"


def plan_cells(plan: MatrixPlan) -> list[Cell]:
    """All cells that are measured, in the order of the plan."""
    return [
        Cell(server.name, host.name, model.name, str(workload["name"]))
        for server, host, model, cases in _combinations(plan)
        if not any(case.skip for case in cases)
        for workload in plan.workloads
    ]


def skipped_cells(plan: MatrixPlan) -> dict[str, str]:
    """`server on host, model` and why it is not measured."""
    return {
        f"{server.name} on {host.name}, {model.name}": "; ".join(reasons)
        for server, host, model, cases in _combinations(plan)
        if (reasons := [case.skip for case in cases if case.skip])
    }


def plan_starts(plan: MatrixPlan) -> list[Start]:
    """Every start of the matrix, in order. The same plan gives the same order."""
    random = Random(f"{plan.seed}/order")  # noqa: S311 - an order, not a secret
    numbers = Counter[Cell]()
    result: list[Start] = []
    for turn in range(1, plan.starts + 1):
        share = plan.repeats // plan.starts + (turn <= plan.repeats % plan.starts)  # repeats of a cell in this round
        measured = [
            combination for combination in _combinations(plan) if not any(case.skip for case in combination[-1])
        ]
        random.shuffle(measured)
        measured.sort(key=lambda each: each[0].name != (plan.equal_work or each[0].name))
        for server, host, model, cases in measured:
            order = [
                str(workload["name"])
                for workload in plan.workloads
                for _ in range(int(turn == 1) if "sweep" in workload else share)
            ]
            if not order:
                continue
            random.shuffle(order)
            repeats = []
            for workload in order:
                cell = Cell(server.name, host.name, model.name, workload)
                numbers[cell] += 1
                repeats.append(Repeat(cell, numbers[cell]))
            launch, options = server.launch or plan.launch, _options(plan, server, host, model, cases)
            result.append(Start(len(result) + 1, turn, server, host, model, launch, options, tuple(repeats)))
    return result


_CELL = msgspec.defstruct("JournalCell", [(name, str) for name in Cell._fields], forbid_unknown_fields=True)
_RUN = ("cell", _CELL), ("repeat", int)
MATRIX = JournalKind(
    "matrix",
    {
        "up": [("start", int), ("seconds", float), ("facts", JournalLine)]
        + [(name, str) for name in ("server", "host", "model")],
        "begin": [*_RUN, ("start", int), ("place", int)],
        "end": [*_RUN, ("seconds", float)],
        "failure": [*_RUN, ("kind", str), ("reason", str), ("hint", str), ("log", str)],
    },
)
journal, read_lines = partial(open_journal, MATRIX), partial(read_journal, MATRIX)


def is_finished(folder: Path, repeat: Repeat) -> bool:
    """Whether this run has been measured: its file ends in a footer that does not say interrupted, or its sweep has
    ended."""
    if (folder / repeat.folder / SWEEP.file).is_file():
        return sweep_finished(folder / repeat.folder)
    footer = read_footer(folder / repeat.folder)
    return footer is not None and not footer.interrupted


def newest_lines(lines: Sequence[JournalLine], *kinds: str) -> dict[Repeat, JournalLine]:
    """Of each run its newest line of these kinds."""
    return {Repeat(Cell(**line["cell"]), int(line["repeat"])): line for line in lines if line["type"] in kinds}


def _settings(workload: Mapping[str, Any]) -> dict[str, Any]:
    """A workload's own settings of a run upon those of the catalog, which has a label that the matrix replaces."""
    base = from_catalog(str(workload["catalog"])) if "catalog" in workload else {}
    base.pop("label", None)
    settings = base | {key: value for key, value in workload.items() if key not in ("name", "catalog", "sweep")}
    if "sweep" in workload:
        settings |= default_duration(settings) | {
            "arrivals": ARRIVALS[SweepOptions(**workload["sweep"]).load_dimension].format(1)
        }
    return settings


def _mistakes(plan: MatrixPlan) -> Iterator[str]:
    """What no single field shows."""
    names = {kind: [each.name for each in getattr(plan, f"{kind}s")] for kind in ("server", "host", "model")}
    for case in plan.cases:
        for kind, known in names.items():
            if (name := getattr(case, kind)) is not None and name not in known:
                yield f"cases: there is no {kind} {name!r}; choose {', '.join(known)}"
        if not case.skip and not case.options:
            yield "cases: a case without options and without skip says nothing"
    if plan.starts > plan.repeats:
        yield f"starts: {plan.repeats} repeats cannot be spread over {plan.starts} starts"
    if plan.equal_work is not None and plan.equal_work not in names["server"]:
        yield f"equal_work: there is no server {plan.equal_work!r}; choose {', '.join(names['server'])}"
    for where, settings in (
        ("run", plan.run),
        *((f"workload {workload.get('name')}", workload) for workload in plan.workloads),
    ):
        yield from (f"{where}: {name} is what the matrix sets itself" for name in MATRIX_SETTINGS if name in settings)
    for workload in plan.workloads:
        yield from _workload_mistakes(plan, workload)
    yield from _speed_mistakes(plan)


def _speed_mistakes(plan: MatrixPlan) -> Iterator[str]:
    """Find servers at different speeds: a matrix compares its cells, and prices are of real time."""
    speeds = set()
    for server, host, model, cases in _combinations(plan):
        if not any(case.skip for case in cases):
            simulated = (server.launch or plan.launch) == "simulated"
            speed = _options(plan, server, host, model, cases).get("speed") if simulated else None
            speeds.add(float(speed) if isinstance(speed, int | float) else 1.0)
    if len(speeds) > 1:
        text = " and ".join(f"{speed:g}" for speed in sorted(speeds))
        yield f"options.speed: servers at {text} times speed cannot be compared; give all of them one speed"
    priced = any(host.gpu_hour_cost is not None for host in plan.hosts)
    swept = any("sweep" in workload for workload in plan.workloads)
    if priced and swept and speeds - {1.0}:
        yield "hosts: gpu_hour_cost is of real time; leave it out, or simulate at options.speed 1"


def _workload_mistakes(plan: MatrixPlan, workload: Mapping[str, Any]) -> Iterator[str]:
    name = workload.get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        yield f"workloads: each needs a name such as burst, not {name!r}"
        return
    where = f"workload {name}"
    if "sweep" in workload and (mistakes := list(_sweep_mistakes(plan, workload))):
        yield from (f"{where}: {line}" for line in mistakes)
        return
    try:
        settings = plan.run | _settings(workload)
        Plan(**{"server": "tgi"} | {key: value for key, value in settings.items() if key not in MATRIX_SETTINGS})
    except WorkloadError as error:
        yield f"{where}: {error}; {error.hint}"
    except PlanError as error:
        yield from (f"{where}: {line}" for line in str(error).splitlines())


def _sweep_mistakes(plan: MatrixPlan, workload: Mapping[str, Any]) -> Iterator[str]:
    try:
        swept = SweepOptions.model_validate(workload["sweep"])
        if swept.rates and swept.concurrency:
            yield "sweep.rates and sweep.concurrency are two sweeps; name one of them"
        elif not swept.objectives and not swept.loads:
            yield "sweep.objectives is missing; or name loads: rates or concurrency"
    except PlanError as error:
        yield f"{error}; {error.hint}"
    except ValidationError as error:
        yield from (f"sweep.{line}" for item in error.errors() for line in _lines(item))
    if "arrivals" in plan.run or "arrivals" in workload:
        yield "arrivals is what a sweep sets itself"
    if plan.equal_work is not None:
        yield "a sweep gives no lengths for equal_work; make it a matrix of its own"


def _lines(item: Any) -> list[str]:
    """Of one mistake that pydantic found."""
    where = ".".join(str(part) for part in item["loc"])
    match item["type"]:
        case "extra_forbidden":
            return [f"{where}: there is no such setting"]
        case "missing":
            return [f"{where} is missing"]
        case "literal_error":
            return [f"{where}: {item['input']!r} is unknown; choose {item['ctx']['expected']}"]
    said = str(item["msg"]).removeprefix("Value error, ").replace("unknown; ", f"{item['input']!r} is unknown; ")
    return [f"{where}: {line}" if where else line for line in said.splitlines()]


def _combinations(plan: MatrixPlan) -> Iterator[tuple[Server, HostChoice, Model, list[CellOverride]]]:
    """Every server on every host with every model, in the order of the plan, and the cases that speak of it."""
    for server, host, model in product(plan.servers, plan.hosts, plan.models):
        names = {"server": server.name, "host": host.name, "model": model.name}
        cases = [case for case in plan.cases if all(getattr(case, kind) in (None, names[kind]) for kind in names)]
        yield server, host, model, cases


def _options(
    plan: MatrixPlan, server: Server, host: HostChoice, model: Model, cases: list[CellOverride]
) -> dict[str, Any]:
    """The options of this start, the more particular ones winning; before all of them what a simulated server takes
    from the words of the plan."""
    result: dict[str, Any] = {}
    if (server.launch or plan.launch) == "simulated":
        named = {"gpu": host.gpu, "model_shape": model.shape}
        result = {"clock": "batching"} | {name: value for name, value in named.items() if value}
    for options in (plan.options, server.options, host.options, model.options, *(case.options for case in cases)):
        result |= options
    return result
