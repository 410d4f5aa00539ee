"""Sentences about a run: each says what is so, and nothing that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import words
from analysis.metrics import summarise
from loadgen.runfile import read
from tests.runs import MILLISECOND_NS as MS
from tests.runs import burst, complete, footer, header, healthy, run_of, write


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
