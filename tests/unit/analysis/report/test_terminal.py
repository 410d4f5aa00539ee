"""A document in the terminal, and the numbers in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.analysis.format import UNKNOWN, duration, significant
from loadgen.analysis.objectives import parse
from loadgen.analysis.report import markdown
from loadgen.analysis.report.run_document import brief_document
from loadgen.analysis.slo import judge
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import Summary
from tests.support.runs import burst, failed, header, healthy, loop, run_of, summarise, text_of, typed


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """A run on a simulated server, with failures whose words would upset a terminal."""
    nasty = "\x1b[2Jno [bold]room[/bold]\nleft " + "and so on " * 30
    records = [*burst(100, 8), *(failed(200 + i, "in_band_error", nasty) for i in range(3))]
    telemetry = healthy(stall_ns_max=2_000_000_000)
    return typed(
        summarise(run_of(tmp_path_factory.mktemp("text") / "run", records, simulated=True, telemetry=telemetry))
    )


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_the_terminal(simulated: Summary, width: int) -> None:
    """Everything fits, down to 60 columns."""
    assert max(map(len, text_of(simulated, width=width).splitlines())) <= width


def test_every_title_says_simulated(simulated: Summary) -> None:
    """The headline, the latency table and the failures are each marked, with the speed of the clock."""
    titles = [line for line in text_of(simulated).splitlines() if line.startswith("SIMULATED at 5 times speed")]
    assert len(titles) == 3


def test_a_real_server_is_not_called_simulated(tmp_path: Path) -> None:
    """The word appears only where it is true."""
    assert "SIMULATED" not in text_of(summarise(run_of(tmp_path / "run", burst(20, 4))))


def test_a_percentile_of_too_few_samples_is_marked(simulated: Summary) -> None:
    """A hundred requests have a p90, and a p99 with a mark: a line below says how many samples it takes."""
    text = text_of(simulated)
    row = next(line for line in text.splitlines() if line.startswith("TTFT"))
    ttft = simulated.latencies["ttft_s"]
    assert significant((ttft.p90 or 0) * 1e3, 4) in row
    assert f"{significant((ttft.p99 or 0) * 1e3, 4)}*" in row
    assert "* too few independent samples: p95 130, p99 662 needed." in text


def test_a_servers_words_cannot_steer_the_terminal(simulated: Summary) -> None:
    """Control characters are gone and markup stands as it is."""
    text = text_of(simulated)
    assert "\x1b" not in text
    assert "[bold]room[/bold] left" in text


def test_colours_only_on_request(simulated: Summary) -> None:
    """A terminal gets colours; a file or a pipe gets the same words without."""
    assert "\x1b[" in text_of(simulated, colour=True)


def test_every_finding_has_its_line(simulated: Summary) -> None:
    """Incomplete requests, the client's verdict and its reason."""
    text = " ".join(text_of(simulated).split())
    assert "3 of 103 requests not complete (2.9%): " in text
    assert "Invalid: the client was the limit" in text
    assert "Longest stall 2.00 s (limit 200 ms)" in text


def test_an_open_loop_says_what_was_delivered_and_measured(tmp_path: Path) -> None:
    """No burst skew; one line on delivery and one on the window, and the rate in the title."""
    plan = header(1200).plan | {"arrivals": "constant:100"}
    text = " ".join(text_of(summarise(run_of(tmp_path / "run", loop(1200), plan=plan))).split())
    assert "Burst skew" not in text
    assert "100 per second, evenly" in text
    assert "1,200 of 1,200 requests sent, 100.0 /s (target 100.0), p99 dispatch delay 20.0 µs." in text
    assert "(about 50 in flight)" in text


@pytest.mark.parametrize("simulated_server", [False, True])
def test_every_objective_has_its_line(tmp_path: Path, simulated_server: bool) -> None:
    """Verdict, expression, what was measured and what that leaves out, within the width, under a marked title."""
    run = run_of(tmp_path / "run", [*burst(59, 4), failed(59)], simulated=simulated_server)
    summary = typed(summarise(run))
    asked = parse(["ttft.p99 < 1us", "failed <= 1", "complete >= 95%"])
    summary.objectives = judge(asked, frame_of_run(run), summary, 0.95)
    lines = text_of(summary).splitlines()
    start = lines.index("SIMULATED at 5 times speed  Objectives" if simulated_server else "Objectives")
    text = " ".join(" ".join(lines[start + 2 :]).split())
    assert text.startswith("fail ttft.p99 < 1us ")
    assert "Latencies leave out 1 incomplete request." in text
    assert "pass failed <= 1 1 request inconclusive complete >= 95% " in text
    assert text.endswith("1 objective inconclusive: neither passed nor failed.")
    assert max(map(len, lines)) <= 80


def test_markdown_has_the_same_tables_and_no_markup_of_a_servers(simulated: Summary) -> None:
    """What a server said is on one line, escaped, in its cell; every finding is a point of a list."""
    text = markdown(brief_document(simulated))
    row = next(line for line in text.splitlines() if "in\\_band\\_error" in line)
    assert row.count(" | ") == 3
    assert "\\[bold\\]room\\[/bold\\] left" in row
    assert "- **Error:** 3 of 103 requests not complete (2.9%): " in text
    assert "| TTFT | " in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.012345, "0.0123"),
        (1.0, "1.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (123.4, "123"),
        (56137.6, "56,138"),
        (-2.5, "-2.50"),
        (None, UNKNOWN),
    ],
)
def test_numbers_have_three_digits_that_count(value: float | None, text: str) -> None:
    """Three significant digits, thousands separated, nothing in exponents, a dash for the unknown."""
    assert significant(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (25e-9, "25.0 ns"),
        (0.0000204, "20.4 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.50 s"),
        (600.0, "600 s"),
        (None, UNKNOWN),
    ],
)
def test_durations_choose_their_unit(seconds: float | None, text: str) -> None:
    """From seconds to nanoseconds, whichever leaves at least 1 before the point."""
    assert duration(seconds) == text
