"""The seam of the hardware: a made-up GPU and model, added here alone, are everywhere where hardware is named."""

from __future__ import annotations

import runpy
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from loadgen.servers import hardware
from loadgen.servers.hardware import HardwareError
from loadgen.servers.hardware.inference import predict_step
from loadgen.servers.hardware.roofline import compute_limits, make_deployment
from loadgen.servers.hardware.throughput_model import Load
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import Forked, loadgen
from tests.support.simulated import running

ROOT = Path(__file__).parents[2]
CARD, MODEL = "Made-up 9000", "Tiny-1B"
TWICE = {"bf16_TFLOPs": 624, "memory_GB": 160, "memory_GBps": 4078, "link_GBps": 800}
"""The default card twice over."""
SHAPE = {"layers": 4, "hidden": 64, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocabulary": 1000}


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A user's file with both."""
    file = tmp_path / "more.toml"
    tables = ((f'gpus."{CARD}"', TWICE), (f'models."{MODEL}"', {**SHAPE, "parameters": 300_000}))
    lines = [f"[{table}]\n" + "".join(f"{name} = {value}\n" for name, value in row.items()) for table, row in tables]
    file.write_text("\n".join(lines), "utf-8")
    return file


@pytest.fixture
def one_row_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpus.csv with one row more, as somebody would add it here."""
    folder = Path(shutil.copytree(hardware.FOLDER, tmp_path / "hardware"))
    columns = (folder / "gpus.csv").read_text("utf-8").partition("\n")[0].split(",")
    row = {"gpu": CARD, "source": "made up", **TWICE}
    with (folder / "gpus.csv").open("a", encoding="utf-8") as table:
        table.write(",".join(str(row.get(column, "")) for column in columns) + "\n")
    monkeypatch.setattr(hardware, "FOLDER", folder)


def test_a_card_is_as_fast_as_its_row_says(described: Path) -> None:
    """Twice the rates nearly halve the GEMMs of a prompt, and twice the memory holds more than twice the cache."""
    one, two = (make_deployment(name, "llama-2-7b", file=described) for name in ("A800", CARD))
    gemms_s = [predict_step(each, 1, tokens=8192).gemm for each in (one, two)]
    assert gemms_s[1] == pytest.approx(gemms_s[0] / 2, rel=0.15)
    assert two.kv_tokens(0.9) > 2 * one.kv_tokens(0.9)
    assert (
        predict_step(make_deployment(CARD, MODEL, file=described), 1, tokens=8192).gemm
        < predict_step(two, 1, tokens=8192).gemm
    )


def test_the_simulated_server_runs_on_it(described: Path) -> None:
    """A simulated server told of the file answers at the card's pace: a prompt of 4,000 tokens in half the time."""
    seconds = []
    for gpu in ("A800-80GB SXM", CARD):
        config = SimulatedConfig(server="vllm", clock="batching", gpu=gpu, hardware=described)
        with running(config) as server:
            asked = {"prompt": [5] * 4000, "max_tokens": 1}
            httpx.post(f"{server.url}/v1/completions", json=asked, timeout=30).raise_for_status()
        (line,) = server.log
        seconds.append((line.due_ns[0] - line.received_ns) / 1e9)
    assert seconds[1] == pytest.approx(seconds[0] / 2, rel=0.05)


def test_the_command_takes_it(described: Path) -> None:
    """`loadgen mock-server --gpu NAME --hardware FILE` starts. Without the file the error lists the cards."""
    options = ["--server", "tgi", "--clock", "batching", "--gpu", CARD, "--model-shape", MODEL]
    ended = loadgen(ROOT, "mock-server", *options)
    assert (ended.returncode, "unknown GPU 'Made-up 9000': choose one of RTX 3090" in ended.stderr) == (2, True)
    asked = ["mock-server", *options, "--hardware", str(described)]
    with Forked(asked, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("ready http://")
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0


def test_its_limits_are_told(described: Path) -> None:
    """`loadgen limits` of the default card twice over: half the memory limit, and more room for the cache."""
    load = Load(512, 128, 4)
    one, two = (compute_limits(make_deployment(name, "llama-2-7b", file=described), load) for name in ("A800", CARD))
    assert two.limit.decode_step_s == pytest.approx(one.limit.decode_step_s / 2)
    assert two.limit.kv_tokens > 2 * one.limit.kv_tokens
    assert two.expected.tpot_s < one.expected.tpot_s
    assert compute_limits(make_deployment(CARD, MODEL, file=described), load).model == MODEL


@pytest.mark.usefixtures("one_row_more")
def test_a_row_is_enough() -> None:
    """A row of gpus.csv is a card for the simulator, in the lists of errors, as the nearest name, and in the page."""
    assert hardware.gpu(CARD).memory_bytes == 160e9
    with pytest.raises(HardwareError, match=rf"'made-up 900' \(did you mean {CARD}\?\): choose one of .*, {CARD}"):
        hardware.gpu("made-up 900")
    page = runpy.run_path(str(ROOT / "docs/generate.py"))["hardware"]()
    assert f"| {CARD} |  |  | 624 |  |  |  | 160 | 4078 |" in page


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[gpus."x"]\nbf16_TFLOPs = 1\nmemory_GB = 1', "x: pcie_GBps must be a positive number, not None"),
        ('[gpus."x"]\nlink_GBps = 1\nbf16_TFLOPs = "many"', "x: bf16_TFLOPs must be a positive number, not 'many'"),
        ('[gpus."x"]\nspeed = 3', "must be a table with only the columns also, architecture, bf16_TFLOPs, "),
        ("[cards]", r"unknown table cards: only \[gpus\] and \[models\] are allowed"),
        ("gpus", "more.toml: "),
    ],
)
def test_a_file_that_says_too_little_or_too_much_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """The message names the file or the entry, and the column."""
    file = tmp_path / "more.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(HardwareError, match=words):
        hardware.gpu("x", file)
