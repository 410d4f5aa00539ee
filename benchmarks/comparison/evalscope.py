"""evalscope perf: one asyncio loop with aiohttp, which writes to SQLite during the run (Apache-2.0,
modelscope/evalscope).
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.comparison.client import Client, Load, Reported
from benchmarks.comparison.install import environment_with
from benchmarks.comparison.model import NAME

VERSION = "1.14.1"


def _install(folder: Path) -> None:
    environment_with(folder, f"evalscope[perf]=={VERSION}")


def _command(folder: Path, load: Load) -> list[str]:
    return [
        str(folder / "bin/evalscope"),
        "perf",
        *("--model", NAME),
        *("--tokenizer-path", str(load.model)),
        *("--url", f"{load.url}/v1/completions"),
        *("--api", "openai"),
        *("--dataset", "random"),
        *("--min-prompt-length", str(load.input_tokens)),
        *("--max-prompt-length", str(load.input_tokens)),
        *("--min-tokens", str(load.output_tokens)),
        *("--max-tokens", str(load.output_tokens)),
        *("--number", str(load.n)),
        *("--parallel", str(load.n)),
        *("--extra-args", '{"ignore_eos": true}'),
        *("--outputs-dir", "."),
        "--no-timestamp",
    ]


def _reported(scratch: Path) -> Reported:
    (file,) = scratch.glob("*/parallel_*/benchmark_percentile.json")
    (middle,) = (row for row in json.loads(file.read_text("utf-8")) if row["Percentiles"] == "50%")
    return Reported(ttft_ms=middle["TTFT (ms)"], tpot_ms=middle["TPOT (ms)"])


CLIENT = Client(name="evalscope", version=VERSION, install=_install, command=_command, reported=_reported)
