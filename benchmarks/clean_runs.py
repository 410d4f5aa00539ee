"""Counts warnings in runs that have no fault: simulated servers, short and varied loads, with canaries and own times.

    python -m benchmarks.clean_runs              200 runs (a quarter of an hour)
    python -m benchmarks.clean_runs --runs 20    a first look

Every run has a new simulated server, so no prompt is cached and nothing holds tokens back. Each warning is therefore
false, with one exception: findings on the client describe this machine, which may be busy. They are counted apart.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from loadgen import Plan, run
from loadgen.analysis.report.findings import findings
from loadgen.errors import LoadgenError
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn

ENDPOINTS = {
    "vllm": ("completions", "chat", "responses", "messages"),
    "sglang": ("generate", "completions", "chat"),
    "tgi": ("generate", "chat"),
    "lightllm": ("generate",),
    "tei": ("embed", "embeddings"),
}
STATES_TIMES = (
    *(("vllm", "completions"), ("vllm", "chat"), ("sglang", "generate")),
    *(("tei", "embed"), ("tei", "embeddings")),
)
"""Servers and endpoints whose responses state times, which --server-timing reads."""
CLIENT_FINDINGS = ("client", "bottleneck", "error", "priority", "delivery")
"""Ids of findings on the client and its machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs, and print each warning and the totals. Return 1 if a warning is false, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    options = parser.parse_args(arguments)
    false, client, with_false = Counter[str](), Counter[str](), 0
    for number in range(options.first, options.first + options.runs):
        config, plan = draw(Random(f"{options.seed}/{number}"))  # noqa: S311 - not secret
        warnings = warnings_of(config, plan)
        unexpected = [(name, text) for name, text in warnings if name not in CLIENT_FINDINGS]
        false.update(name for name, _ in unexpected)
        client.update(name for name, _ in warnings if name in CLIENT_FINDINGS)
        with_false += bool(unexpected)
        for name, text in warnings:
            print(f"run {number}: {config.server} {plan} {name}: {text}", flush=True)
    print(f"{options.runs} runs, {with_false} with a false warning: {dict(false)}. About the client: {dict(client)}")
    return int(with_false > 0)


def draw(random: Random) -> tuple[SimulatedConfig, dict[str, Any]]:
    """Return a random simulated server, and the settings of a random load that it carries."""
    server = random.choice(list(ENDPOINTS))
    endpoint = random.choice(ENDPOINTS[server])
    times = (server, endpoint) in STATES_TIMES and random.random() < 0.5
    batching = random.random() < 0.3
    config = SimulatedConfig(
        server=server,
        clock="batching" if batching else "script",
        ttft_s=random.uniform(0.02, 0.2),
        itl_s=random.uniform(0.003, 0.02),
        jitter_s=random.choice((0, 0, 0.002)),
        per_request_metrics=times and server == "vllm",
    )
    load: dict[str, Any] = random.choice(
        (
            {"n": random.randint(10, 60)},
            {"arrivals": f"poisson:{random.randint(10, 40)}", "duration_s": random.uniform(1, 2)},
            {"arrivals": f"constant:{random.randint(10, 40)}", "duration_s": random.uniform(1, 2)},
            {"arrivals": f"closed:{random.randint(1, 16)}", "n": random.randint(20, 60)},
        )
    )
    lengths = {"input_tokens": str(random.randint(16, 256)), "output_tokens": str(random.randint(4, 32))}
    if random.random() < 0.3:
        lengths["input_tokens"] = "uniform:16..128"
    # A batching engine answers a burst before the first canary, which the report rightly says.
    canaries = 0 if server == "tei" or (batching and "arrivals" not in load) else random.choice((0, 3, 8))
    return config, {"endpoint": endpoint, **load, **lengths, "verify": canaries, "server_timing": times}


def warnings_of(config: SimulatedConfig, settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the id and the sentence of each warning of a run against a new simulated server."""
    with tempfile.TemporaryDirectory() as folder, spawn(config) as url:
        try:
            summary = run(Plan(url=url, **settings), out=Path(folder) / "run").summary
        except LoadgenError as error:
            return [("refused", str(error))]
    return [(finding.id, finding.sentence) for finding in findings(summary) if finding.level in ("warning", "error")]


if __name__ == "__main__":
    raise SystemExit(main())
