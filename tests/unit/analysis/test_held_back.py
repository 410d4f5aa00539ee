"""Streams whose tokens a proxy or the server holds back."""

import numpy as np
import pytest

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.held_back import find_held_back
from loadgen.analysis.report.findings import held_back_finding
from loadgen.analysis.run.record import Record
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import NetworkPath
from tests.support.runs import run_of

MS = 1_000_000


def response(number: int, chunk_ns: list[int]) -> Record:
    """Return the Record of a complete response with one token per chunk."""
    return Record(
        id=number,
        state="complete",
        sent_ns=0,
        sent_end_ns=1_000,
        first_byte_ns=chunk_ns[0],
        chunk_ns=chunk_ns,
        chunk_tokens=[1] * len(chunk_ns),
        end_ns=chunk_ns[-1] + 1_000,
        http_status=200,
        output_tokens_asked=len(chunk_ns),
        output_tokens=len(chunk_ns),
        counted_by="server",
        chunk_counts="ids",
        stamps="ring",
    )


def grouped(tokens: int, size: int, *, within_ns: int = 0) -> list[int]:
    """Return arrival times of tokens that are generated every 5 ms and arrive in groups of `size`.

    The chunks of a group are `within_ns` apart.
    """
    return [100 * MS + (index // size + 1) * size * 5 * MS + (index % size) * within_ns for index in range(tokens)]


def held(tmp_path, *responses: list[int]):
    """Return the run of these responses, and what `find_held_back` says about it."""
    records = [response(number, chunk_ns) for number, chunk_ns in enumerate(responses)]
    run = run_of(tmp_path / "run", records)
    return run, find_held_back(frame_of_run(run))


def test_tokens_one_after_the_other_are_not_held_back(tmp_path) -> None:
    """Nothing is found in a normal stream, and no finding is shown."""
    run, result = held(tmp_path, grouped(64, 1), grouped(64, 1))
    assert result is None
    assert held_back_finding(summarise(run)) is None


@pytest.mark.parametrize("size", [2, 4])
def test_small_groups_are_those_of_the_engine(tmp_path, size: int) -> None:
    """Several scheduler steps per iteration and speculative decoding send small groups."""
    assert held(tmp_path, grouped(64, size))[1] is None


@pytest.mark.parametrize("within_ns", [0, 20_000])
def test_a_full_buffer_at_a_time_is_found(tmp_path, within_ns: int) -> None:
    """Groups are found whether their chunks share a packet or arrive in packets directly after each other."""
    run, result = held(tmp_path, *[grouped(192, 64, within_ns=within_ns)] * 4)
    assert result is not None
    assert (result.responses, result.examined, result.in_one_piece, result.chunks_per_group) == (4, 4, 0, 64.0)
    assert result.zero_gap_share == pytest.approx(189 / 191, abs=1e-4)
    finding = held_back_finding(summarise(run))
    assert finding is not None
    assert finding.level == "warning"
    assert "The tokens of 4 of 4 responses arrived in groups of about 64" in finding.sentence
    assert "option http-no-delay" in finding.sentence


def test_a_gateway_without_a_known_setting_is_named(tmp_path) -> None:
    """Its user would otherwise try only the settings of other gateways."""
    run, _ = held(tmp_path, *[grouped(192, 64)] * 4)
    summary = summarise(run)
    summary.network = NetworkPath(
        rtt_min_s=None,
        rtt_p50_s=None,
        rtt_p99_s=None,
        ttft_share=None,
        requests=0,
        gateways=["LiteLLM (x-litellm-call-id)"],
    )
    finding = held_back_finding(summary)
    assert finding is not None
    assert finding.sentence.endswith("a --url without the proxy. No such setting is known for LiteLLM.")


def test_a_response_in_one_piece_is_found(tmp_path) -> None:
    """The finding says that TTFT is about the E2E latency."""
    run, result = held(tmp_path, *[grouped(32, 32)] * 3)
    assert result is not None
    assert result.in_one_piece == 3
    finding = held_back_finding(summarise(run))
    assert finding is not None
    assert "3 of 3 responses arrived in one piece, so TTFT is about the E2E latency" in finding.sentence


def test_a_few_such_responses_are_no_finding(tmp_path) -> None:
    """A minority of held-back responses is counted, but does not describe the run."""
    run, result = held(tmp_path, grouped(64, 64), *[grouped(64, 1)] * 3)
    assert result is not None
    assert (result.responses, result.examined, result.common) == (1, 4, False)
    assert held_back_finding(summarise(run)) is None


def test_short_responses_are_not_examined(tmp_path) -> None:
    """Seven tokens at once say little."""
    assert held(tmp_path, grouped(7, 7))[1] is None


def test_a_fast_server_is_not_held_back(tmp_path) -> None:
    """Tokens that are 100 us apart are a normal stream, because their gaps are all alike."""
    chunk_ns = [int(instant) for instant in 10 * MS + 100_000 * np.arange(200)]
    assert held(tmp_path, chunk_ns)[1] is None
