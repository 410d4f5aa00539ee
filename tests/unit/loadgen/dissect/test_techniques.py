"""Techniques of a training step by their names and letters; nothing of this needs torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.dissect import DissectError, check_installed
from loadgen.dissect.techniques import TECHNIQUES, Technique, parse_technique, unsupported_reason
from loadgen.errors import install_hint
from tests.support.command import in_process


@pytest.mark.parametrize(
    ("text", "technique"),
    [
        ("naive", Technique()),
        ("recompute", Technique("recompute", recompute=True)),
        ("F+R+Z3O", Technique("flash+recompute+zero3+offload", recompute=True, flash=True, zero=3, offload=True)),
        ("zero3+offload", Technique("zero3+offload", zero=3, offload=True)),
        ("QL", Technique("qlora", qlora=True)),
        ("L+Z2", Technique("lora+zero2", lora=True, zero=2)),
        ("Q", Technique("quantised", quantised=True)),
    ],
)
def test_a_technique_is_what_its_words_say(text: str, technique: Technique) -> None:
    """In words, or as arXiv 2311.03687 writes it."""
    assert parse_technique(text) == technique


@pytest.mark.parametrize("text", ["zero4", "fast", "Z2+Z3", "L+QL"])
def test_what_is_no_technique_is_said(text: str) -> None:
    """Unknown words, and two that exclude each other."""
    with pytest.raises(DissectError) as problem:
        parse_technique(text)
    assert text.split("+", maxsplit=1)[0] in str(problem.value)
    assert problem.value.hint


def test_every_letter_is_a_word() -> None:
    """Each word but naive has letters, which stand for it."""
    for word, (letters, _, _) in TECHNIQUES.items():
        assert parse_technique(letters or word) == parse_technique(word)


@pytest.mark.parametrize(
    ("text", "device", "processes", "words"),
    [
        ("zero3+offload", "cpu", 2, "offload needs a GPU"),
        ("offload", "cuda", 2, "offload needs zero2 or zero3"),
        ("zero2", "cpu", 1, "needs --processes 2"),
        ("qlora+zero2", "cpu", 2, "cannot be split"),
        ("quantised+lora", "cpu", 1, "use qlora"),
        ("F+R+Z3O", "cuda", 8, ""),
        ("naive", "cpu", 1, ""),
    ],
)
def test_each_says_what_it_cannot_do_here(text: str, device: str, processes: int, words: str) -> None:
    """On this device, with so many processes; nothing where it can be measured."""
    found = unsupported_reason(parse_technique(text), device, processes)
    assert words in found
    assert bool(words) == bool(found)


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    """Exit code 2, and the extra; `--help` needs nothing."""
    code, out, err = in_process(tmp_path, "dissect", "inference", "--model", "llama-2-7b")
    assert (code, out) == (2, "")
    assert "loadgen dissect needs torch" in err
    assert install_hint("dissect") in err
    assert in_process(tmp_path, "dissect", "training", "--help")[0] == 0
    with pytest.raises(DissectError, match="needs surely_not_there"):
        check_installed("json", "surely_not_there")


def test_what_needs_no_torch_imports_none(root: Path) -> None:
    """Techniques, predictions and what is said of them, where torch cannot be imported at all."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import loadgen.dissect.techniques, loadgen.dissect.results, loadgen.dissect.predictions, loadgen.cli.dissect\n"
        "import loadgen.dissect.inference_report, loadgen.dissect.training_report\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
