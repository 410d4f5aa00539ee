"""`loadgen hardware sweep` as a person runs it, and the hypothetical GPUs of `limits` and `simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import in_process

SWEEP = ("hardware", "sweep")
SMALL = (*SWEEP, "--technology", "7nm,3nm", "--memory", "HBM2E,HBM4")


def test_text_fits_80_columns_and_says_what_binds(tmp_path: Path) -> None:
    """A table per time and network, the parts, the chip, and that nothing is validated."""
    code, shown, err = in_process(tmp_path, *SWEEP, "--network", "NVLink 3,NVLink 5+InfiniBand XDR")
    assert (code, err) == (0, "")
    assert max(map(len, shown.splitlines())) <= 80
    for words in (
        "Serving Llama-2-70B in bf16 on 8 x A100-80GB SXM of other technologies",
        "Time per output token with NVLink 5 + InfiniBand XDR",
        "Prefill of one prompt with NVLink 3",
        "C compute, M memory, N network, L latency.",
        "Parts of the time per output token with HBM4 and NVLink 3",
        "1.4nm*",
        "Not validated: GPUs derived from A100-80GB SXM do not exist",
        "InfiniBand XDR has no effect on these times",
    ):
        assert words in shown


def test_many_memories_take_several_tables(tmp_path: Path) -> None:
    """No column is lost, and no line is longer than a terminal."""
    memories = "HBM2..HBM4,8 x HBM4,10 x GDDR7,24 x LPDDR5X"
    code, shown, _ = in_process(tmp_path, *SWEEP, "--technology", "5nm", "--memory", memories)
    assert code == 0
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("Time per output token\n") == 2
    assert all(name in shown for name in ("HBM2 ", "8 x HBM4", "24 x LPDDR5X"))


def test_json_has_every_point(tmp_path: Path) -> None:
    """Times, parts and bound of each combination, the figures of the GPU, and what was changed."""
    code, shown, _ = in_process(tmp_path, *SMALL, "--json")
    answer = json.loads(shown)
    assert (code, answer["validated"], len(answer["points"])) == (0, False, 4)
    point = answer["points"][-1]
    assert (point["technology"], point["memory"], point["limited_by"]) == ("3nm", "HBM4", "power")
    time = point["times"]["time per output token"]
    assert sum(time["parts_s"].values()) == pytest.approx(time["total_s"])
    assert time["bound"] == "latency"
    assert {change["figure"] for change in point["changes"]} >= {"SMs", "clock", "memory bandwidth"}


def test_memories_are_of_the_family_of_the_gpu(tmp_path: Path) -> None:
    """Without --memory, a GPU with GDDR6 is combined with GDDR6 and the later generations of GDDR."""
    code, shown, err = in_process(
        tmp_path, *SWEEP, "--gpu", "L4", "--model", "llama-3.1-8b", "--technology", "5nm", "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(shown)["memories"] == ["GDDR6", "GDDR6X", "GDDR7"]


def test_training_has_one_time(tmp_path: Path) -> None:
    """A step on 512 GPUs; the page is written too."""
    code, shown, _ = in_process(tmp_path, *SMALL, "--for", "training", "--page", "page.html")
    assert code == 0
    assert "Training GPT-3-175B in bf16 on 512 x A100-80GB SXM of other technologies" in shown
    assert "Time per training step" in shown
    assert "Prefill" not in shown
    assert shown.endswith("Page: page.html\n")
    assert "time per training step" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--technology", "6nm"), "unknown technology '6nm'"),
        (("--memory", "GDDR7"), "GDDR7 is of another family: name a number, such as 10 x GDDR7"),
        (("--network", "Token Ring"), "unknown network 'Token Ring'"),
        (("--gpu", "TPU v5e"), "the technology node and the memory of TPU v5e are not known"),
        (("--tp", "3"), "--tp 3 does not divide the 64 attention heads"),
        (("--for", "training", "--tp", "5"), "--tp 5 does not divide the 96 attention heads"),
        (("--tp", "1", "--memory", "HBM2"), "its weights of 138 GB need 4 GPUs or more"),
        (("--batch", "4"), "Leave --batch out, or add --for training."),
        (("--for", "training", "--in-flight", "4"), "--in-flight applies to inference only"),
        (("--page", "no/folder/page.html"), "cannot write no/folder/page.html"),
    ],
)
def test_mistakes_are_usage_errors(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """The message names what to write instead."""
    code, _, err = in_process(tmp_path, *SWEEP, *words)
    assert (code, message in err) == (2, True), err


def test_limits_of_a_hypothetical_gpu(tmp_path: Path) -> None:
    """The text says what was changed and that such a GPU does not exist; JSON has the changes."""
    two = ("limits", "--tp", "2", "--gpu")
    words = (*two, "A100", "--technology", "3nm", "--memory", "HBM4", "--network", "NVLink 5")
    code, shown, err = in_process(tmp_path, *words)
    assert (code, err) == (0, "")
    assert max(map(len, shown.splitlines())) <= 80
    shown = " ".join(shown.split())
    for expected in (
        "on 2 x A100-80GB SXM (3nm, HBM4, NVLink 5)",
        "power is the limit: 1.33 times the power at the old clock",
        "5 x 2,048 GB/s, 88% of it as with HBM2E",
        "not validated. A GPU like this does not exist",
    ):
        assert expected in shown
    answer = json.loads(in_process(tmp_path, *words, "--json")[1])
    assert answer["gpu_changes"][0]["figure"] == "SMs"
    assert not any(accuracy["validated"] for accuracy in answer["accuracy"].values())
    named = json.loads(in_process(tmp_path, *two, "A100 (3nm, HBM4, NVLink 5)", "--json")[1])
    assert named == answer
    trained = in_process(tmp_path, *words, "--training", "--flash")[1]
    assert "The GPU is hypothetical:" in trained
    assert trained.endswith("A GPU like this does not exist, so nothing was compared with measurements.\n")


def test_a_simulated_load_on_a_hypothetical_gpu(tmp_path: Path) -> None:
    """Faster memory shortens TPOT; the run is named after the GPU, and its limit is that of this GPU."""
    words = ("simulate", "--server", "vllm", "--gpu", "A100", "--model", "llama-3-8b", "--n", "20", "--rate", "2")
    summaries = []
    for out, options in (("real", ()), ("new", ("--technology", "3nm", "--memory", "HBM4"))):
        code, _, err = in_process(tmp_path, *words, *options, "--out", out, "--no-report")
        assert code == 0, err
        summaries.append(json.loads((tmp_path / out / "summary.json").read_text("utf-8")))
    real, new = (summary["latency"]["tpot_s"]["p50"] for summary in summaries)
    assert new < 0.7 * real
    assert "A100-80GB SXM (3nm, HBM4)" in (tmp_path / "new" / "run.jsonl").read_text("utf-8")
    assert summaries[1]["limit"]["gpu"] == "A100-80GB SXM (3nm, HBM4)"
    assert summaries[1]["limit"]["tpot_s"] < summaries[0]["limit"]["tpot_s"]
