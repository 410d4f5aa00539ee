"""Whatever a load looked like, it has a window, and figures inside it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.analysis.frame import build_frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import load_facts
from loadgen.analysis.steady_window import choose_window
from loadgen.workloads.arrival_facts import LoadFacts

INSTANTS = st.integers(0, 10**10)
REQUESTS = st.lists(
    st.tuples(INSTANTS, st.integers(0, 10**9), st.lists(st.integers(0, 10**9), max_size=4)), max_size=40
)


def record(number: int, due_ns: int, late_ns: int, gaps_ns: list[int]) -> Record:
    """Sent late, complete if anything came back, else dropped."""
    sent_ns = due_ns + late_ns
    chunk_ns = [sent_ns + sum(gaps_ns[: place + 1]) for place in range(len(gaps_ns))]
    if not chunk_ns:
        return Record(id=number, state="dropped", due_ns=due_ns)
    return Record(
        id=number,
        state="complete",
        due_ns=due_ns,
        sent_ns=sent_ns,
        sent_end_ns=sent_ns,
        chunk_ns=chunk_ns,
        chunk_tokens=[1] * len(chunk_ns),
        end_ns=chunk_ns[-1],
    )


@given(REQUESTS, st.sampled_from(["poisson:3", "closed:4", "ramp:1..2/3s", "burst:2/1s"]))
def test_a_window_that_was_not_set_leaves_out_little(requests: list[tuple[int, int, list[int]]], arrivals: str) -> None:
    """The whole run counts, or all that was due but a tenth at most, none of which failed; it goes forward and ends
    with the last request that was due."""
    records = [record(number, *request) for number, request in enumerate(requests)]
    frame = build_frame(records)
    window = choose_window(frame, load_facts(arrivals, ""))
    inside = replace(frame, window=window).inside
    if window is None or window.chosen == "whole":
        assert inside.all()
        return
    assert arrivals == "poisson:3"
    assert window.from_ns < window.to_ns == max(each.due_ns for each in records if each.sent_ns is not None)
    assert (~inside).sum() <= 0.1 * len(records)
    assert frame.complete[~inside].all()


@given(REQUESTS, st.integers(0, 10**10), st.integers(1, 10**10))
def test_no_figure_is_more_than_that_of_the_whole_run(
    requests: list[tuple[int, int, list[int]]], from_ns: int, length_ns: int
) -> None:
    """A window holds at most as many samples, answers and tokens as there are, and every figure is a number."""
    frame = build_frame([record(number, *request) for number, request in enumerate(requests)])
    window = choose_window(frame, LoadFacts(), (from_ns / 1e9, (from_ns + length_ns) / 1e9))
    inside = replace(frame, window=window)
    for metric in METRICS.values():
        if metric.per == "run":
            figure = metric.formula(inside)
            assert figure is None or math.isfinite(figure)
        else:
            values = metric.values(inside)
            assert all(map(math.isfinite, values.tolist()))
            assert len(values) <= len(metric.values(frame))
    tokens = METRICS["output_tokens_per_s"].formula(inside) or 0.0
    assert tokens * length_ns / 1e9 <= frame.arrived_tokens.sum() * (1 + 1e-6)
