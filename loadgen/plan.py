"""The Plan: one validated, fully resolved description of a run. All its mistakes are reported at once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from loadgen.errors import PlanError
from workloads import arrivals, lengths, workload
from workloads.syntax import WorkloadError

ANSWERS = "answers"
"""Output lengths that are those of a dataset's own answers."""


class Plan(BaseModel):
    """What to ask, when, of whom, and how. Frozen; stored as it is in the run's header."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: Literal["vllm", "tgi", "lightllm", "openai"]
    endpoint: Literal["completions", "chat", "generate"] | None = None
    url: str | None = None
    model: str | None = None
    arrivals: str = "burst"
    """Canonical text of workloads.arrivals."""
    n: int | None = Field(None, ge=1, le=1_000_000)
    """How many requests, or sessions of a multi-turn workload; None where the duration or the trace says."""
    duration_s: float | None = Field(None, gt=0, le=7 * 86_400)
    """No request is due and no session starts at or after this offset."""
    workload: str = "synthetic"
    """Canonical text of workloads.workload."""
    input_tokens: int | str = 512
    """Prompt length: a number, or the canonical text of workloads.lengths."""
    output_tokens: int | str = 128
    """Likewise; or `answers`, where a dataset has answers of its own."""
    warmup: int = Field(0, ge=0, le=10_000)
    """Requests sent before the clock starts; they are in no figure."""
    max_in_flight: int | None = Field(None, ge=1, le=1_000_000)
    """Past it a request that is due is dropped. None: as many as the plan can have under way."""
    window_s: tuple[float, float] | None = None
    """What the figures are of, from and to; None lets the analysis choose."""
    seed: int = 0
    workers: int = Field(1, ge=1, le=256)
    timeout_s: float = Field(600.0, gt=0)
    tokenizer: Path | None = None
    api_key_env: str = "LOADGEN_API_KEY"
    ca_file: Path | None = None
    insecure: bool = False
    stamps: Literal["kernel", "user"] = "kernel"
    real: bool = False
    force: bool = False
    """Measure a version of a server that is known to mislead."""
    speed: float = Field(5.0, gt=0)
    metrics_every_s: float = Field(1.0, ge=0)
    """How often the server's metrics, the GPUs and the host's memory are read while the run is on; 0 is never."""
    dcgm_url: str | None = None
    """A DCGM exporter on the server's machine."""
    gpu: bool | None = None
    """Whether to read this machine's GPUs; None: when the server is on it."""
    server_pid: tuple[int, ...] = ()
    """Server processes on this machine, whose memory is read."""
    repeats: int = Field(1, ge=1, le=1000)
    """How often the plan is run."""
    repeat: int = Field(0, ge=0)
    """Which of the repeats this run is, from 1; 0 for a run by itself."""
    label: str = Field("run", pattern=r"^[A-Za-z0-9._-]{1,60}$")
    platform: str = Field("", max_length=60)
    """What the server runs on, such as A800: shown beside its name."""

    @property
    def of_sessions(self) -> bool:
        """Whether `n`, clients and arrivals count sessions."""
        return self.workload.startswith("multi-turn")

    @property
    def lengths(self) -> tuple[str, str]:
        """Prompt and output lengths in words, also where a trace or a file brings its own."""
        if arrivals.parse(self.arrivals).recorded:
            return "recorded", "recorded"
        own = not self.workload.startswith(("synthetic", "shared-prefix", "multi-turn:turns="))
        return "its file's" if own else f"{self.input_tokens}", f"{self.output_tokens}"

    @field_validator("url", "dcgm_url")
    @classmethod
    def _known_scheme(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        return url

    @field_validator("tokenizer", "ca_file")
    @classmethod
    def _existing_file(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_file():
            raise ValueError(f"there is no file {path}")
        return path

    @field_validator("arrivals")
    @classmethod
    def _arrivals(cls, text: str) -> str:
        return str(_hinted(arrivals.parse, text))

    @field_validator("workload")
    @classmethod
    def _workload(cls, text: str) -> str:
        return str(_hinted(workload.parse, text))

    @field_validator("input_tokens", "output_tokens")
    @classmethod
    def _lengths(cls, value: int | str, info: ValidationInfo) -> int | str:
        if value == ANSWERS and info.field_name == "output_tokens":
            return value
        canonical = str(_hinted(lengths.parse, str(value)))
        return int(canonical) if canonical.isdecimal() else canonical

    @field_validator("metrics_every_s")
    @classmethod
    def _seldom(cls, every_s: float) -> float:
        if 0 < every_s < 1:
            raise ValueError(
                "at most once a second, or a server at its limit is measured while it answers us; 0 is off"
            )
        return every_s

    @field_validator("server_pid", mode="before")
    @classmethod
    def _several(cls, pids: Any) -> Any:
        return (pids,) if isinstance(pids, int) else pids or ()

    @field_validator("window_s")
    @classmethod
    def _forward(cls, window_s: tuple[float, float] | None) -> tuple[float, float] | None:
        if window_s is not None and not 0 <= window_s[0] < window_s[1]:
            raise ValueError("must begin at 0 or later, and end after it begins")
        return window_s

    @model_validator(mode="after")
    def _ends(self) -> Plan:
        if not arrivals.parse(self.arrivals).ends(self.n, self.duration_s):
            raise ValueError(f"--arrivals {self.arrivals} would never end: say how many with --n, or --duration")
        if self.n is not None and self.workers > self.n:
            raise ValueError(f"{self.workers} workers for {self.n} requests: use --workers {self.n} or fewer")
        if self.gpu and self.dcgm_url:
            raise ValueError("--gpu reads the GPUs of this machine and --dcgm-url those of another: choose one")
        return self


def plan_of(**values: Any) -> Plan:
    """Validate. Raises PlanError whose message has one line per mistake, named by its command-line option."""
    try:
        return Plan(**values)
    except ValidationError as error:
        lines = [_mistake(item) for item in error.errors()]
        raise PlanError("\n".join(lines), "Nothing was sent. --help lists the options.") from None


def read_plan(path: Path) -> dict[str, Any]:
    """The settings of a plan file (TOML, keys as the fields of Plan). Raises PlanError when it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not TOML: {error}", 'Write lines such as: arrivals = "poisson:20"') from error


def from_catalog(name: str) -> dict[str, Any]:
    """The settings of a named workload. Raises WorkloadError for a name that is not in the catalog."""
    from workloads.catalog import load

    named = load(name)
    return {
        "n": named.requests,
        "arrivals": str(named.arrivals),
        "workload": str(named.workload),
        "input_tokens": str(named.input_tokens),
        "output_tokens": str(named.output_tokens),
        "label": named.name,
    }


def _hinted(parse: Any, text: str) -> Any:
    """Parse, with the hint of a mistake in its message."""
    try:
        return parse(text)
    except WorkloadError as error:
        raise ValueError(f"{error}; {error.hint}" if error.hint else str(error)) from None


def _mistake(item: Any) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    if not item["loc"]:
        return message
    name = str(item["loc"][0])
    option = "--" + name.removesuffix("_s").replace("_", "-")
    if item["type"] == "literal_error":
        return f"{option} {item['input']}: unknown; choose {item['ctx']['expected']}"
    if item["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    if item["type"] == "missing":
        return f"{option} is missing"
    return f"{option} {item['input']}: {message[0].lower()}{message[1:]}"
