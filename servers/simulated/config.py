"""What a simulated server is told: one frozen value, checked as a whole. `loadgen sim` has an option for each field
that says what it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from servers.hardware import DEFAULT_GPU, DEFAULT_MODEL
from servers.kinds import any_of, simulated_kinds
from servers.simulated import ConfigError
from servers.simulated.faults import FaultRule, problem_of

CLOCKS = ("script", "batching")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """Everything that decides what a simulated server does. The same config and requests give the same answers.

    Raises ConfigError, which lists every mistake at once.
    """

    server: Annotated[str, f"Which server to be: {any_of(simulated_kinds())}."]
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
    max_concurrent_requests: Annotated[
        int | None, "Requests at a time. TGI (128) and vLLM (none) reject past it, LightLLM (256) lets wait."
    ] = None
    """vLLM's `max_num_queued_reqs`."""
    max_model_len: Annotated[int, "Longest prompt plus output, in tokens."] = 4096
    eos_mean_tokens: Annotated[float | None, "tgi: answers end by themselves after so many tokens in the mean."] = None
    """None: they go the whole length asked."""
    api_key: str = field(default="", repr=False)
    faults: tuple[FaultRule, ...] = ()
    seed: Annotated[int, "The same seed gives the same words, jitter and faults."] = 0
    log: Annotated[Path | None, "JSON Lines: every request with the instants of its sends."] = None

    def __post_init__(self) -> None:
        limit, kinds = self.max_concurrent_requests, simulated_kinds()
        checks = (
            (f"server must be one of {', '.join(kinds)}, not {self.server!r}", self.server in kinds),
            (f"clock must be one of {', '.join(CLOCKS)}, not {self.clock!r}", self.clock in CLOCKS),
            (f"port must be 0 to 65535, not {self.port}", 0 <= self.port <= 65535),
            ("times must not be negative", min(self.ttft_s, self.itl_s, self.jitter_s) >= 0),
            (f"tokens per event must be at least 1, not {self.tokens_per_event}", self.tokens_per_event >= 1),
            (f"speed must be positive, not {self.speed}", self.speed > 0),
            (f"the limit on concurrent requests must be at least 1, not {limit}", limit is None or limit >= 1),
            (f"max_model_len must be at least 2, not {self.max_model_len}", self.max_model_len >= 2),
            (
                f"eos_mean_tokens must be at least 1, not {self.eos_mean_tokens}",
                self.eos_mean_tokens is None or self.eos_mean_tokens >= 1,
            ),
        )
        problems = [text for text, holds in checks if not holds]
        problems += [problem for rule in self.faults if (problem := problem_of(rule))]
        if problems:
            raise ConfigError("; ".join(problems))

    def to_json(self) -> bytes:
        """All of it, the API key too, on one line: what a child process reads from its standard input."""
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> SimulatedConfig:
        """What `to_json` wrote."""
        return msgspec.json.decode(line, type=cls, dec_hook=lambda kind, value: kind(value))
