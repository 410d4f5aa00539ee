"""The configuration of a simulated server, and the syntax of its faults.

`loadgen mock-server` has an option for every field of SimulatedConfig. A fault is an error that the server produces on
purpose. A fault is written as `NAME` or `NAME@K`. For most faults, K is the number of tokens that the server sends
before the fault; the default is half of the response. A fault rule also selects the requests that get the fault:

    reset@12:3,17     requests number 3 and 17, counted from 0 in order of arrival.
    stall=0.01        each request with probability 0.01, drawn from the server's seed and the request's number.
    merged@4          every request.

A client can request a fault for one request with the header `X-Simulated-Fault: NAME@K`. The header overrides the
rules.
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

REASONING_SERVERS = ("vllm", "sglang")
"""Simulated servers whose responses may contain reasoning, tool calls and JSON."""
_RULE = re.compile(r"(?P<name>[a-z0-9-]+)(@(?P<at>\d+))?(:(?P<requests>\d+(,\d+)*)|=(?P<probability>\d*\.?\d+))?")


@dataclass(frozen=True, slots=True)
class FaultRule:
    """A fault of a simulated server, and the requests that get the fault.

    `at` is the number K of `NAME@K`. Its meaning depends on the fault: for example, `reset@12` resets the connection
    after 12 tokens. Every fault has a default, which None selects.
    """

    name: str
    at: int | None = None
    requests: frozenset[int] = frozenset()
    probability: float = 0.0

    def problem(self) -> str:
        """Return a description of the mistake in this rule, or an empty string if the rule is valid."""
        if self.name not in FAULTS:
            return f"unknown fault {self.name!r}: choose {', '.join(FAULTS)}"
        return "" if 0 <= self.probability <= 1 else f"a probability must be 0 to 1, not {self.probability}"


def parse_rule(text: str) -> FaultRule:
    """Parse a fault rule, such as `reset@12:3,17`. Raises ConfigError if the rule is invalid."""
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a fault: write NAME, NAME@K, NAME:3,17 or NAME=0.01")
    requests = frozenset(map(int, match["requests"].split(","))) if match["requests"] else frozenset()
    probability = 0.0 if requests else float(match["probability"] or 1)
    rule = FaultRule(match["name"], int(match["at"]) if match["at"] else None, requests, probability)
    problem = rule.problem()
    if problem:
        raise ConfigError(problem)
    return rule


def parse_fault(text: str) -> FaultRule:
    """Parse the value of the header `X-Simulated-Fault`, such as `reset@12`. Raises ConfigError if it is invalid."""
    if ":" in text or "=" in text:
        raise ConfigError(f"{text!r} is not a fault for one request: write NAME or NAME@K")
    return parse_rule(text)


def fault_for(rules: Sequence[FaultRule], seed: int, index: int) -> FaultRule | None:
    """Return the first fault rule that applies to request number `index`, or None if no rule applies.

    The result depends only on the arguments, so the same seed gives the same faults in every run.
    """
    random = Random(f"fault/{seed}/{index}") if rules else None  # noqa: S311 - not secret
    for rule in rules:
        if index in rule.requests or (random and random.random() < rule.probability):
            return rule
    return None


def _versions() -> str:
    """Return the simulated versions of every backend, as text for a help message."""
    return "; ".join(f"{backend} {join_or(versions)}" for backend, versions in simulated_versions().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """The configuration of a simulated server.

    Raises ConfigError if a value is invalid. The message lists every mistake.
    """

    server: Annotated[str, f"Backend to simulate: {join_or(simulated_backends())}."]
    host: Annotated[str, "Address to listen on. The default accepts connections from this machine only."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0 selects any free port."] = 0
    model: Annotated[str, "Model name in requests and responses."] = "llama-2-7b"
    adapters: Annotated[
        tuple[str, ...], "Name of a LoRA adapter, which requests may name as their model. Repeatable."
    ] = ()
    clock: Annotated[
        str, "When tokens are sent: script (at configured times) or batching (as by an engine on a GPU)."
    ] = "script"
    ttft_s: Annotated[float, "script: time to the first token."] = 0.5
    itl_s: Annotated[float, "script: time between two token events of a stream."] = 0.02
    jitter_s: Annotated[float, "script: maximum random offset of each event, drawn from the seed."] = 0.0
    slower_per_hour: Annotated[float, "script: growth of the time to the first token per hour; 0.1 is 10%."] = 0.0
    slow_after_s: Annotated[
        float | None, "script: time after the first request from which the time to the first token is longer."
    ] = None
    slow_factor: Annotated[float, "script: factor of the time to the first token after --slow-after."] = 2.0
    tokens_per_event: Annotated[int, "script: tokens per event."] = 1
    stream_interval: Annotated[int, "Tokens per event after the first token, if the protocol allows it."] = 1
    draft_tokens: Annotated[int, "script: draft tokens per step of speculative decoding (default: none)."] = 0
    acceptance: Annotated[
        float, "script: probability that a draft token is accepted, if those before it were accepted."
    ] = 0.7
    speed: Annotated[float, "Speed of the clock as a multiple of real time."] = 1.0
    gpu: Annotated[str, "batching: GPU to model."] = DEFAULT_GPU
    model_shape: Annotated[str, "batching: model whose shape sets the step times."] = DEFAULT_MODEL
    hardware: Annotated[Path | None, "batching: TOML file with more GPUs and models; see docs/simulated.md."] = None
    tensor_parallel: Annotated[int, "batching: number of GPUs that share the model."] = 1
    server_version: Annotated[str, f"Version of the protocol, instead of the default: {_versions()}."] = ""
    vintage: Annotated[str, "batching: version of the engine: current or 2023."] = "current"
    kv_tokens: Annotated[
        int | None, "batching: size of the KV cache in tokens (default: the memory that the model leaves free)."
    ] = None
    max_concurrent_requests: Annotated[  # vLLM's `max_num_queued_reqs`
        int | None,
        "Maximum concurrent requests. Above it TGI (default 128), vLLM and SGLang (no limit) reject requests; LightLLM "
        "(256) queues them.",
    ] = None
    max_model_len: Annotated[int, "Maximum length of prompt plus output, in tokens."] = 4096
    eos_mean_tokens: Annotated[
        float | None, "tgi: mean length at which responses stop by themselves (default: they never do)."
    ] = None
    reasoning_tokens: Annotated[
        int, "vllm, sglang: number of reasoning tokens at the beginning of each chat response."
    ] = 0
    structured: Annotated[
        bool,
        "vllm, sglang: answer chat requests with tools by a tool call, and chat requests with a JSON schema by JSON.",
    ] = False
    per_request_metrics: Annotated[
        bool, "vllm: state the times of each request in the last event of its stream (--enable-per-request-metrics)."
    ] = False
    openai_transcripts: Annotated[
        bool, "vllm: stream transcripts as OpenAI does (transcript.text.delta), not in vLLM's chunks."
    ] = False
    api_key: str = field(default="", repr=False)
    faults: tuple[FaultRule, ...] = ()
    seed: Annotated[int, "Seed of the words, the jitter and the faults."] = 0
    log: Annotated[Path | None, "Write a JSON Lines file with every request and the times of its sends."] = None

    def __post_init__(self) -> None:
        problems = [message for message, valid in self._checks() if not valid]
        problems += filter(None, (rule.problem() for rule in self.faults))
        if problems:
            raise ConfigError("; ".join(problems))

    def _checks(self) -> tuple[tuple[str, bool], ...]:
        """Return a pair (error message, valid) for every check. `valid` is False if the check fails."""
        backends = simulated_backends()
        versions = simulated_versions().get(self.server, ())
        clocks = ("script", "batching")
        max_requests = self.max_concurrent_requests
        mean = self.eos_mean_tokens
        return (
            (f"server must be one of {', '.join(backends)}, not {self.server!r}", self.server in backends),
            (
                f"server_version of {self.server} must be one of {', '.join(versions) or 'none'}, "
                f"not {self.server_version!r}",
                not self.server_version or self.server_version in versions,
            ),
            (f"clock must be one of {', '.join(clocks)}, not {self.clock!r}", self.clock in clocks),
            (f"port must be 0 to 65535, not {self.port}", 0 <= self.port <= 65535),
            ("times must not be negative", min(self.ttft_s, self.itl_s, self.jitter_s) >= 0),
            (
                "slower_per_hour, slow_after and slow_factor must not be negative",
                min(self.slower_per_hour, self.slow_after_s or 0, self.slow_factor) >= 0,
            ),
            (f"tokens per event must be at least 1, not {self.tokens_per_event}", self.tokens_per_event >= 1),
            (f"stream_interval must be at least 1, not {self.stream_interval}", self.stream_interval >= 1),
            (f"draft_tokens must not be negative, not {self.draft_tokens}", self.draft_tokens >= 0),
            ("draft_tokens needs the clock script", self.clock == "script" or not self.draft_tokens),
            (f"acceptance must be 0 to 1, not {self.acceptance}", 0 <= self.acceptance <= 1),
            (f"speed must be positive, not {self.speed}", self.speed > 0),
            (
                f"the limit on concurrent requests must be at least 1, not {max_requests}",
                max_requests is None or max_requests >= 1,
            ),
            (f"max_model_len must be at least 2, not {self.max_model_len}", self.max_model_len >= 2),
            (f"kv_tokens must be at least 64, not {self.kv_tokens}", self.kv_tokens is None or self.kv_tokens >= 64),
            (f"reasoning_tokens must not be negative, not {self.reasoning_tokens}", self.reasoning_tokens >= 0),
            (
                "reasoning_tokens and structured need server vllm or sglang",
                self.server in REASONING_SERVERS or not (self.reasoning_tokens or self.structured),
            ),
            ("per_request_metrics needs server vllm", self.server == "vllm" or not self.per_request_metrics),
            ("openai_transcripts needs server vllm", self.server == "vllm" or not self.openai_transcripts),
            (f"eos_mean_tokens must be at least 1, not {mean}", mean is None or mean >= 1),
        )

    def to_json(self) -> bytes:
        """Return all fields as one line of JSON, for the standard input of a child process.

        The line contains the API key in plain text.
        """
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> SimulatedConfig:
        """Return the configuration that `to_json` encoded as `line`."""
        return msgspec.json.decode(line, type=cls, dec_hook=lambda type_, value: type_(value))
