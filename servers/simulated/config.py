"""What a simulated server is told: one frozen value, checked as a whole. `loadgen sim` has an option for each field
that says what it is. Faults are written as `NAME`, `NAME@K`, and in a rule followed by which requests it is for:

    reset@12:3,17     requests number 3 and 17, counted from 0 in order of arrival
    stall=0.01        each request with probability 0.01, drawn from the server's seed and the request's number
    merged@4          every request

K counts tokens sent before the fault happens; half of the answer where it is left out. A client asks for a fault of its
own with the header `X-Simulated-Fault: NAME@K`, which wins over the rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from loadgen.servers.backends import join_or, simulated_backends, simulated_versions
from loadgen.servers.hardware import DEFAULT_GPU, DEFAULT_MODEL
from loadgen.servers.simulated import ConfigError
from loadgen.servers.simulated.stream_sender import FAULTS

_RULE = re.compile(r"(?P<name>[a-z0-9-]+)(@(?P<at>\d+))?(:(?P<requests>\d+(,\d+)*)|=(?P<probability>\d*\.?\d+))?")


@dataclass(frozen=True, slots=True)
class FaultRule:
    """A fault, K, and the requests it is for."""

    name: str
    at: int | None = None
    requests: frozenset[int] = frozenset()
    probability: float = 0.0

    def problem(self) -> str:
        """What is wrong with it; empty for nothing."""
        if self.name not in FAULTS:
            return f"there is no fault {self.name!r}; there are {', '.join(FAULTS)}"
        return "" if 0 <= self.probability <= 1 else f"a probability is between 0 and 1, not {self.probability}"


def parse_rule(text: str) -> FaultRule:
    """A rule as the command line has it. Raises ConfigError."""
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a fault: write NAME, NAME@K, NAME:3,17 or NAME=0.01")
    requests = frozenset(map(int, match["requests"].split(","))) if match["requests"] else frozenset()
    probability = 0.0 if requests else float(match["probability"] or 1)
    rule = FaultRule(match["name"], int(match["at"]) if match["at"] else None, requests, probability)
    if problem := rule.problem():
        raise ConfigError(problem)
    return rule


def parse_fault(text: str) -> FaultRule:
    """A fault as the header has it, for the one request. Raises ConfigError."""
    if ":" in text or "=" in text:
        raise ConfigError(f"{text!r}: a request's own fault is NAME or NAME@K")
    return parse_rule(text)


def fault_for(rules: Sequence[FaultRule], seed: int, index: int) -> FaultRule | None:
    """The fault of request number `index`: the first rule that is for it. The same seed gives the same faults."""
    random = Random(f"fault/{seed}/{index}") if rules else None  # noqa: S311 - not secret
    for rule in rules:
        if index in rule.requests or (random and random.random() < rule.probability):
            return rule
    return None


def _versions() -> str:
    """Name the versions of each kind."""
    return "; ".join(f"{kind} {join_or(versions)}" for kind, versions in simulated_versions().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """All that decides what a simulated server does to requests. Raises ConfigError, which lists every mistake."""

    server: Annotated[str, f"Which server to be: {join_or(simulated_backends())}."]
    host: Annotated[str, "Address to listen on; other machines reach only what is not loopback."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0 takes any free one."] = 0
    model: Annotated[str, "Name under which the model is served."] = "llama-2-7b"
    clock: Annotated[str, "When tokens leave: script (exactly as told) or batching (as an engine on a GPU would)."] = (
        "script"
    )
    ttft_s: Annotated[float, "script: time to the first token."] = 0.5
    itl_s: Annotated[float, "script: time between two token events of a stream."] = 0.02
    jitter_s: Annotated[float, "script: each event is moved by up to so much, drawn from the seed."] = 0.0
    tokens_per_event: Annotated[int, "script: tokens that are due together."] = 1
    speed: Annotated[float, "How many times faster the clock runs."] = 1.0
    gpu: Annotated[str, "batching: the card."] = DEFAULT_GPU
    model_shape: Annotated[str, "batching: the model's shape."] = DEFAULT_MODEL
    hardware: Annotated[Path | None, "batching: a TOML file with more cards and models, as docs/simulated.md says."] = (
        None
    )
    tensor_parallel: Annotated[int, "batching: so many of these cards hold the model together."] = 1
    server_version: Annotated[str, f"Version to speak as, if not the usual one: {_versions()}."] = ""
    vintage: Annotated[str, "batching: whose rules and overheads: current, or 2023."] = "current"
    kv_tokens: Annotated[int | None, "batching: tokens in the KV cache; by default what memory the model leaves."] = (
        None
    )
    max_concurrent_requests: Annotated[  # vLLM's `max_num_queued_reqs`
        int | None, "Requests at a time. TGI (128) and vLLM (none) reject past it, LightLLM (256) lets wait."
    ] = None
    max_model_len: Annotated[int, "Longest prompt plus output, in tokens."] = 4096
    eos_mean_tokens: Annotated[float | None, "tgi: answers end by themselves after so many tokens in the mean."] = None
    api_key: str = field(default="", repr=False)
    faults: tuple[FaultRule, ...] = ()
    seed: Annotated[int, "The same seed gives the same words, jitter and faults."] = 0
    log: Annotated[Path | None, "JSON Lines: every request with the instants of its sends."] = None

    def __post_init__(self) -> None:
        limit, kinds, clocks = self.max_concurrent_requests, simulated_backends(), ("script", "batching")
        mean, version = self.eos_mean_tokens, self.server_version
        versions = simulated_versions().get(self.server, ())
        checks = (
            (f"server must be one of {', '.join(kinds)}, not {self.server!r}", self.server in kinds),
            (
                f"server_version of {self.server} must be one of {', '.join(versions) or 'none'}, not {version!r}",
                not version or version in versions,
            ),
            (f"clock must be one of {', '.join(clocks)}, not {self.clock!r}", self.clock in clocks),
            (f"port must be 0 to 65535, not {self.port}", 0 <= self.port <= 65535),
            ("times must not be negative", min(self.ttft_s, self.itl_s, self.jitter_s) >= 0),
            (f"tokens per event must be at least 1, not {self.tokens_per_event}", self.tokens_per_event >= 1),
            (f"speed must be positive, not {self.speed}", self.speed > 0),
            (f"the limit on concurrent requests must be at least 1, not {limit}", limit is None or limit >= 1),
            (f"max_model_len must be at least 2, not {self.max_model_len}", self.max_model_len >= 2),
            (f"kv_tokens must be at least 64, not {self.kv_tokens}", self.kv_tokens is None or self.kv_tokens >= 64),
            (f"eos_mean_tokens must be at least 1, not {mean}", mean is None or mean >= 1),
        )
        problems = [text for text, holds in checks if not holds]
        problems += filter(None, (rule.problem() for rule in self.faults))
        if problems:
            raise ConfigError("; ".join(problems))

    def to_json(self) -> bytes:
        """All of it, the API key too, on one line: what a child process reads from its standard input."""
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> SimulatedConfig:
        """What `to_json` wrote."""
        return msgspec.json.decode(line, type=cls, dec_hook=lambda kind, value: kind(value))
