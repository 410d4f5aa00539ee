"""The Plan: one validated, fully resolved description of a run. All its mistakes are reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from loadgen.errors import PlanError

SERVERS = ("vllm", "tgi", "lightllm", "openai")
ENDPOINTS = ("completions", "chat", "generate")


class Plan(BaseModel):
    """What to ask, of whom, and how. Frozen; stored as it is in the run's header."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: Literal["vllm", "tgi", "lightllm", "openai"]
    endpoint: Literal["completions", "chat", "generate"] | None = None
    url: str | None = None
    model: str | None = None
    n: int = Field(1000, ge=1, le=1_000_000)
    input_tokens: int = Field(512, ge=1, le=10_000_000)
    output_tokens: int = Field(128, ge=1, le=10_000_000)
    seed: int = 0
    workers: int = Field(1, ge=1, le=256)
    timeout_s: float = Field(600.0, gt=0)
    tokenizer: Path | None = None
    api_key_env: str = "LOADGEN_API_KEY"
    ca_file: Path | None = None
    insecure: bool = False
    stamps: Literal["kernel", "user"] = "kernel"
    real: bool = False
    speed: float = Field(5.0, gt=0)
    label: str = Field("burst", pattern=r"^[A-Za-z0-9._-]{1,60}$")

    @field_validator("url")
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

    @model_validator(mode="after")
    def _enough_requests(self) -> Plan:
        if self.workers > self.n:
            raise ValueError(f"{self.workers} workers for {self.n} requests: use --workers {self.n} or fewer")
        return self


def plan_of(**values: Any) -> Plan:
    """Validate. Raises PlanError whose message has one line per mistake, named by its command-line option."""
    try:
        return Plan(**values)
    except ValidationError as error:
        lines = [_mistake(item) for item in error.errors()]
        raise PlanError("\n".join(lines), "Nothing was sent. `loadgen burst --help` lists the options.") from None


def _mistake(item: Any) -> str:
    if not item["loc"]:
        return str(item["msg"]).removeprefix("Value error, ")
    name = str(item["loc"][0])
    option = "--" + name.replace("_", "-").removesuffix("-s")
    if item["type"] == "literal_error":
        return f"{option} {item['input']}: unknown; choose {item['ctx']['expected']}"
    if item["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{option} {item['input']}: {message[0].lower()}{message[1:]}"
