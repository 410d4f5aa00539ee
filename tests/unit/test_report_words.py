"""Sentences about a run: each says what is so, and nothing that is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import delivery_words, words
from analysis.metrics import summarise
from loadgen.runfile import read
from tests.runs import MILLISECOND_NS as MS
from tests.runs import burst, complete, dropped, footer, header, healthy, run_of, write


def summary_of(folder: Path, records: list[Any], **changes: Any) -> words.Summary:
    """The summary of a run that ended well."""
    return summarise(run_of(folder / "run", records, **changes))


def test_an_exact_run_is_called_exact(tmp_path: Path) -> None:
    """All complete, all lengths as asked: two plain sentences and no warning."""
    summary = summary_of(tmp_path, burst(12, 4))
    assert words.endings(summary) == "All 12 requests were complete."
    assert words.lengths(summary) == "Every prompt was exact; every answer as long as asked."
    assert words.warnings(summary) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt_tokens": 513}, "1 prompt of another length than asked; every answer as long as asked."),
        ({"prompt_tokens": None}, "1 answer did not say how long the prompt was; every answer as long as asked."),
        ({"output_tokens_asked": 9}, "Every prompt was exact; 1 answer of another length than asked."),
    ],
)
def test_other_lengths_are_counted(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    """A length that differs, or that nobody reported, is never called exact."""
    records = [complete(1, [500 * MS]), complete(2, [500 * MS, 600 * MS], **changes)]
    assert words.lengths(summary_of(tmp_path, records)) == sentence


def test_user_space_stamps_are_named(tmp_path: Path) -> None:
    """Where the kernel gave no stamps the sentence says who did, and how wide the error bar is."""
    records = [complete(1, [5000 * MS], stamps="user")]
    summary = summary_of(tmp_path, records, telemetry=healthy(stall_ns_max=3 * MS))
    assert words.believe(summary) == (
        "The client kept up: stamps by the program itself, not the kernel, error bar ±3.0 ms."
    )


def test_a_calibration_of_this_machine_is_quoted(tmp_path: Path) -> None:
    """The date, the p99 of TTFT for the stamps that were used, and the rate; no rate where none was exact."""
    spread = {"p50": 1e-6, "p99": 5e-6, "max": 2e-5}
    found = {
        "made_at": "2026-11-20T09:00:00+00:00",
        "version": "0.1.0",
        "errors": {"kernel": {"ttft_s": spread}},
        "events_per_s": 50_123.0,
    }
    for folder, rate, ending in (("a", 50_123.0, ", 50,123 events/s."), ("b", 0.0, ".")):
        client = {"stamps": "kernel", "calibration": found | {"events_per_s": rate}}
        said = words.believe(summary_of(tmp_path / folder, burst(12, 4), client=client))
        assert said.endswith(f"error bar ±20 µs; calibrated here on 2026-11-20: TTFT ±5.0 µs at p99{ending}")


def test_an_unknown_error_is_called_unknown(tmp_path: Path) -> None:
    """Without kernel stamps and without health samples there is no error bar to state."""
    summary = summary_of(tmp_path, [complete(1, [500 * MS], stamps="user")], telemetry=[])
    assert words.believe(summary).endswith("stamps by the program itself, not the kernel, error unknown.")


def test_everything_that_limits_belief_is_a_warning(tmp_path: Path) -> None:
    """Interruption, damage, merged first tokens, connections opened again and the run's own notes each have a line."""
    records = [complete(1, [500 * MS], first_token_merged=True, reopened=2)]
    end = footer(records, interrupted=True, notes=["worker 0 ended with signal SIGKILL"])
    folder = write(tmp_path / "run", [header(1), *records, *healthy(), b"{damaged", end])
    assert words.warnings(summarise(read(folder))) == [
        "The run was interrupted: figures are of the part that was kept.",
        "1 damaged line of the run file left out.",
        "1 of 1 first tokens came together with later ones: those TTFTs are upper bounds.",
        "2 connections had been closed by the server and opened again.",
        "worker 0 ended with signal SIGKILL.",
    ]


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("2026-11-21T09:00:00Z", "2026-11-21 09:00:00 UTC"),
        ("2026-11-21T10:00:00.655+01:00", "2026-11-21 09:00:00 UTC"),
        ("yesterday", "yesterday"),
    ],
)
def test_the_start_is_shown_in_utc(tmp_path: Path, stored: str, shown: str) -> None:
    """Whatever the zone it was written in; what is not a time stays as it is."""
    assert words.started(summary_of(tmp_path, [], started_at=stored)) == shown


def poisson(folder: Path, *, rate: float = 200, named: float = 200, late_ms: float = 0.05) -> words.Summary:
    """A Poisson load of 4,000 requests that stay for a quarter of a second."""
    random = np.random.default_rng(1)
    due_ns = np.cumsum(random.exponential(1000 * MS / rate, 4000)).astype(np.int64).tolist()
    late_ns = round(late_ms * MS)
    records = [
        complete(
            number,
            [due + 100 * MS, due + 250 * MS],
            due_ns=due,
            sent_ns=due + late_ns,
            sent_end_ns=due + late_ns,
            end_ns=due + 250 * MS,
        )
        for number, due in enumerate(due_ns)
    ]
    return summary_of(folder, records, plan=header(4000).plan | {"arrivals": f"poisson:{named:g}"})


def test_a_load_that_went_out_as_named_is_said_to_have(tmp_path: Path) -> None:
    """Number, rate and variation beside those named, the check of the gaps, and lateness, in one sentence."""
    summary = poisson(tmp_path)
    assert delivery_words.delivered(summary)
    sentence = delivery_words.delivery(summary)
    assert re.fullmatch(
        r"4,000 of 4,000 requests sent, \d{3}\.\d per second \(200\.0 named\), gaps of variation \d\.\d\d+ "
        r"\(1\.00 named\), fitting the name \(Kolmogorov-Smirnov p = 0\.\d+\), 99 % at most 50\.0 µs late\.",
        sentence,
    )


def test_a_load_of_another_rate_is_found_out(tmp_path: Path) -> None:
    """Half the rate that was named: not delivered, and the sentence says that the gaps are not of the name."""
    summary = poisson(tmp_path, rate=100, named=200)
    assert not delivery_words.delivered(summary)
    assert "not of the name" in delivery_words.delivery(summary)


def test_a_load_sent_too_late_is_not_said_to_fit(tmp_path: Path) -> None:
    """Late by more than a tenth of the mean gap: any gaps would pass, so the sentence claims nothing."""
    summary = poisson(tmp_path, late_ms=0.6)
    assert summary["delivery"]["ks"]["sent"] is None
    assert "too late for a check of their distribution, 99 % at most 600 µs late" in delivery_words.delivery(summary)


def test_a_burst_that_was_sent_says_how_late(tmp_path: Path) -> None:
    """All due at once have no rate to name: number and lateness are all there is to say."""
    summary = summary_of(tmp_path, burst(12, 4))
    assert delivery_words.delivered(summary)
    assert delivery_words.delivery(summary) == "12 of 12 requests sent, 99 % at most 98.0 µs late."


def test_dropped_requests_are_not_delivered(tmp_path: Path) -> None:
    """What was never sent is missing from the count, and the load was not the one named."""
    summary = summary_of(tmp_path, [*burst(3, 4), dropped(7)])
    assert not delivery_words.delivered(summary)
    assert delivery_words.delivery(summary).startswith("3 of 4 requests sent,")


def test_a_run_of_nothing_says_nothing_of_delivery(tmp_path: Path) -> None:
    """Nothing was asked, so nothing was or was not delivered."""
    assert delivery_words.delivery(summary_of(tmp_path, [])) == ""


def test_the_window_is_named_with_its_reason(tmp_path: Path) -> None:
    """From where to where, why, and how many requests it holds; of a whole run there is nothing to say."""
    sentence = words.window(poisson(tmp_path / "poisson"))
    assert re.fullmatch(
        r"Measured from 0\.\d+ s to \d\d\.\d s of the run \(about \d\d in flight\); 3,\d{3} requests were due within\.",
        sentence,
    )
    assert words.window(summary_of(tmp_path / "burst", burst(3, 4))) == ""
