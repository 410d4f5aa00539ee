"""genai-bench: Locust users that call requests.post (MIT, sgl-project/genai-bench)."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from benchmarks.comparison.client import Client, Load, Reported
from benchmarks.comparison.install import environment_with
from benchmarks.comparison.model import NAME

VERSION = "0.0.5"


def _install(folder: Path) -> None:
    environment_with(folder, f"genai-bench=={VERSION}")


def _command(folder: Path, load: Load) -> list[str]:
    return [
        str(folder / "bin/genai-bench"),
        "benchmark",
        *("--api-backend", "vllm"),
        *("--api-base", load.url),
        *("--api-key", "none"),
        *("--task", "text-to-text"),
        *("--api-model-name", NAME),
        *("--model-tokenizer", str(load.model)),
        *("--traffic-scenario", f"D({load.input_tokens},{load.output_tokens})"),
        *("--num-concurrency", str(load.n)),
        *("--max-requests-per-run", str(load.n)),
        *("--max-time-per-run", "5"),
        *("--additional-request-params", '{"ignore_eos": true}'),
        *("--experiment-base-dir", "."),
        *("--experiment-folder-name", "results"),
    ]


def _reported(scratch: Path) -> Reported:
    """Return the medians over the requests, from the latencies of each request in seconds.

    The summary of genai-bench is text in a spreadsheet, and is not used.
    """
    (file,) = (scratch / "results").glob("*_concurrency_*.json")
    requests = json.loads(file.read_text("utf-8"))["individual_request_metrics"]
    return Reported(
        ttft_ms=median(request["ttft"] for request in requests) * 1e3,
        tpot_ms=median(request["tpot"] for request in requests) * 1e3,
    )


CLIENT = Client(name="genai-bench", version=VERSION, install=_install, command=_command, reported=_reported)
