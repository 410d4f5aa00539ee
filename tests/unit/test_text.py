"""The summary in the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import words
from analysis.metrics import summarise
from analysis.text import render
from tests.runs import burst, failed, header, healthy, loop, run_of


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> words.Summary:
    """A run on a simulated server, with failures whose words would upset a terminal."""
    nasty = "\x1b[2Jno [bold]room[/bold]\nleft " + "and so on " * 30
    records = [*burst(100, 8), *(failed(200 + i, "in_band_error", nasty) for i in range(3))]
    telemetry = healthy(stall_ns_max=2_000_000_000)
    return summarise(run_of(tmp_path_factory.mktemp("text") / "run", records, simulated=True, telemetry=telemetry))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_the_terminal(simulated: words.Summary, width: int) -> None:
    """Everything fits, down to 60 columns."""
    assert max(map(len, render(simulated, width=width).splitlines())) <= width


def test_every_title_says_simulated(simulated: words.Summary) -> None:
    """The headline, the latency table and the failures are each marked, with the speed of the clock."""
    titles = [line for line in render(simulated).splitlines() if line.startswith("SIMULATED at 5 times speed")]
    assert len(titles) == 3


def test_a_real_server_is_not_called_simulated(tmp_path: Path) -> None:
    """The word appears only where it is true."""
    assert "SIMULATED" not in render(summarise(run_of(tmp_path / "run", burst(20, 4))))


def test_a_percentile_of_too_few_samples_is_not_printed(simulated: words.Summary) -> None:
    """A hundred requests have a p90 and no p99: its place says how many it would take, and a line says why."""
    text = render(simulated)
    row = next(line for line in text.splitlines() if line.startswith("TTFT"))
    assert "n<662" in row
    assert words.significant(simulated["latency"]["ttft_s"]["p90"] * 1e3, 4) in row
    assert words.significant(simulated["latency"]["ttft_s"]["p99"] * 1e3, 4) not in row
    assert "n too small" in text


def test_a_servers_words_cannot_steer_the_terminal(simulated: words.Summary) -> None:
    """Control characters are gone and markup stands as it is."""
    text = render(simulated)
    assert "\x1b" not in text
    assert "[bold]room[/bold] left" in text


def test_colours_only_on_request(simulated: words.Summary) -> None:
    """A terminal gets colours; a file or a pipe gets the same words without."""
    assert "\x1b[" in render(simulated, colour=True)


def test_what_limits_belief_is_said(simulated: words.Summary) -> None:
    """Incomplete requests, the client's verdict and its reason each have a line."""
    text = " ".join(render(simulated).split())
    assert "100 of 103 requests were complete; 3 failed." in text
    assert "The client, not the server, may have been the limit" in text
    assert "Longest stall 2.00 s, limit 200 ms" in text


def test_an_open_loop_says_what_was_delivered_and_measured(tmp_path: Path) -> None:
    """No burst skew; one line on delivery and one on the window, and the rate in the title."""
    plan = header(400).plan | {"arrivals": "constant:100"}
    text = " ".join(render(summarise(run_of(tmp_path / "run", loop(), plan=plan))).split())
    assert "Burst skew" not in text
    assert "100 per second, evenly" in text
    assert "400 of 400 requests sent, 100.0 per second (100.0 named), 99 % at most 20.0 µs late." in text
    assert "(about 50 in flight)" in text


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
        (None, words.UNKNOWN),
    ],
)
def test_numbers_have_three_digits_that_count(value: float | None, text: str) -> None:
    """Three significant digits, thousands separated, nothing in exponents, a dash for the unknown."""
    assert words.significant(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (25e-9, "25.0 ns"),
        (0.0000204, "20.4 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.50 s"),
        (600.0, "600 s"),
        (None, words.UNKNOWN),
    ],
)
def test_durations_choose_their_unit(seconds: float | None, text: str) -> None:
    """From seconds to nanoseconds, whichever leaves at least 1 before the point."""
    assert words.duration(seconds) == text
