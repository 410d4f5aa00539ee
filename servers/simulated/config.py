"""What a simulated server is told: one frozen value, checked as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from servers.hardware import DEFAULT_GPU, DEFAULT_MODEL
from servers.kinds import simulated_kinds
from servers.simulated import ConfigError
from servers.simulated.faults import FaultRule, problem_of

CLOCKS = ("script", "batching")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """Everything that decides what a simulated server does. The same config and requests give the same answers.

    Raises ConfigError, which lists every mistake at once.
    """

    server: str
    """One of servers.kinds.simulated_kinds()."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    model: str = "llama-2-7b"
    """Name under which the model is served."""
    clock: str = "script"
    """One of CLOCKS: `script` follows the times below exactly, `batching` models an engine on a GPU."""
    ttft_s: float = 0.5
    itl_s: float = 0.02
    jitter_s: float = 0.0
    tokens_per_event: int = 1
    speed: float = 1.0
    """How many times faster than told the clock runs."""
    gpu: str = DEFAULT_GPU
    """Batching clock: a card that servers.hardware knows, or `hardware` describes."""
    model_shape: str = DEFAULT_MODEL
    """Batching clock: a model, likewise."""
    hardware: Path | None = None
    """Batching clock: a TOML file with more cards and models."""
    tensor_parallel: int = 1
    """Batching clock: so many of these cards hold the model together."""
    max_concurrent_requests: int | None = None
    """The server's own limit: TGI rejects past it, LightLLM lets wait, vLLM (`max_num_queued_reqs`) rejects.
    None: the server's default, which is 128, 256 and no limit."""
    max_model_len: int = 4096
    """Prompt and output together, in tokens."""
    eos_mean_tokens: float | None = None
    """TGI: answers end by themselves after so many tokens in the mean. None: they go the whole length asked."""
    api_key: str = field(default="", repr=False)
    faults: tuple[FaultRule, ...] = ()
    seed: int = 0
    log: Path | None = None
    """JSON Lines, one line per request, with the instant of every send."""

    def __post_init__(self) -> None:
        problems = [text for text, wrong in self._checks() if wrong]
        problems += [problem for rule in self.faults if (problem := problem_of(rule))]
        if problems:
            raise ConfigError("; ".join(problems))

    def _checks(self) -> tuple[tuple[str, bool], ...]:
        limit, kinds = self.max_concurrent_requests, simulated_kinds()
        return (
            (f"server must be one of {', '.join(kinds)}, not {self.server!r}", self.server not in kinds),
            (f"clock must be one of {', '.join(CLOCKS)}, not {self.clock!r}", self.clock not in CLOCKS),
            (f"port must be 0 to 65535, not {self.port}", not 0 <= self.port <= 65535),
            ("times must not be negative", min(self.ttft_s, self.itl_s, self.jitter_s) < 0),
            (f"tokens per event must be at least 1, not {self.tokens_per_event}", self.tokens_per_event < 1),
            (f"speed must be positive, not {self.speed}", not self.speed > 0),
            (f"the limit on concurrent requests must be at least 1, not {limit}", limit is not None and limit < 1),
            (f"max_model_len must be at least 2, not {self.max_model_len}", self.max_model_len < 2),
            (
                f"eos_mean_tokens must be at least 1, not {self.eos_mean_tokens}",
                self.eos_mean_tokens is not None and not self.eos_mean_tokens >= 1,
            ),
        )

    def to_json(self) -> bytes:
        """All of it, the API key too, on one line: what a child process reads from its standard input."""
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> SimulatedConfig:
        """What `to_json` wrote."""
        return msgspec.json.decode(line, type=cls, dec_hook=lambda kind, value: kind(value))
