"""What `loadgen dissect` prints: shares, rates, bounds and checks, of figures that were made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import json

from loadgen.analysis.report.page import render
from loadgen.dissect import inference_report, training_report
from tests.support.dissected import inference_found, training_found


def test_a_module_has_its_share_its_rates_and_its_bound() -> None:
    """Of 139 ms QKV takes 50 forward: 80 GFLOP/s of 100 that the device allows."""
    rows = {row[0]: row for row in inference_report.module_rows(inference_found().cases[0], "forward")}
    assert list(rows) == ["QKV", "attention", "LM head"]
    assert rows["QKV"][1:2] + rows["QKV"][3:] == ("50.0 ms", "36%", "80.0", "0.200", "80%", "compute")
    assert rows["QKV"][2] == "12 ms"  # half of Student's interval of 45, 50, 55


def test_sums_are_held_against_the_whole() -> None:
    """Operators against layers, layers against the model, ours against torch.profiler; more than 5% off is said."""
    found = inference_found()
    told = inference_report.sum_ratios(found.cases[0])
    assert told["operators of a layer"] == pytest.approx(0.089 / 0.09)
    assert told["layers and the rest of the model"] == pytest.approx(1.0)
    assert told["operators of torch.profiler"] == pytest.approx(1.008)
    assert not any("5% off" in each for each in inference_report.sentences(found.cases[0], found))
    odd = replace(found.cases[0], least_s=(0.126, 0.1))
    assert any("5% off" in each for each in inference_report.sentences(odd, found))


def test_the_whole_model_is_told_from_two_layers() -> None:
    """32 layers of 45 ms, and the 10 ms of the output head."""
    found = inference_found()
    assert "all 32 layers and the rest would take about 1.45 s" in inference_report.sentences(found.cases[0], found)[0]


@pytest.mark.parametrize(
    "text", [inference_report.format_text(inference_found()), training_report.format_text(training_found())]
)
def test_a_terminal_of_80_columns_is_wide_enough(text: str) -> None:
    """No line is longer."""
    assert max(map(len, text.splitlines())) <= 80


def test_training_is_measured_beside_predicted() -> None:
    """Each part of time and kind of memory; by how much the peak is off; what could not be measured, and why."""
    found = training_found()
    times, split = training_report.time_rows(found)
    assert (split[0], split[6]) == ("zero3 x 2", "2.00 s")
    assert (times[0], times[1], times[-2], times[-1]) == ("naive", "3.50 s", "200", "2.80 s")
    memory, _ = training_report.memory_rows(found)
    assert memory[-1] == "-5.0%"
    assert ("naive", "activations, bytes", "763 MiB", "668 MiB") in training_report.parts_rows(found)
    words = " ".join(training_report.format_text(found).split())
    assert "Not measured: zero3+offload: offload needs a GPU" in words
    assert "off by at most 5.0% (naive)" in words
    assert ("zero3", "collectives", "2.00 s", "1.60 s") in training_report.parts_rows(found)
    assert "Between 2 processes, latency and bus bandwidth: all-gather 200 µs + 0.300 GB/s." in words


@pytest.mark.parametrize(
    "page",
    [
        render(inference_report.build_document(inference_found())),
        render(training_report.build_document(training_found())),
    ],
)
def test_the_page_needs_nothing_else(page: str) -> None:
    """Tables of everything, and no address that a browser would ask."""
    assert "facts-table" in page
    assert "https://" not in page.partition("<script")[0].replace("https://www.w3.org", "")


def test_json_has_every_repeat() -> None:
    """What is printed is derived from it, so that anybody can derive more."""
    told = json.decode(json.encode(inference_found()))
    assert told["cases"][0]["operators"][0]["seconds"] == pytest.approx([0.05, 0.055, 0.045])
    assert told["cases"][0]["operators"][0]["shape"] == "512 x 4096 x 4096"
