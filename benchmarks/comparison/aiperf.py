"""aiperf: nine or more processes that communicate over ZMQ, with aiohttp (Apache-2.0, ai-dynamo/aiperf)."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.comparison.client import Client, Load, Reported
from benchmarks.comparison.install import environment_with
from benchmarks.comparison.model import NAME

VERSION = "0.13.0"


def _install(folder: Path) -> None:
    environment_with(folder, f"aiperf=={VERSION}")


def _command(folder: Path, load: Load) -> list[str]:
    return [
        str(folder / "bin/aiperf"),
        "profile",
        *("--model", NAME),
        *("--url", load.url),
        *("--endpoint-type", "completions"),
        "--streaming",
        *("--tokenizer", str(load.model)),
        *("--concurrency", str(load.n)),
        *("--request-count", str(load.n)),
        *("--isl", str(load.input_tokens)),
        *("--osl", str(load.output_tokens)),
        *("--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", "artifacts"),
        *("--ui", "none"),
    ]


def _reported(scratch: Path) -> Reported:
    report = json.loads((scratch / "artifacts/profile_export_aiperf.json").read_text("utf-8"))
    return Reported(ttft_ms=report["time_to_first_token"]["p50"], tpot_ms=report["inter_token_latency"]["p50"])


CLIENT = Client(
    name="aiperf",
    version=VERSION,
    install=_install,
    command=_command,
    reported=_reported,
    environment={"HF_HUB_OFFLINE": ""},  # offline, it looks for a folder's path on the hub and in the cache only
)
