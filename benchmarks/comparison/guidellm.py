"""guidellm: several worker processes with asyncio and httpx (Apache-2.0, vllm-project/guidellm)."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.comparison.client import Client, Load, Reported
from benchmarks.comparison.install import environment_with
from benchmarks.comparison.model import NAME

VERSION = "0.8.1"


def _install(folder: Path) -> None:
    environment_with(folder, f"guidellm=={VERSION}")


def _command(folder: Path, load: Load) -> list[str]:
    """Return the command line. With the profile `throughput`, guidellm sends all requests at once."""
    return [
        str(folder / "bin/guidellm"),
        "run",
        *("--backend", f"kind=openai_http,target={load.url},model={NAME}"),
        *("--profile", f"kind=throughput,max_concurrency={load.n}"),
        *("--constraint", f"kind=max_requests,count={load.n}"),
        *("--tokenizer", f"kind=huggingface_auto,model={load.model}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}"),
        *("--output", "kind=json,path=report.json"),
        "--disable-progress",
    ]


def _reported(scratch: Path) -> Reported:
    """Return the reported medians.

    The "TPOT" of guidellm includes the first token. Its "ITL" is what other load testers call TPOT.
    """
    (benchmark,) = json.loads((scratch / "report.json").read_text("utf-8"))["benchmarks"]
    metrics = benchmark["metrics"]
    return Reported(
        ttft_ms=metrics["time_to_first_token_ms"]["successful"]["median"],
        tpot_ms=metrics["inter_token_latency_ms"]["successful"]["median"],
    )


CLIENT = Client(name="guidellm", version=VERSION, install=_install, command=_command, reported=_reported)
