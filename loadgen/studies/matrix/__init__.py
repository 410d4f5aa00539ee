"""A matrix measures every combination of servers, hosts, models and workloads, with several repeats, in one command.

Two terms are specific to a matrix:

- A *cell* is one combination: one server on one host with one model under one workload. The report compares cells.
- A *start* is one launch of a server on one host with one model. The runs of all workloads follow one another on this
  warm server, which is then stopped.

This package consists of these modules:

    __init__  the plan, its cells, the order of the starts, and which repeats are finished.
    run       starts the servers and executes the remaining runs.
    estimate  predicts how long the remaining runs take.
    result    reads the files of a matrix and writes its results.

The repeats of a cell are spread over several rounds. The field `starts` of the plan is the number of rounds.

- A round has one start for every combination of server, host and model. The order of the starts is random.
- Within a start, the order of the workloads is random.
- With two or more rounds, a slow drift of the machines affects all cells alike. With one round, only changes within a
  start average out. This is a randomised block design (Montgomery, "Design and Analysis of Experiments", chapter 4).
- A sweep is measured once, in the first round, because a sweep consists of several runs and has a confidence interval.
- The setting `equal_work` names a server. This server comes first in each round, because the other servers must
  generate responses of the same lengths.

The state of a matrix is stored in its files. A repeat is finished if its run file has a footer that does not say
"interrupted", or if its sweep has ended. The file `matrix.jsonl` contains what the run files do not show. Lines are
appended to it, and never change:

    {"type": "plan", "plan": {...}, ...}                         the first line.
    {"type": "up", "start": 3, "seconds": 41.2, "facts": {...}}  the server of start 3 is ready.
    {"type": "begin", "cell": {...}, "repeat": 1, "start": 3, "place": 0}   a run begins, the first one of start 3.
    {"type": "end", "cell": {...}, "repeat": 1, "seconds": 18.4}
    {"type": "failure", "cell": {...}, "repeat": 1, "kind": "LaunchError", "reason": "...", "hint": "...", "log": "..."}
    {"type": "down", "start": 3}, {"type": "resumed", ...}, {"type": "interrupted", ...}
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from loadgen.analysis.prices import HINT, parse_price
from loadgen.engine.resolve_server import random_seed
from loadgen.errors import PlanError
from loadgen.journal import JournalKind, JournalLine, open_journal, read_footer, read_journal
from loadgen.plan import FIXED_SEED, KNOWN_BACKEND, KNOWN_ENDPOINT, Plan, SeedChoice
from loadgen.plan_fields import from_catalog, read_plan
from loadgen.servers.auth import redact
from loadgen.servers.launch.spec import LOCAL, Host, LaunchMethod, read_hosts
from loadgen.studies import sweep
from loadgen.studies.sweep import SWEEP, Over
from loadgen.workloads.spec_syntax import WorkloadError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$"
"""Pattern of names in the plan. Names become folder names."""
SEEDS_PER_WORKLOAD = 1_000
"""Difference between the seeds of two workloads of a plan. Repeats and the steps of a sweep use the seeds between."""
MATRIX_SETTINGS = (
    "server",
    "url",
    "model",
    "platform",
    "label",
    "seed",
    "seed_choice",
    "real",
    "speed",
    "repeat",
    "repeats",
    "server_pid",
    "dcgm_url",
    "gpu_model",
)
"""Settings of a run that the matrix sets. A plan file must not contain them."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Named(_Strict):
    """An item of the plan file that has a name.

    An item may also be written as a string, which is its name. The item then has no other fields.
    """

    name: str = Field(pattern=NAME_PATTERN)
    options: dict[str, Any] = {}
    """Launch options."""

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if "server" in cls.model_fields and isinstance(value, dict) and "name" in value:
            return {"server": value["name"], **value}
        return value


class Server(_Named):
    """A server in the plan. A backend may appear several times, under different names and with different options."""

    server: Annotated[str, AfterValidator(KNOWN_BACKEND)] = "openai"
    """Backend of the server. Default: `name`."""
    launch: LaunchMethod | None = None
    """Launch method of the server. Default: the launch method of the matrix."""
    endpoint: Annotated[str, AfterValidator(KNOWN_ENDPOINT)] | None = None


class HostChoice(_Named):
    """A host on which servers run: either a host of the hosts file, or this machine."""

    platform: str = Field("", max_length=60)
    """Platform name in the report. A host that has a platform but is not in the hosts file is this machine."""
    gpu: str = ""
    """GPU name in servers/hardware/gpus.csv, for estimates, simulated servers and the hardware limit in reports."""
    dcgm_url: str | None = None
    """URL of a DCGM exporter for the GPUs of this host."""
    gpu_hour_cost: float | str | None = None
    """Price of one GPU per hour, for sweeps: `2.50`, `"$2.50"` or `"2.50 EUR"`."""

    @field_validator("gpu_hour_cost")
    @classmethod
    def _check_price(cls, value: float | str | None) -> float | str | None:
        if value is not None:
            try:
                parse_price(value)
            except ValueError as error:
                raise ValueError(f"{error}. {HINT}") from None
        return value


class Model(_Named):
    """A model in the plan. Servers are started with the `path` of the model, or with its name if there is no `path`."""

    path: str = ""
    """Path or hub name with which servers are started. Default: `name`."""
    shape: str = ""
    """Model name in servers/hardware/models.csv, for estimates and simulated servers."""


class SweepOptions(_Strict):
    """Options of a sweep in a matrix. They are named like the options of `loadgen sweep`."""

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
        """The quantity that the sweep varies: "rate" or "concurrency".

        It is the quantity for which the options have a list of loads, or `over` if there is no list.
        """
        if self.rates:
            return "rate"
        return "concurrency" if self.concurrency else self.over

    @property
    def loads(self) -> tuple[float, ...]:
        """Fixed loads to measure, or an empty tuple for a capacity search. Raises PlanError for an invalid list."""
        text = self.rates or self.concurrency
        if not text:
            return ()
        whole = self.load_dimension == "concurrency"
        return sweep.parse_loads(text, f"sweep.{self.load_dimension}", whole=whole)

    @property
    def max_steps(self) -> int:
        """Maximum number of runs of the sweep."""
        return len(self.loads) or self.max_runs


class CellOverride(_Strict):
    """Launch options for some cells, or a reason to skip these cells.

    The fields `server`, `host` and `model` select the cells. A field that is None selects every cell.
    """

    server: str | None = None
    host: str | None = None
    model: str | None = None
    options: dict[str, Any] = {}
    skip: str = ""
    """Reason why these cells are skipped; empty if they are measured."""


class Reference(_Strict):
    """A published result from another source. The report quotes the result, but its charts show only measurements."""

    of: str
    says: str
    source: str


class MatrixPlan(_Strict):
    """The content of the plan file of a matrix.

    The field `run` and each workload contain settings of a run, with the names of the fields of loadgen.plan.Plan.
    """

    name: str = Field(pattern=NAME_PATTERN)
    servers: list[Server] = Field(min_length=1)
    hosts: list[HostChoice] = Field(default_factory=lambda: [HostChoice.model_validate("local")], min_length=1)
    models: list[Model] = Field(min_length=1)
    workloads: list[dict[str, Any]] = Field(min_length=1)
    """Each workload has a `name` and settings of a run. `catalog` names a predefined workload to start from. `sweep`
    makes the workload a sweep."""
    cases: list[CellOverride] = []
    references: list[Reference] = []
    launch: LaunchMethod = "compose"
    hosts_file: Path | None = None
    """Path relative to the folder of the plan file."""
    options: dict[str, Any] = {}
    """Launch options of all servers. The options of a server, a host, a model and an override replace these options, in
    this order."""
    run: dict[str, Any] = {}
    repeats: int = Field(3, ge=1, le=100)
    starts: int = Field(1, ge=1, le=100)
    """Number of starts of each server. The repeats are spread over the starts. More starts show the variation between
    starts and spread a drift over time evenly, but each start costs the time to load a model."""
    seed: int = FIXED_SEED
    """Seed of the order and of the prompts. Without it, the prompts get a new random seed if a server is real."""
    equal_work: str | None = None
    """Name of the server that is measured first. Requests to the other servers use its output lengths."""

    @field_validator("servers", "hosts", "models", "workloads")
    @classmethod
    def _check_unique_names(cls, items: list[Any]) -> list[Any]:
        names = Counter(str(item.get("name") if isinstance(item, dict) else item.name) for item in items)
        duplicates = sorted(name for name, number in names.items() if number > 1)
        if duplicates:
            raise ValueError(f"{', '.join(duplicates)}: this name is used twice")
        return items

    @model_validator(mode="after")
    def _check_all(self) -> MatrixPlan:
        mistakes = dict.fromkeys(_mistakes(self))
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self


def read_matrix_plan(path: Path) -> MatrixPlan:
    """Read the plan file of a matrix. Raises PlanError with one line per mistake."""
    values = read_plan(path)
    if isinstance(values.get("hosts_file"), str):
        values["hosts_file"] = path.parent / values["hosts_file"]
    try:
        return MatrixPlan(**values)
    except ValidationError as error:
        lines = [f"{path.name}: {line}" for item in error.errors() for line in _error_lines(item)]
        raise PlanError("\n".join(lines), "Nothing was started. Fix the plan.") from None


def resolve_hosts(plan: MatrixPlan) -> dict[str, Host]:
    """Return the hosts of the plan with their addresses, by name.

    Raises PlanError for an unknown host, and ServerError for an invalid hosts file.
    """
    known = {LOCAL.name: LOCAL} if plan.hosts_file is None else read_hosts(plan.hosts_file)
    missing = [host.name for host in plan.hosts if not (host.name in known or host.platform)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise PlanError(
            f"hosts: {', '.join(missing)} {verb} not in the hosts file ({plan.hosts_file or 'the plan names none'})",
            "Add the host to the hosts file, or give it a platform if it is this machine.",
        )
    hosts = {}
    for choice in plan.hosts:
        host = known.get(choice.name) or replace(LOCAL, name=choice.name)
        hosts[choice.name] = replace(host, platform=choice.platform or host.platform or host.name)
    return hosts


def run_settings(plan: MatrixPlan, workload: str, **matrix_settings: Any) -> Plan:
    """Return the plan of one run of a workload.

    `matrix_settings` are settings that the matrix chooses, such as the server. They override those of the plan file.
    """
    settings = {
        "label": f"{plan.name}-{workload}"[:60],
        **plan.run,
        **_workload_settings(_find_workload(plan, workload)),
    }
    return Plan(**settings | matrix_settings)


def sweep_options(plan: MatrixPlan, workload: str) -> SweepOptions | None:
    """Return the sweep options of a workload, or None if the workload is not a sweep."""
    values = _find_workload(plan, workload)
    return SweepOptions(**values["sweep"]) if "sweep" in values else None


def _find_workload(plan: MatrixPlan, name: str) -> dict[str, Any]:
    return next(workload for workload in plan.workloads if workload["name"] == name)


class Cell(NamedTuple):
    """One cell of a matrix: the names of a server, a host, a model and a workload."""

    server: str
    host: str
    model: str
    workload: str

    @property
    def folder(self) -> Path:
        """Folder of the cell's runs, relative to the folder of the matrix."""
        return Path("cells") / self.host / self.model / self.server / self.workload

    def __str__(self) -> str:
        return f"{self.server} on {self.host}, {self.model}, {self.workload}"


class Repeat(NamedTuple):
    """One run of a cell (a combination of server, host, model and workload).

    If the workload is a sweep, a repeat is a whole sweep. `number` counts the repeats of a cell from 1, in the order of
    measurement.
    """

    cell: Cell
    number: int

    @property
    def key(self) -> dict[str, Any]:
        """Fields that identify the repeat in the journal."""
        return {"cell": self.cell._asdict(), "repeat": self.number}

    @property
    def folder(self) -> Path:
        """Folder of the run, relative to the folder of the matrix."""
        return self.cell.folder / f"repeat-{self.number}"


class Start(NamedTuple):
    """One launch of a server, and the runs that this server serves, in order."""

    number: int
    """Number of the start in the whole matrix, from 1."""
    round: int
    server: Server
    host: HostChoice
    model: Model
    launch: LaunchMethod
    options: Mapping[str, Any]
    repeats: tuple[Repeat, ...]

    def __str__(self) -> str:
        return f"{self.server.name} on {self.host.name}, {self.model.name}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A planned matrix: the plan, the hosts, the launches of servers in order, and the output folder."""

    plan: MatrixPlan
    hosts: dict[str, Host]
    starts: Sequence[Start]
    folder: Path
    command: list[str]
    seed: int
    """Seed of the prompts of the first workload's first repeat."""
    seed_choice: SeedChoice

    def seed_settings(self, repeat: Repeat) -> dict[str, Any]:
        """Return the seed of a repeat, and how it was chosen, as settings of its run.

        The seed depends on the workload and on the number of the repeat, but not on the server, so that all servers get
        the same prompts. One server serves several workloads and repeats in turn. Their seeds differ, because the
        server's prefix cache may still hold the prompts of earlier runs.
        """
        names = [str(workload["name"]) for workload in self.plan.workloads]
        offset = SEEDS_PER_WORKLOAD * names.index(repeat.cell.workload)
        return {"seed": self.seed + offset + repeat.number - 1, "seed_choice": self.seed_choice}

    @property
    def repeats(self) -> list[Repeat]:
        """All repeats of the matrix, in order of measurement."""
        return [repeat for start in self.starts for repeat in start.repeats]

    @property
    def journal_plan(self) -> dict[str, Any]:
        """Values that must not change when the matrix is resumed: the plan, and the hosts that it names."""
        plan = self.plan.model_dump(mode="json", exclude={"hosts_file"}) | {"seed": self.seed}
        if self.seed_choice == "random":
            plan["seed_choice"] = "random"
        return dict(redact(plan | {"hosts_found": msgspec.to_builtins(self.hosts)}))

    def done(self) -> list[Repeat]:
        """Return the repeats that are finished, in order of measurement."""
        return [repeat for repeat in self.repeats if is_finished(self.folder, repeat)]


def build_matrix(plan: MatrixPlan, folder: Path, command: list[str]) -> Matrix:
    """Return the matrix of a plan.

    Raises PlanError if a host is unknown or every cell is skipped, and ServerError for an invalid hosts file.
    """
    starts = plan_starts(plan)
    if not starts:
        raise PlanError("every cell is skipped, so there is nothing to measure", "Check the cases in the plan.")
    seed, choice = _choose_seed(plan, starts, folder)
    return Matrix(plan, resolve_hosts(plan), starts, folder, command, seed, choice)


def _choose_seed(plan: MatrixPlan, starts: Sequence[Start], folder: Path) -> tuple[int, SeedChoice]:
    """Return the seed of the prompts, and how it was chosen.

    The result is the seed in the plan. Without one, a matrix that already exists in `folder` keeps its seed, so that it
    can be resumed. A new matrix gets a random seed if at least one of its servers is real, otherwise the default seed.
    """
    if "seed" in plan.model_fields_set:
        return plan.seed, "stated"
    first = next((line for line in read_lines(folder) if line["type"] == "plan"), None)
    if first is not None and isinstance(first["plan"].get("seed"), int):
        return first["plan"]["seed"], "random" if first["plan"].get("seed_choice") == "random" else "fixed"
    if all(start.launch == "simulated" for start in starts):
        return plan.seed, "fixed"
    return random_seed(), "random"


def plan_cells(plan: MatrixPlan) -> list[Cell]:
    """Return all combinations of server, host, model and workload that are measured, in the order of the plan."""
    return [
        Cell(setup.server.name, setup.host.name, setup.model.name, str(workload["name"]))
        for setup in _setups(plan)
        if not setup.skip_reasons
        for workload in plan.workloads
    ]


def skipped_cells(plan: MatrixPlan) -> dict[str, str]:
    """Return the combinations of server, host and model that are not measured, with the reasons.

    Each key has the form `server on host, model`.
    """
    return {
        f"{setup.server.name} on {setup.host.name}, {setup.model.name}": "; ".join(setup.skip_reasons)
        for setup in _setups(plan)
        if setup.skip_reasons
    }


def plan_starts(plan: MatrixPlan) -> list[Start]:
    """Return every start (launch of a server) of the matrix, in the order of execution.

    The order is random, but the same plan always gives the same order.
    """
    random = Random(f"{plan.seed}/order")  # noqa: S311 - an order, not a secret
    numbers = Counter[Cell]()
    starts: list[Start] = []
    for round_number in range(1, plan.starts + 1):
        setups = [setup for setup in _setups(plan) if not setup.skip_reasons]
        random.shuffle(setups)
        if plan.equal_work:
            setups.sort(key=lambda setup: setup.server.name != plan.equal_work)
        for setup in setups:
            workloads = _round_workloads(plan, round_number)
            if not workloads:
                continue
            random.shuffle(workloads)
            repeats = []
            for workload in workloads:
                cell = Cell(setup.server.name, setup.host.name, setup.model.name, workload)
                numbers[cell] += 1
                repeats.append(Repeat(cell, numbers[cell]))
            starts.append(
                Start(
                    number=len(starts) + 1,
                    round=round_number,
                    server=setup.server,
                    host=setup.host,
                    model=setup.model,
                    launch=setup.server.launch or plan.launch,
                    options=_launch_options(plan, setup),
                    repeats=tuple(repeats),
                )
            )
    return starts


def _round_workloads(plan: MatrixPlan, round_number: int) -> list[str]:
    """Return the names of the workloads that a server serves in round `round_number`, with one entry for each run.

    The repeats of a workload are divided among the rounds, so a name may appear several times. A sweep appears only in
    the first round.
    """
    repeats = plan.repeats // plan.starts
    if round_number <= plan.repeats % plan.starts:
        repeats += 1
    workloads: list[str] = []
    for workload in plan.workloads:
        runs = int(round_number == 1) if "sweep" in workload else repeats
        workloads += [str(workload["name"])] * runs
    return workloads


_CELL = msgspec.defstruct("JournalCell", [(name, str) for name in Cell._fields], forbid_unknown_fields=True)
_RUN_FIELDS = [("cell", _CELL), ("repeat", int)]
MATRIX = JournalKind(
    "matrix",
    {
        "up": [
            ("start", int),
            ("seconds", float),
            ("facts", JournalLine),
            ("server", str),
            ("host", str),
            ("model", str),
        ],
        "begin": [*_RUN_FIELDS, ("start", int), ("place", int)],
        "end": [*_RUN_FIELDS, ("seconds", float)],
        "failure": [*_RUN_FIELDS, ("kind", str), ("reason", str), ("hint", str), ("log", str)],
    },
)
journal = partial(open_journal, MATRIX)
read_lines = partial(read_journal, MATRIX)


def is_finished(folder: Path, repeat: Repeat) -> bool:
    """Return True if the run or sweep of a repeat has ended without an interruption."""
    if (folder / repeat.folder / SWEEP.file).is_file():
        return sweep.is_finished(folder / repeat.folder)
    footer = read_footer(folder / repeat.folder)
    return footer is not None and not footer.interrupted


def newest_lines(lines: Sequence[JournalLine], *types: str) -> dict[Repeat, JournalLine]:
    """Return the newest journal line of each repeat. Only lines of the given `types` are considered."""
    return {Repeat(Cell(**line["cell"]), int(line["repeat"])): line for line in lines if line["type"] in types}


class _Setup(NamedTuple):
    """One server on one host with one model, and the overrides that apply to this combination."""

    server: Server
    host: HostChoice
    model: Model
    overrides: list[CellOverride]

    @property
    def skip_reasons(self) -> list[str]:
        """Reasons to skip this combination of a server, a host and a model. The list is empty if it is measured."""
        return [override.skip for override in self.overrides if override.skip]


def _setups(plan: MatrixPlan) -> Iterator[_Setup]:
    """Yield every combination of server, host and model, in the order of the plan."""
    for server, host, model in product(plan.servers, plan.hosts, plan.models):
        names = {"server": server.name, "host": host.name, "model": model.name}
        overrides = [
            override
            for override in plan.cases
            if all(getattr(override, field) in (None, name) for field, name in names.items())
        ]
        yield _Setup(server, host, model, overrides)


def _launch_options(plan: MatrixPlan, setup: _Setup) -> dict[str, Any]:
    """Return the options with which a server is launched in the combination `setup` of server, host and model.

    The options come from the plan, the server, the host, the model and the overrides. If several of them set the same
    option, the last one in this order applies. A simulated server also gets the GPU of the host and the shape of the
    model, unless an option sets them.
    """
    options: dict[str, Any] = {}
    if (setup.server.launch or plan.launch) == "simulated":
        options["clock"] = "batching"
        if setup.host.gpu:
            options["gpu"] = setup.host.gpu
        if setup.model.shape:
            options["model_shape"] = setup.model.shape
    options |= plan.options
    options |= setup.server.options
    options |= setup.host.options
    options |= setup.model.options
    for override in setup.overrides:
        options |= override.options
    return options


def _workload_settings(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run settings of a workload.

    If the workload is based on a workload of the catalog, settings in the plan override those of the catalog.
    """
    settings = from_catalog(str(workload["catalog"])) if "catalog" in workload else {}
    settings.pop("label", None)  # the matrix sets the label
    settings |= {key: value for key, value in workload.items() if key not in ("name", "catalog", "sweep")}
    if "sweep" in workload:
        dimension = SweepOptions(**workload["sweep"]).load_dimension
        settings |= sweep.default_duration(settings)
        settings["arrivals"] = sweep.ARRIVALS[dimension].format(1)
    return settings


def _mistakes(plan: MatrixPlan) -> Iterator[str]:
    """Yield a message for each mistake that concerns more than one field of the plan."""
    names = {
        "server": [server.name for server in plan.servers],
        "host": [host.name for host in plan.hosts],
        "model": [model.name for model in plan.models],
    }
    for override in plan.cases:
        for field, known in names.items():
            name = getattr(override, field)
            if name is not None and name not in known:
                yield f"cases: unknown {field} {name!r}; choose {', '.join(known)}"
        if not override.skip and not override.options:
            yield "cases: a case needs options or skip"
    if plan.starts > plan.repeats:
        yield f"starts: {plan.repeats} repeats cannot be spread over {plan.starts} starts"
    if plan.equal_work is not None and plan.equal_work not in names["server"]:
        yield f"equal_work: unknown server {plan.equal_work!r}; choose {', '.join(names['server'])}"
    yield from _owned_settings("run", plan.run)
    for workload in plan.workloads:
        yield from _owned_settings(f"workload {workload.get('name')}", workload)
    for workload in plan.workloads:
        yield from _workload_mistakes(plan, workload)
    yield from _speed_mistakes(plan)


def _owned_settings(where: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each setting in a plan file that only the matrix may set."""
    for name in MATRIX_SETTINGS:
        if name in settings:
            yield f"{where}: {name} is set by the matrix; remove it"


def _speed_mistakes(plan: MatrixPlan) -> Iterator[str]:
    """Yield a message for each mistake that concerns the clock speed of simulated servers.

    There are two possible mistakes:

    - Servers have different speeds, so that their results cannot be compared.
    - The plan has GPU prices and sweeps, but the clock does not run in real time.
    """
    speeds = set()
    for setup in _setups(plan):
        if not setup.skip_reasons:
            simulated = (setup.server.launch or plan.launch) == "simulated"
            speed = _launch_options(plan, setup).get("speed") if simulated else None
            speeds.add(float(speed) if isinstance(speed, int | float) else 1.0)
    if len(speeds) > 1:
        text = " and ".join(f"{speed:g}" for speed in sorted(speeds))
        yield f"options.speed: servers at {text} times real time cannot be compared; give all servers the same speed"
    priced = any(host.gpu_hour_cost is not None for host in plan.hosts)
    swept = any("sweep" in workload for workload in plan.workloads)
    if priced and swept and speeds - {1.0}:
        yield "hosts: gpu_hour_cost needs real time; remove it, or simulate at options.speed 1"


def _workload_mistakes(plan: MatrixPlan, workload: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each mistake in `workload`, which contains the settings of one workload of the matrix.

    These settings are also checked together with the run settings of the matrix, as they will be used in a run.
    """
    name = workload.get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        yield f"workloads: each workload needs a name such as burst, not {name!r}"
        return
    where = f"workload {name}"
    if "sweep" in workload:
        mistakes = list(_sweep_mistakes(plan, workload))
        if mistakes:
            yield from (f"{where}: {line}" for line in mistakes)
            return
    try:
        settings = plan.run | _workload_settings(workload)
        Plan(**{"server": "tgi"} | {key: value for key, value in settings.items() if key not in MATRIX_SETTINGS})
    except WorkloadError as error:
        yield f"{where}: {error}; {error.hint}"
    except PlanError as error:
        yield from (f"{where}: {line}" for line in str(error).splitlines())


def _sweep_mistakes(plan: MatrixPlan, workload: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each mistake in the sweep options of a workload.

    Settings of the plan that a sweep does not allow are mistakes too.
    """
    try:
        options = SweepOptions.model_validate(workload["sweep"])
        if options.rates and options.concurrency:
            yield "sweep.rates and sweep.concurrency are two sweeps; name one of them"
        elif not options.objectives and not options.loads:
            yield "sweep.objectives is missing; or name loads: rates or concurrency"
    except PlanError as error:
        yield f"{error}; {error.hint}"
    except ValidationError as error:
        yield from (f"sweep.{line}" for item in error.errors() for line in _error_lines(item))
    if "arrivals" in plan.run or "arrivals" in workload:
        yield "arrivals is set by the sweep; remove it"
    if plan.equal_work is not None:
        yield "a sweep cannot be combined with equal_work; put it into another matrix"


def _error_lines(error: Any) -> list[str]:
    """Return the message lines for one validation error of pydantic."""
    where = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return [f"{where}: unknown setting"]
        case "missing":
            return [f"{where} is missing"]
        case "literal_error":
            return [f"{where}: {error['input']!r} is unknown; choose {error['ctx']['expected']}"]
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message.replace("unknown; ", f"{error['input']!r} is unknown; ")
    return [f"{where}: {line}" if where else line for line in message.splitlines()]
