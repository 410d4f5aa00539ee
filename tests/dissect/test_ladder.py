"""The architectures in PyTorch: each is its recurrence, whole or split over two processes, in values and gradients."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed
from torch.nn import functional

from loadgen.dissect.inference import InferenceSpec, interleaved_step_times
from loadgen.dissect.inference_report import hidden_share
from loadgen.dissect.models.llama import LAYERS, Attention, Llama, Mlp, build_model
from loadgen.dissect.models.process_group import ProcessGroup
from loadgen.dissect.processes import run_in_processes
from loadgen.servers.hardware import ModelShape, shape_from_row
from loadgen.servers.hardware.inference import ARCHITECTURES

ROOT = Path(__file__).parents[2]
COMPUTED = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48, "vocabulary": 64}
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROWS = ("o_proj", "down_proj")
DELAY_S = 0.03
SENT = {"standard": 6, "parallel": 3, "ladder": 6, "no-communication": 0}


def tiny() -> ModelShape:
    return shape_from_row("tiny", COMPUTED | {"mlp_matrices": 3, "tied": 0, "parameters": 1})


def whole(architecture: str) -> Llama:
    torch.manual_seed(1)
    return build_model(tiny(), architecture=architecture, dtype=torch.float64)


def tokens() -> Tensor:
    return torch.arange(14).reshape(2, 7) * 5 % 64


def loss(model: Llama) -> Tensor:
    return functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())


def written_out(model: Llama, architecture: str) -> Tensor:
    """The recurrences of arXiv 2501.06589, figure 1, on one device."""
    decoder = model.model
    start = decoder.embed_tokens(tokens())
    positions = decoder._positions(0, 7, start)
    x = [start, start]  # x_(i-2) and x_(i-1) at the end
    for layer in decoder.layers:
        attention = lambda normed, layer=layer: layer.self_attn(normed, positions)  # noqa: E731
        if architecture == "parallel":
            both = attention(layer.input_layernorm(x[-1])) + layer.mlp(layer.post_attention_layernorm(x[-1]))
            x.append(x[-1] + both)
            continue
        for norm, h in ((layer.input_layernorm, attention), (layer.post_attention_layernorm, layer.mlp)):
            x.append(x[-1] + h(norm(x[-2] if architecture == "ladder" else x[-1])))
    return model.lm_head(decoder.norm(x[-1]))


@pytest.mark.parametrize("architecture", LAYERS)
def test_each_architecture_is_its_recurrence(architecture: str) -> None:
    """On one device, written out in ten lines: the same logits, and the same gradient of every weight."""
    model = whole(architecture)
    expected = written_out(model, architecture)
    torch.testing.assert_close(model(tokens()), expected, rtol=0, atol=1e-12)
    names, weights = zip(*model.named_parameters(), strict=True)
    wanted = torch.autograd.grad(expected.sum(), weights)
    for name, gradient, other in zip(names, torch.autograd.grad(model(tokens()).sum(), weights), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-10, msg=name)


def test_the_model_of_the_hardware_knows_the_same() -> None:
    """`loadgen limits` and `loadgen dissect` call the architectures alike, with as many all-reduces."""
    assert {name: 3 * count for name, count in ARCHITECTURES.items()} == SENT
    assert [*LAYERS] == [*ARCHITECTURES]


def test_they_are_not_all_the_same() -> None:
    """Parallel and ladder give other logits than the standard model of the same weights."""
    models = {name: whole(name)(tokens()) for name in ("standard", "parallel", "ladder")}
    assert not torch.allclose(models["standard"], models["ladder"], atol=1e-3)
    assert not torch.allclose(models["standard"], models["parallel"], atol=1e-3)


def test_a_ladder_decodes_what_it_computes_at_once() -> None:
    """With its cache, token after token, it has the logits of the whole prompt."""
    model = whole("ladder")
    caches = model.caches(2, 7)
    with torch.no_grad():
        one_by_one = torch.cat([model(tokens()[:, place : place + 1], caches) for place in range(7)], dim=1)
        torch.testing.assert_close(one_by_one, model(tokens()), rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def together() -> dict[str, Any]:
    """What two processes find that share each layer; they are started once."""
    found: dict[str, Any] = run_in_processes(_together, None, 2, "cpu", 1)
    return found


def _together(_: Any) -> dict[str, Any]:
    differences = {name: _difference(name) for name in SENT}
    return {"differences": differences, "sent": _sent(), "delays": _delays(), "overlap": _overlap()}


@pytest.mark.parametrize("architecture", ["standard", "parallel", "ladder"])
def test_two_processes_compute_what_one_does(together: dict[str, Any], architecture: str) -> None:
    """Logits, and gradients of every weight: of those that are split, each process's part."""
    found = together["differences"][architecture]
    assert {"logits", "model.embed_tokens.weight", "model.layers.2.self_attn.k_proj.weight"} < set(found)
    assert max(found.values()) < 1e-10, found


def test_each_architecture_sends_what_it_says(together: dict[str, Any]) -> None:
    """Of three layers the standard model and the ladder pass six all-reduces, the parallel one three."""
    assert together["sent"] == SENT


def test_the_link_delays_what_is_waited_for(together: dict[str, Any]) -> None:
    """An all-reduce lasts as long as the delay, from its start; what is computed meanwhile costs nothing more."""
    waited, beside = together["delays"]
    assert DELAY_S <= waited < 3 * DELAY_S
    assert beside < waited + DELAY_S / 2


@pytest.mark.parametrize(("architecture", "least", "most"), [("ladder", 0.8, 1.0), ("parallel", 0.3, 0.7)])
def test_a_ladder_hides_what_lasts_as_long_as_a_block(
    together: dict[str, Any], architecture: str, least: float, most: float
) -> None:
    """Of 16 all-reduces all but the last run beside a block; the parallel model saves every second."""
    assert least <= hidden_share(together["overlap"][architecture], architecture) <= most


def _overlap() -> dict[str, dict[str, list[float]]]:
    """With blocks that last as long as the link, however busy this machine is: they sleep."""

    def block(normed: Tensor, *_: Any) -> Tensor:
        time.sleep(DELAY_S)
        return normed / 2

    asked = InferenceSpec(model="tiny", input_tokens=4, tensor_parallel=2, repeats=3, warmup=1)
    found = {}
    with (
        mock.patch.multiple(Attention, forward=staticmethod(block)),
        mock.patch.multiple(Mlp, forward=staticmethod(block)),
    ):
        for architecture in ("ladder", "parallel"):
            model = build_model(replace(tiny(), layers=8), group=ProcessGroup(DELAY_S))
            found[architecture] = interleaved_step_times(model, replace(asked, architecture=architecture), 1)
    return found


def _difference(architecture: str) -> dict[str, float]:
    """Of the second process too: the largest over both."""
    complete = whole(architecture)
    part = build_model(tiny(), architecture=architecture, group=ProcessGroup(), dtype=torch.float64)
    part.load_state_dict({name: _own(name, weight) for name, weight in complete.state_dict().items()})
    loss(complete).backward()
    loss(part).backward()
    found = {"logits": (complete(tokens()) - part(tokens())).abs().max()}
    wanted = dict(complete.named_parameters())
    for name, weight in part.named_parameters():
        found[name] = (weight.grad - _own(name, wanted[name].grad)).abs().max()
    for each in found.values():
        distributed.all_reduce(each, op=distributed.ReduceOp.MAX)
    return {name: float(value) for name, value in found.items()}


def _own(name: str, weight: Tensor | None) -> Tensor:
    """The part of this process."""
    assert weight is not None
    split = 0 if any(each in name for each in COLUMNS) else 1 if any(each in name for each in ROWS) else None
    return weight if split is None else weight.chunk(2, dim=split)[distributed.get_rank()]


def _sent() -> dict[str, int]:
    found = {}
    for architecture in SENT:
        group = _Counting()
        with torch.no_grad():
            build_model(tiny(), architecture=architecture, group=group)(tokens())
        found[architecture] = group.count
    return found


class _Counting(ProcessGroup):
    count = 0

    def _start(self, partial: Tensor) -> Callable[[], Tensor]:
        self.count += 1
        return super()._start(partial)


def _delays() -> tuple[float, float]:
    group, value = ProcessGroup(DELAY_S), torch.ones(4)
    with torch.no_grad():
        return min(_timed(group, value, 0.0) for _ in range(5)), min(_timed(group, value, DELAY_S) for _ in range(5))


def _timed(group: ProcessGroup, value: Tensor, computing_s: float) -> float:
    distributed.barrier()
    begin = time.perf_counter()
    arrived = group.start_all_reduce(value.clone())
    time.sleep(computing_s)
    assert (arrived() == 2).all()
    return time.perf_counter() - begin


def command(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = ["-m", "loadgen", "dissect", "inference", "--model", str(folder / "config.json"), "--input", "8", *options]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)


def test_the_command_measures_by_turns(tmp_path: Path) -> None:
    """Each of four all-reduces lasts 30 ms at least. The ladder has two under way at a time: it saves half, even where
    blocks take no time at all."""
    options = ("--architecture", "ladder", "--tp", "2", "--link-delay", "30ms", "--repeats", "3", "--warmup", "1")
    done = command(tmp_path, *options, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["architecture"], found["link_delay_s"]) == ("ladder", DELAY_S)
    least = {name: min(seconds) for name, seconds in found["cases"][0]["beside_s"].items()}
    assert [*least] == ["standard", "ladder", "no-communication"]
    assert least["standard"] > 4 * DELAY_S
    assert 2 * DELAY_S < least["ladder"] < least["standard"] - DELAY_S


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--architecture", "stairs"), "choose one of standard, parallel, ladder, no-communication"),
        (("--link-delay", "200us"), "one process has no link Choose --tp 2 or more"),
        (("--tp", "2", "--link-delay", "200"), "200 has no unit"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, options: tuple[str, ...], part: str) -> None:
    """Exit code 2, and what to do."""
    done = command(tmp_path, *options)
    assert done.returncode == 2
    assert part in " ".join(done.stderr.replace("│", " ").split())
