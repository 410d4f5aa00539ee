"""Session files in virtual time: due times follow the file, and nothing is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.engine import prepare
from loadgen.plan import Plan
from loadgen.studies import simulate
from loadgen.studies.simulate import ServerModel

MS = 1_000_000
NODES = [
    {"id": "plan", "input_tokens": 90, "output_tokens": 8},
    {"id": "search", "after": ["plan"], "history": "fresh", "input_tokens": 30, "output_tokens": 4},
    {"id": "watch", "after": [{"node": "plan", "on": "start", "delay_s": 0.01}], "history": "fresh"}
    | {"input_tokens": 20, "output_tokens": 4},
    {"id": "answer", "after": ["plan", "search", "watch"], "input_tokens": 12, "output_tokens": 20, "tool_s": 0.04},
]


@pytest.mark.parametrize("arrivals", ["starts:{trace}", "closed:2"])
def test_graphs_run_in_virtual_time(arrivals: str, tmp_path: Path) -> None:
    """Each request is due when the last of its conditions is met, also in a closed loop with a fan-out."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"session": f"{number}", "at_s": 0.1 * number, "nodes": NODES} for number in range(6)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = Plan(server="vllm", workload=f"sessions:{trace}", arrivals=arrivals.format(trace=trace))
    records = {record.id: record for record in simulate.run_in_memory(plan, ServerModel()).records}
    assert {record.state for record in records.values()} == {"complete"}
    assert len(records) == 24
    for record in records.values():
        due = [
            (records[edge.id].end_ns if edge.after == "end" else records[edge.id].sent_ns or 0) + edge.delay_ns  # type: ignore[operator]
            for edge in record.parents
        ]
        assert not due or record.due_ns == max(due)
    assert records[3].prompt_tokens == 90 + 8 + 12


@pytest.mark.parametrize(("sessions", "options"), [(1, {}), (2, {"workers": 2}), (2, {"max_in_flight": 4})])
def test_sub_agents_at_once_are_not_dropped(sessions: int, options: dict[str, int], tmp_path: Path) -> None:
    """The default maximum of requests in flight counts requests, and not sessions. A stated maximum holds."""
    trace = tmp_path / "trace.jsonl"
    children = [NODES[1] | {"id": f"{number}", "output_tokens": 40} for number in range(6)]
    lines = [{"session": f"{number}", "nodes": [NODES[0], *children]} for number in range(sessions)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = Plan(server="vllm", workload=f"sessions:{trace}", arrivals=f"starts:{trace}", **options)
    records = simulate.run_in_memory(plan, ServerModel()).records
    dropped = sum(record.state == "dropped" for record in records)
    assert (dropped > 0) == ("max_in_flight" in options)
    assert prepare.build_schedule(plan).in_flight == options.get("max_in_flight", sessions * 7 * plan.workers)
