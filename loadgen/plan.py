"""The Plan: one validated, fully resolved description of a run. All its mistakes are reported at once.

An option of a run is one field here. Its docstring is the help of the command line, of the web form and of the
generated documentation: loadgen.cli.options makes the options of `loadgen burst`, `run` and `ui` from the fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from loadgen.errors import PlanError
from loadgen.settings import FORWARD, OBJECT, SELDOM, SEVERAL, RunOption, mistakes, must_exist, one_of, sizes
from servers.access import certificates, header_lines, redacted, server_url
from servers.kinds import KINDS, any_of
from servers.wire.sources import AUTO, SOURCES
from workloads import arrivals, lengths, workload
from workloads.datasets import user_fields
from workloads.ruler import Counter
from workloads.syntax import WorkloadError


def _outputs(settings: dict[str, Any]) -> int | str:
    """Output lengths where none were named."""
    return lengths.ANSWERS if _file_of(settings["workload"]) else lengths.UNNAMED


def _file_of(named: str) -> Path | None:
    """The file that a workload's requests are from."""
    return getattr(workload.parse(named), "path", None)


def _endpoints() -> Iterable[str]:
    return dict.fromkeys(name for kind in KINDS.values() for name in kind.dialects)


_ARRIVALS = any_of(each.SYNTAX.partition(", such as")[0].replace(" or ", ", ") for each in arrivals.KINDS.values())
ServerName = Annotated[str, one_of(lambda: KINDS)]
StampsName = Annotated[str, one_of(lambda: (AUTO, *SOURCES))]
EndpointName = Annotated[str, one_of(_endpoints)]
URL = Annotated[str, AfterValidator(server_url)]


class Plan(BaseModel):
    """What to ask, when, of whom, and how. Frozen; stored as it is in the run's header."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    # Empty until loadgen.server.named has asked.
    server: Annotated[
        ServerName,
        RunOption("Server", "start", f"Which server answers: {any_of(KINDS)}; with --url by default what it says."),
    ] = ""
    endpoint: Annotated[
        EndpointName | None,
        RunOption("Server", "start", f"{any_of(_endpoints())}; the server's native one by default."),
    ] = None
    url: Annotated[URL | None, RunOption("Server", "start")] = None
    """Where it is, such as http://127.0.0.1:8002. Without it: LOADGEN_<SERVER>_URL, then the port that
    docker-compose.yml publishes, then the built-in simulated server."""
    model: Annotated[str | None, RunOption("Server", "start")] = None
    """Model name to ask for; the server's first one by default."""
    # Canonical text of workloads.arrivals, as `workload` is of workloads.workload.
    arrivals: Annotated[str, RunOption("Load", None, f"When requests are due: {_ARRIVALS}.")] = "burst"
    # None where the duration or the trace says.
    n: Annotated[int | None, RunOption("Load"), Field(ge=1, le=1_000_000)] = None
    """How many requests; or sessions, where these are asked."""
    duration_s: Annotated[float | None, RunOption("Load"), Field(gt=0, le=7 * 86_400)] = None
    """Nothing is due later than this."""
    # None: as many as the plan can have under way.
    max_in_flight: Annotated[int | None, RunOption("Load"), Field(ge=1, le=1_000_000)] = None
    """Past it a request that is due is dropped, and counted."""
    warmup: Annotated[int, RunOption("Load"), Field(ge=0, le=10_000)] = 0
    """Requests to send before the clock starts; in no figure."""
    workers: Annotated[int, RunOption("Load"), Field(ge=1, le=256)] = 1
    """Processes that share the load."""
    timeout_s: Annotated[float, RunOption("Load", "start"), Field(gt=0)] = 600.0
    """After which one request is given up; 600s by default."""
    repeats: Annotated[int, RunOption("Load"), Field(ge=1, le=1000)] = 1
    """Run it so often, each time with the next seed: see docs."""
    repeat: int = Field(0, ge=0)
    """Which of the repeats this run is, from 1; 0 for a run by itself."""
    workload: Annotated[str, RunOption("Prompts", "form")] = "synthetic"
    """What is asked: synthetic, shared-prefix:groups=G,tokens=P, sharegpt:FILE, jsonl:FILE, multi-turn:turns=K
    (sessions), ..."""
    # A number, or the canonical text of workloads.lengths.
    input_tokens: Annotated[int | str, RunOption("Prompts", "form")] = 512
    """Prompt lengths, exact by the server's own tokenizer: a number (512 by default), uniform:A..B,
    lognormal:mean=M,cv=C, empirical:FILE, ..."""
    output_tokens: Annotated[int | str, RunOption("Prompts", "form")] = Field(default_factory=_outputs)
    """Tokens to generate, likewise; by default those that a file's own answers have (answers), else 128. max:128 and so
    on lets answers end early."""
    extra_body: Annotated[dict[str, Any], AfterValidator(user_fields), OBJECT, RunOption("Prompts", "start")] = {}
    """Fields to merge into the body of each request, as JSON or @FILE: '{"temperature": 0.7}'. null takes one out."""
    ignore_eos: Annotated[bool, RunOption("Prompts", "start")] = True
    """Have each answer go on to the length asked for, where the server can; --no-ignore-eos lets the model end it."""
    image: Annotated[tuple[str, ...], AfterValidator(sizes), SEVERAL, RunOption("Prompts", "start")] = ()
    """A synthetic picture in each chat request, by its size: 512x512. Repeatable."""
    seed: Annotated[int, RunOption("Prompts", "form")] = 0
    """The same seed gives byte-identical requests and due instants."""
    tokenizer: Annotated[Path | None, AfterValidator(must_exist), RunOption("Prompts", "start")] = None
    """The model's tokenizer, to build prompts with: a file, a folder, or the name of a model in the local Hugging Face
    cache."""
    lengths: Annotated[Counter | None, RunOption("Prompts", "start")] = None
    """Who counts where prompts cannot be exact: server (by samples that it runs), tokenizer (alone) or approximate."""
    api_key_env: Annotated[str, RunOption("Server", "start")] = "LOADGEN_API_KEY"
    """Environment variable that holds the API key; LOADGEN_API_KEY by default, which may be unset."""
    header: Annotated[tuple[str, ...], AfterValidator(header_lines), SEVERAL, RunOption("Server", "start")] = ()
    """'Name: value', sent with each request; $NAME in the value is read from the environment. Repeatable."""
    ca_file: Annotated[Path | None, AfterValidator(certificates), RunOption("Server", "start")] = None
    """Certificate authorities for https, in PEM."""
    insecure: Annotated[bool, RunOption("Server", "start")] = False
    """Do not check certificates."""
    real: Annotated[bool, RunOption("Server", "start")] = False
    """Never fall back to the simulated server."""
    force: Annotated[bool, RunOption("Server", "start")] = False
    """Measure a version of a server that is known to mislead."""
    speed: Annotated[float, RunOption("Server", "start"), Field(gt=0)] = 5.0
    """How many times faster the built-in simulated server's clock runs; 5 by default."""
    window_s: Annotated[tuple[float, float] | None, FORWARD, RunOption("Measurement")] = None
    """What the figures are of; else chosen."""
    stamps: Annotated[StampsName, RunOption("Measurement", "start")] = AUTO
    """Where arrival instants come from: ring, the kernel's stamp of each packet; socket, that of each read; user, this
    process's clock, as late as it is; or auto, the best that works here."""
    metrics_every_s: Annotated[float, RunOption("Measurement", "start"), Field(ge=0), SELDOM] = 1.0
    """How often the server's /metrics, GPUs and memory are read during the run: 1s by default, and at most; 0 is
    never."""
    dcgm_url: Annotated[URL | None, RunOption("Measurement", "start")] = None
    """A DCGM exporter on the server's machine, such as http://gpu-host:9400, for its GPUs."""
    gpu: Annotated[bool | None, RunOption("Measurement")] = None
    """Read this machine's GPUs through NVML; by default when the server is on it."""
    server_pid: Annotated[tuple[int, ...], SEVERAL, RunOption("Measurement")] = ()
    """A server process on this machine, whose memory is read with that of its children; repeatable."""
    label: Annotated[str, RunOption("Output", "start"), Field(pattern=r"^[A-Za-z0-9._-]{1,60}$")] = "run"
    """A word for the run's folder and report."""
    platform: Annotated[str, RunOption("Output", "start"), Field(max_length=60)] = ""
    """What the server runs on, such as A800; stands by its name."""

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **values: Any) -> None:
            """Validate. Raises PlanError whose message has one line per mistake, named by its command-line option."""
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise PlanError(mistakes(error), "Nothing was sent. --help lists the options.") from None

    def each_repeat(self) -> list[Plan]:
        """The plan of each repeat: another seed for each, or a server's prefix cache would know the prompts already,
        and chance in lengths and gaps would be the same each time."""
        changes = ({"repeat": place, "seed": self.seed + place - 1} for place in range(1, self.repeats + 1))
        return [self.model_copy(update=each) for each in changes]

    @property
    def of_sessions(self) -> bool:
        """Whether `n`, clients and arrivals count sessions."""
        return self.workload.startswith("multi-turn")

    @property
    def of_file(self) -> bool:
        """Whether prompts, or sessions of them, are those of a file."""
        return _file_of(self.workload) is not None

    @property
    def may_end(self) -> bool:
        """Whether answers may end before the requested length."""
        return not self.ignore_eos or lengths.outputs(str(self.output_tokens)).may_end

    @property
    def lengths_said(self) -> tuple[str, str]:
        """Prompt and output lengths in words, also where a trace or a file brings its own."""
        if arrivals.parse(self.arrivals).facts.recorded and self.workload == "synthetic":
            return "recorded", "recorded"
        named = lengths.outputs(str(self.output_tokens)).lengths
        gaps = f" ({lengths.UNNAMED} where it names none)" if self.workload.startswith("jsonl:") else ""
        told = f"the file's{gaps}" if named is None else f"{named}"
        return "the file's" if self.of_file else f"{self.input_tokens}", "at most " * self.may_end + told

    @field_validator("arrivals", "workload", "input_tokens", "output_tokens")
    @classmethod
    def _canonical(cls, value: int | str, info: ValidationInfo) -> int | str:
        """As it is parsed and written again; the hint of a mistake goes into its message."""
        parsers = {"arrivals": arrivals.parse, "workload": workload.parse, "output_tokens": lengths.outputs}
        try:
            text = str(parsers.get(str(info.field_name), lengths.parse)(str(value)))
        except WorkloadError as error:
            raise ValueError(f"{error}; {error.hint}" if error.hint else str(error)) from None
        return int(text) if text.isdecimal() else text

    @field_serializer("header", when_used="json")
    def _kept(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(redacted, lines))

    @model_validator(mode="after")
    def _ends(self) -> Plan:
        named = arrivals.parse(self.arrivals)
        if not (self.server or self.url):
            raise ValueError(f"--server is missing: name {any_of(KINDS)}; or --url, and who answers there is asked")
        if not named.ends(self.n, self.duration_s):
            raise ValueError(f"--arrivals {self.arrivals} would never end: say how many with --n, or --duration")
        if self.n is not None and self.workers > self.n:
            raise ValueError(f"{self.workers} workers for {self.n} requests: use --workers {self.n} or fewer")
        if self.image and self.of_sessions:
            raise ValueError("--image: the turns of sessions hold no pictures; ask single requests")
        if self.max_in_flight and self.max_in_flight < (clients := named.facts.clients):
            raise ValueError(
                f"--arrivals {self.arrivals} has {clients} under way, more than --max-in-flight {self.max_in_flight}: "
                f"write --arrivals closed:{self.max_in_flight}, or leave --max-in-flight out"
            )
        if self.gpu and self.dcgm_url:
            raise ValueError("--gpu reads the GPUs of this machine and --dcgm-url those of another: choose one")
        if self.lengths and (self.lengths == "tokenizer") != bool(self.tokenizer):
            mend = "leave --tokenizer out" if self.tokenizer else "name one with --tokenizer"
            raise ValueError(
                f"--lengths {self.lengths} {'needs no' if self.tokenizer else 'needs a'} tokenizer: {mend}"
            )
        return self
