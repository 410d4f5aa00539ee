"""Ladders without torch: what `loadgen servers convert` makes of a Llama, and how a server is started with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from loadgen.servers.errors import LaunchError
from loadgen.servers.launch import LaunchSpec, process
from loadgen.servers.launch.spec import LOCAL, ended_error
from tests.support.command import loadgen

ROOT = Path(__file__).parents[2]
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "rope_scaling": None}


@pytest.fixture
def standard(tmp_path: Path) -> Path:
    folder = tmp_path / "standard"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def convert(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return loadgen(ROOT, "servers", "convert", str(source), str(target))


def test_a_ladder_has_the_weights_of_the_standard_model(standard: Path, tmp_path: Path) -> None:
    """Every file is there, the weights once on the disk; of config.json the architecture alone is another."""
    ladder = tmp_path / "models" / "ladder-tiny"
    done = convert(standard, ladder)
    assert (done.returncode, f"--model {ladder}" in done.stdout) == (0, True)
    assert json.loads((ladder / "config.json").read_text()) == CONFIG | {"architectures": ["LadderLlamaForCausalLM"]}
    assert (ladder / "model.safetensors").samefile(standard / "model.safetensors")
    assert (ladder / "tokenizer.json").read_text() == "{}"
    assert not (ladder / "tokenizer.json").samefile(standard / "tokenizer.json")


def test_weights_are_copied_where_they_cannot_be_linked(standard: Path) -> None:
    """To another file system, and from behind links, as the cache of the Hub has them."""
    weights = standard / "model.safetensors"
    weights.rename(standard.parent / "blob")
    weights.symlink_to("../blob")
    ladder = Path(f"/dev/shm/ladder-{os.getpid()}")
    try:
        assert convert(standard, ladder).returncode == 0
        copy = ladder / "model.safetensors"
        assert (copy.is_symlink(), copy.read_bytes()) == (False, b"weights")
    finally:
        subprocess.run(["rm", "-rf", ladder], check=True)


def test_the_plugin_travels_with_a_ladder(standard: Path, tmp_path: Path) -> None:
    """Its folder on the path is a distribution with vLLM's entry point: what Docker needs beside the weights."""
    convert(standard, tmp_path / "ladder")
    (found,) = distributions(path=[str(tmp_path / "ladder" / "plugin")])
    (point,) = found.entry_points
    assert (point.group, point.value) == ("vllm.general_plugins", "ladder_residual:register")


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ('{"architectures": ["GPT2LMHeadModel"]}', "is not a LlamaForCausalLM its config.json says 'GPT2LMHeadModel'"),
        ('{"architectures": 7}', "is not a LlamaForCausalLM"),
        ("[]", "cannot read"),
        (None, "No such file"),
    ],
)
def test_what_is_no_llama_is_refused(standard: Path, tmp_path: Path, config: str | None, part: str) -> None:
    """In words, and nothing is written."""
    (standard / "config.json").unlink()
    if config is not None:
        (standard / "config.json").write_text(config)
    done = convert(standard, tmp_path / "ladder")
    assert done.returncode == 2
    assert part in " ".join(done.stderr.split())
    assert not (tmp_path / "ladder").exists()


def test_nothing_is_overwritten(standard: Path, tmp_path: Path) -> None:
    """A folder that is there stays as it is."""
    assert "already exists" in convert(standard, tmp_path).stderr


def test_vllm_is_started_with_the_plugin(standard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a ladder alone, before what stood on its path; another server refuses it."""
    convert(standard, tmp_path / "ladder")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")

    def environment(server: str, model: Path) -> dict[str, str]:
        spec = LaunchSpec(server, LOCAL, str(model), "process", {"python": sys.executable})
        return dict(process.command_of(spec, "127.0.0.1", 9).env)

    plugin, rest = environment("vllm", tmp_path / "ladder")["PYTHONPATH"].split(os.pathsep)
    assert ((Path(plugin) / "ladder_residual" / "vllm_llama.py").is_file(), rest) == (True, "/somewhere")
    assert "PYTHONPATH" not in environment("vllm", standard)
    with pytest.raises(LaunchError, match="the model is a ladder, which lightllm does not support"):
        environment("lightllm", tmp_path / "ladder")


def test_a_vllm_without_the_plugin_is_explained() -> None:
    """By the words of vLLM 0.32, which a container prints that was told of no plugin."""
    log = "Value error, Model architectures ['LadderLlamaForCausalLM'] are not supported for now. Supported archi..."
    problem = ended_error("vllm", log, "exit code 1")
    assert "has no plugin for it" in str(problem)
    assert "VLLM_PYTHONPATH=/models/MODEL/plugin" in problem.hint
