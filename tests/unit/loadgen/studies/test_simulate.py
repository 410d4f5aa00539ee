"""A Plan in virtual time: each kind of load to its end, in a run file like any other."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.analysis.run.record import Record
from loadgen.engine.prepare import build_schedule
from loadgen.errors import OutputError, PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware.inference import ServingOptions
from loadgen.studies import simulate
from loadgen.traffic import FIRST_IDS_APART, class_seed, traffic_classes
from loadgen.workloads.spec_syntax import WorkloadError


def simulated(folder: Path, engine: dict[str, Any] | None = None, **settings: Any) -> runfile.Run:
    values = {"server": "vllm", "n": 20, "input_tokens": 100, "output_tokens": 16} | settings
    plan = Plan(**{name: value for name, value in values.items() if value is not None})
    modelled = simulate.ServerModel(**{"gpu": "A100", "model": "llama-2-7b"} | (engine or {}))
    simulate.run(plan, modelled, folder / "run", ["loadgen", "simulate"])
    return runfile.read(folder / "run")


def in_flight(records: list[Record], at_ns: int) -> int:
    return sum(record.due_ns <= at_ns < (record.end_ns or 0) for record in records)


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": "shared-prefix:groups=2,tokens=128"},
        {"workload": "multi-turn:turns=2"},
        {"kv_tokens": 100_000},
        {"running_limit": 8},
        {"step_tokens": 512},
    ],
)
def test_other_settings_than_the_measured_ones_are_not_validated(changes: dict[str, Any]) -> None:
    """vLLM was measured with its defaults and without shared prefixes. Its prefix cache was not compared."""
    h100 = {"gpu": "H100", "model": "llama-3.1-70b", "format": "fp8", "tensor": 2}
    plan, engine = (changes, {}) if "workload" in changes else ({}, changes)
    cases: list[tuple[dict[str, Any], dict[str, Any], bool]] = [({}, {}, True), (plan, engine, False)]
    for settings, model, validated in cases:
        resolved = simulate.resolve_model(Plan(server="vllm", n=1, **settings), simulate.ServerModel(**(h100 | model)))
        assert ("TTFT, TPOT not validated" not in resolved.hardware["accuracy"]) == validated


def test_facts_that_change_the_hardware_limit_are_in_the_header(tmp_path: Path) -> None:
    """The summary computes the limit of the simulated GPU, not that of the data sheet."""
    names = ("changes", "saves_work", "own_gpu")
    file = tmp_path / "own.toml"
    figures = {"memory_GB": 80, "memory_GBps": 4000, "bf16_TFLOPs": 900, "link_GBps": 900, "pcie_GBps": 64}
    file.write_text("\n".join(["[gpus.H100]", *(f"{name} = {value}" for name, value in figures.items())]), "utf-8")
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"changes": ("technology=3nm", "memory=96GB")}, {"changes": ["memory=96GB"]}),
        ({"serving": ServingOptions(draft_tokens=3)}, {"saves_work": True}),
        ({"serving": ServingOptions(cache_hit_rate=0.5)}, {"saves_work": True}),
        ({"hardware": file}, {"own_gpu": True}),
    ]
    for fields, expected in cases:
        server_model = simulate.ServerModel(**({"gpu": "H100", "model": "llama-3.1-8b"} | fields))
        facts = simulate.resolve_model(Plan(server="vllm", n=1), server_model).hardware
        assert {name: facts[name] for name in names if name in facts} == expected


def test_a_burst_ends_with_every_token(tmp_path: Path) -> None:
    """Each request has a stamp per token, from instant 0 on; the run says that it is simulated, and by what."""
    run = simulated(tmp_path)
    assert sorted(record.id for record in run.records) == list(range(20))
    for record in run.records:
        assert (record.state, record.due_ns, len(record.chunk_ns), record.prompt_tokens) == ("complete", 0, 16, 100)
        assert record.chunk_ns == sorted(record.chunk_ns)
        assert record.end_ns == record.chunk_ns[-1]
    header, footer = run.header, run.footer
    assert (header.server["simulated"], header.server["virtual"], header.stamps.name) == (True, True, "virtual")
    hardware = {"gpu": "A100-80GB SXM", "model": "Llama-2-7B", "tensor_parallel": 1, "gpus": 1, "format": "bf16"}
    accuracy = {"accuracy": "TTFT, TPOT not validated"}  # vLLM was measured on H100 and B200
    assert header.server["hardware"] == hardware | {"vintage": "current"} | accuracy
    assert footer is not None
    assert (footer.sent, footer.complete, footer.ended_ns) == (20, 20, max(each.end_ns or 0 for each in run.records))


TWO_TIMEOUTS = [{"name": "chat", "rate": 50, "timeout_s": 5}, {"name": "batch", "rate": 50, "timeout_s": 600}]


@pytest.mark.parametrize(
    "load",
    [{"arrivals": "poisson:100", "cancel": "50% after 1s"}, {"traffic": TWO_TIMEOUTS}],
    ids=["cancel", "classes"],
)
def test_ended_requests_leave_no_times_behind(monkeypatch: pytest.MonkeyPatch, load: dict[str, Any]) -> None:
    """Times at which requests would have timed out do not pile up behind earlier times of requests in flight."""
    monkeypatch.setattr(simulate, "MIN_ENDS", 20)
    plan = Plan(server="vllm", duration_s=30.0, input_tokens=100, output_tokens="uniform:8..64", **load)
    resolved = simulate.resolve_model(plan, simulate.ServerModel(gpu="H100", model="llama-3.1-8b"))
    live = longest = 0

    def look(_item: Record | runfile.Telemetry) -> None:
        nonlocal live, longest
        live = max(live, len(run._live))
        longest = max(longest, len(run._ends))

    run = simulate.VirtualRun(simulate._virtual_load(plan), resolved, look)
    footer = run.run()
    assert footer.complete > 1_000
    assert longest <= 20 + simulate.MAX_ENDS_PER_JOB * (live + 1)


def test_what_is_told_is_what_is_in_the_file(tmp_path: Path) -> None:
    """Records as they come, and all else: complete, given up, dropped and refused."""
    records: list[Record] = []
    load: dict[str, Any] = {"arrivals": "poisson:80", "input_tokens": "uniform:50..700", "n": 90}
    plan = Plan(server="vllm", timeout_s=0.5, max_in_flight=30, output_tokens=16, **load)
    modelled = simulate.ServerModel(kv_tokens=512)
    told = simulate.run(plan, modelled, tmp_path / "run", [], (), records.append)
    written = runfile.read(tmp_path / "run")
    assert {(record.state, record.http_status) for record in written.records} >= {
        ("complete", 200),
        ("failed", 200),
        ("failed", 400),
        ("dropped", None),
    }
    assert records == written.records
    written.records = []
    assert told == written


def test_the_same_plan_gives_the_same_run(tmp_path: Path) -> None:
    """To the nanosecond; another seed gives another one."""
    arrivals = {"arrivals": "poisson:20", "output_tokens": "exponential:mean=30,min=4,max=100"}
    one, two, other = (simulated(tmp_path / str(at), **arrivals, seed=at // 2).records for at in range(3))
    assert one == two != other


def test_a_closed_loop_keeps_its_clients_busy(tmp_path: Path) -> None:
    """Each end makes the next request due, after the think time; never more than the clients are under way."""
    records = simulated(tmp_path, arrivals="closed:3,think=100ms", n=12).records
    ends = sorted(record.end_ns or 0 for record in records)
    assert sorted(record.due_ns for record in records) == [0, 0, 0, *(end + 100_000_000 for end in ends[:9])]
    assert max(in_flight(records, record.due_ns) for record in records) == 3


def test_a_closed_loop_may_end_by_its_duration(tmp_path: Path) -> None:
    """Nothing is due later."""
    records = simulated(tmp_path, arrivals="closed:2", n=None, duration_s=5).records
    assert len(records) > 4
    assert max(record.due_ns for record in records) < 5_000_000_000 < max(record.end_ns or 0 for record in records)


def test_past_the_limit_in_flight_a_request_is_dropped(tmp_path: Path) -> None:
    """As the driver does, and it is counted."""
    run = simulated(tmp_path, arrivals="constant:1000", n=30, max_in_flight=10)
    assert run.footer is not None
    assert (run.footer.dropped, run.footer.complete) == (20, 10)


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_requests_beyond_the_concurrency_wait(limit: int, tmp_path: Path) -> None:
    """In order, until another request ends. Their due times are those of the arrivals."""
    records = simulated(tmp_path, arrivals="constant:50", n=30, concurrency=limit).records
    records.sort(key=lambda record: record.id)
    assert [record.due_ns for record in records] == [number * 20_000_000 for number in range(30)]
    ends = {record.end_ns for record in records}
    waited = [record for record in records if record.released_ns is not None]
    assert waited
    for record in waited:
        assert record.due_ns < (record.released_ns or 0) == record.sent_ns
        assert record.sent_ns in ends
    sent = [record.sent_ns or 0 for record in records]
    assert sent == sorted(sent)
    busiest = max(sum((r.sent_ns or 0) <= at < (r.end_ns or 0) for r in records) for at in sent)
    assert busiest == limit
    assert {record.state for record in records} == {"complete"}


def test_a_request_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    """At its deadline, with the tokens that it has by then; the others take less and complete."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("16\n2000\n")
    records = simulated(tmp_path, output_tokens=f"empirical:{lengths}", timeout_s=5.0).records
    states = Counter(record.state for record in records)
    assert states["complete"] > 0
    assert states["failed"] > 0
    for record in records:
        if record.state == "failed":
            assert (record.error_kind, record.end_ns) == ("timeout", 5_000_000_000)
            assert 0 < len(record.chunk_ns) < 2000
            assert record.chunk_ns[-1] <= 5_100_000_000


def test_a_request_that_never_fits_is_refused(tmp_path: Path) -> None:
    """As a server refuses it; a closed loop goes on."""
    records = simulated(tmp_path, {"kv_tokens": 128}, input_tokens="uniform:90..150", arrivals="closed:2").records
    states = Counter((record.state, record.http_status) for record in records)
    assert states["complete", 200] + states["failed", 400] == 20
    assert states["failed", 400] > 0
    assert all("never fit a KV cache of 128 tokens" in each.error_detail for each in records if each.state == "failed")


def test_a_shared_prefix_is_computed_once(tmp_path: Path) -> None:
    """By vLLM, whose cache knows blocks: first tokens come sooner, and the server's figures say so."""
    plain = simulated(tmp_path / "plain", input_tokens=2000)
    shared = simulated(tmp_path / "shared", input_tokens=2000, workload="shared-prefix:groups=1,tokens=1600")
    assert max(each.chunk_ns[0] for each in shared.records) < max(each.chunk_ns[0] for each in plain.records) / 2
    hits = [line.values["cached_prompt_tokens"] for line in shared.telemetry if line.source == "server"]
    assert hits[-1] == 19 * 1600


def test_blocks_of_a_trace_are_computed_once(tmp_path: Path) -> None:
    """Leading ids that were there before are 512 tokens each that vLLM's cache has; an id behind another one is not."""
    rows = [(0, 1300, [1, 2, 3]), (2_000, 1500, [1, 2, 9]), (4_000, 1024, [7, 2]), (6_000, 1300, [1, 2, 3])]
    named, plain = tmp_path / "named.jsonl", tmp_path / "plain.jsonl"
    lines = [{"timestamp": at, "input_length": asked, "output_length": 4} for at, asked, _ in rows]
    plain.write_text("".join(json.dumps(line) + "\n" for line in lines))
    blocks = [line | {"hash_ids": ids} for line, (*_, ids) in zip(lines, rows, strict=True)]
    named.write_text("".join(json.dumps(line) + "\n" for line in blocks))
    cached, alone = (simulated(tmp_path / file.stem, arrivals=f"trace:{file}", n=None) for file in (named, plain))
    hits = [run.telemetry[-2].values["cached_prompt_tokens"] for run in (cached, alone)]
    assert hits == [2 * 512 + 1300 // 16 * 16, 0]
    sooner = [slow.chunk_ns[0] - fast.chunk_ns[0] for fast, slow in zip(cached.records, alone.records, strict=True)]
    assert [saved > 0 for saved in sooner] == [False, True, False, True]
    older = simulated(tmp_path / "tgi", server="tgi", arrivals=f"trace:{named}", n=None)
    assert older.telemetry[-2].values["cached_prompt_tokens"] == 0


def test_sessions_grow_by_what_was_said(tmp_path: Path) -> None:
    """Each turn's prompt holds the questions and answers before; it is due when the last answer has ended."""
    records = simulated(tmp_path, workload="multi-turn:turns=3,think=1s", arrivals="closed:2", n=4).records
    assert len(records) == 12
    for session in {record.session for record in records}:
        turns = sorted((record for record in records if record.session == session), key=lambda record: record.turn)
        assert [record.prompt_tokens for record in turns] == [100, 216, 332]
        assert all(after.due_ns == (before.end_ns or 0) + 1_000_000_000 for before, after in pairwise(turns))


def test_a_trace_brings_its_own_lengths_and_instants(tmp_path: Path) -> None:
    """As recorded."""
    trace = tmp_path / "trace.csv"
    rows = ["2024-01-01 00:00:00.0,50,5", "2024-01-01 00:00:01.5,70,7"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    records = simulated(tmp_path, arrivals=f"trace:{trace}", n=None).records
    seen = [(record.due_ns, record.prompt_tokens, record.output_tokens) for record in records]
    assert seen == [(0, 50, 5), (1_500_000_000, 70, 7)]


def test_a_file_of_prompts_is_counted_about(tmp_path: Path) -> None:
    """Without a tokenizer by the word."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two three", "output_tokens": 9}\n')
    (record,) = simulated(tmp_path, workload=f"jsonl:{file}", n=1, output_tokens="answers").records
    assert (record.prompt_tokens, record.output_tokens) == (3, 9)


def test_the_server_is_looked_at_once_a_second(tmp_path: Path) -> None:
    """How many run and wait, and how full the cache is: the curves of the report. 0 is never, but at the end."""
    run = simulated(tmp_path / "a", {"kv_tokens": 1000}, n=200)
    lines = [line for line in run.telemetry if line.source == "server"]
    assert len(lines) > 3
    assert lines[0].values["waiting"] == 199 or lines[1].values["waiting"] > 0
    assert all(0 <= line.values["kv_used"] <= 1 and line.values["kv_tokens"] == 1000 for line in lines)
    assert lines[-1].values["requests_finished"] == 200
    quiet = simulated(tmp_path / "b", {"kv_tokens": 1000}, n=200, metrics_every_s=0)
    assert sum(line.source == "server" for line in quiet.telemetry) == 1


def test_half_a_cache_and_an_old_engine_are_slower(tmp_path: Path) -> None:
    """What-ifs go the right way, two GPUs too."""

    def took(name: str, **engine: Any) -> int:
        footer = simulated(tmp_path / name, {"kv_tokens": 4000} | engine, n=100, output_tokens=100).footer
        assert footer is not None
        return footer.ended_ns

    base = took("base")
    assert took("half", kv_tokens=2000) > base
    assert took("old", vintage="2023") > base
    assert took("two", tensor=2) < base
    assert took("faster", changes=("memory_bandwidth=8TB/s",)) < base
    assert took("narrow", running_limit=4) > base


@pytest.mark.parametrize(
    ("engine", "settings", "why"),
    [
        ({"gpu": "A8000"}, {}, "unknown GPU 'A8000'"),
        ({"vintage": "2019"}, {}, "unknown vintage '2019': choose current or 2023"),
        ({"model": "llama-2-70b"}, {}, "does not fit"),
        ({}, {"server": "openai"}, "the scheduler of openai is not modelled: choose vllm, tgi, lightllm, sglang, tei"),
        ({}, {"endpoint": "embeddings"}, "--endpoint embeddings of vllm generates no tokens"),
        ({}, {"server": "tei"}, "--endpoint embed of tei generates no tokens"),
    ],
)
def test_what_cannot_be_simulated_says_why(
    tmp_path: Path, engine: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    """Before anything is written."""
    with pytest.raises(PlanError, match=why):
        simulated(tmp_path, engine, **settings)
    assert not (tmp_path / "run").exists()


def test_a_disk_that_takes_no_more_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to do is said; the header alone is in the run file."""

    def full(number: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("loadgen.analysis.run.runfile.os.write", full)
    monkeypatch.setattr("loadgen.analysis.run.runfile.tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(OutputError, match="No space left"):
        simulated(tmp_path)


@pytest.mark.parametrize("server", ["vllm", "lightllm", "tgi"])
@pytest.mark.parametrize("cancel", ["40% after 500ms", "40% after 5 tokens"])
def test_clients_give_up(server: str, cancel: str, tmp_path: Path) -> None:
    """The chosen requests end at their moment, with the tokens up to it. The run then ends earlier."""
    settings: dict[str, Any] = {"server": server, "n": 100, "output_tokens": 200}
    run = simulated(tmp_path / "some", cancel=cancel, **settings)
    plan = Plan(cancel=cancel, **settings)
    assert plan.cancellation is not None
    chosen = {number for number in range(100) if plan.cancellation.chooses(plan.seed, number)}
    states = {record.id: record.state for record in run.records}
    assert states == {number: "abandoned" if number in chosen else "complete" for number in range(100)}
    for record in run.records:
        if record.state != "abandoned":
            continue
        assert (record.error_kind, record.error_detail) == ("abandoned", plan.cancellation.detail)
        if plan.cancellation.after_tokens:
            assert len(record.chunk_ns) == 5
        else:
            assert record.end_ns == (record.sent_ns or 0) + 500_000_000
            assert all(instant <= record.end_ns for instant in record.chunk_ns)
    assert run.footer is not None
    assert (run.footer.abandoned, run.footer.complete, run.footer.sent) == (len(chosen), 100 - len(chosen), 100)
    everything = simulated(tmp_path / "all", **settings)
    assert max(each.end_ns or 0 for each in run.records) < max(each.end_ns or 0 for each in everything.records)


def test_a_session_ends_with_the_request_that_is_given_up(tmp_path: Path) -> None:
    """Its later turns are abandoned too, and were never sent."""
    run = simulated(tmp_path, workload="multi-turn:turns=4", cancel="30% after 3 tokens", arrivals="poisson:5")
    by_session: dict[int, list[Record]] = {}
    for record in run.records:
        by_session.setdefault(record.session or 0, []).append(record)
    given_up = 0
    for records in by_session.values():
        states = [record.state for record in sorted(records, key=lambda record: record.turn)]
        first = states.index("abandoned") if "abandoned" in states else len(states)
        assert states == ["complete"] * first + ["abandoned"] * (4 - first)
        given_up += 4 - first
    unsent = sum(record.sent_ns is None for record in run.records)
    assert run.footer is not None
    assert (run.footer.abandoned, run.footer.sent) == (given_up, 80 - unsent)


AS_THEY_ARE: dict[str, Any] = {"n": None, "input_tokens": None, "output_tokens": None}
"""Settings that a file of bodies decides."""


def bodies(folder: Path) -> Path:
    """Two turns of a session with a long common beginning, and a completion between them."""
    system = {"role": "system", "content": "Answer each question about the railways of Portugal briefly. " * 20}
    first = [system, {"role": "user", "content": "Which is the longest line?"}]
    rows = [
        {"at": 10.0, "session": "a", "body": {"messages": first, "max_tokens": 40}},
        {"at": 10.5, "session": "b", "body": {"prompt": list(range(77)), "max_tokens": 9, "stream": False}},
        {"at": 13.0, "session": "a", "body": {"messages": [*first, {"role": "user", "content": "And the oldest?"}]}},
    ]
    path = folder / "bodies.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_bodies_of_a_file_are_counted(tmp_path: Path) -> None:
    """Times are the file's, lengths those of the bodies, and a common beginning is computed once."""
    path = bodies(tmp_path)
    run = simulated(
        tmp_path, **AS_THEY_ARE, workload=f"requests:{path},sessions=yes", arrivals=f"at:{path},sessions=yes"
    )
    first, second, completion = sorted(run.records, key=lambda record: record.id)
    assert {record.state for record in run.records} == {"complete"}
    assert [first.due_ns, second.due_ns, completion.due_ns] == [0, 3_000_000_000, 500_000_000]
    assert [record.output_tokens for record in (first, second, completion)] == [40, 128, 9]
    assert completion.prompt_tokens == 77
    assert 0 < (second.prompt_tokens or 0) - (first.prompt_tokens or 0) < 10
    hits = [line.values["cached_prompt_tokens"] for line in run.telemetry if line.source == "server"]
    assert hits[-1] == (first.prompt_tokens or 0) // 16 * 16


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"url": "/v1/embeddings", "body": {"input": "x"}}, "request 1: /v1/embeddings generates no text"),
        ({"body": {"model": "m"}}, "request 1: its body has no prompt whose tokens could be counted"),
        ({"body": {"prompt": ["a", "b"]}}, "request 1: has 2 prompts in one body"),
    ],
)
def test_bodies_that_cannot_be_counted(tmp_path: Path, line: dict[str, Any], why: str) -> None:
    """The message names the request."""
    path = tmp_path / "bodies.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(WorkloadError, match=why):
        simulated(tmp_path, **AS_THEY_ARE, workload=f"requests:{path}")


def test_a_request_that_times_out_before_its_token_is_not_abandoned(tmp_path: Path) -> None:
    """Clients that would give up after 100 tokens have fewer when the timeout expires, so their requests time out."""
    run = simulated(tmp_path, n=20, output_tokens=200, cancel="100% after 100 tokens", timeout_s=0.5)
    assert {(record.state, record.error_kind) for record in run.records} == {("failed", "timeout")}
    assert all(len(record.chunk_ns) < 100 for record in run.records)


def records_by_class(run: runfile.Run) -> dict[str, list[Record]]:
    """Return the Records of each class of traffic, in the order of their ids."""
    records = sorted(run.records, key=lambda record: record.id)
    return {
        facts.name: [record for record in records if record.id // FIRST_IDS_APART == number]
        for number, facts in enumerate(run.header.traffic)
    }


def test_closed_loops_and_sessions_run_beside_open_classes(tmp_path: Path) -> None:
    """Each class keeps its own rule on one clock: an open class its due times, a closed loop its number of clients, and
    sessions their think times. The classes slow each other down."""
    tables: list[dict[str, Any]] = [
        {"name": "chat", "rate": 20},
        {"name": "batch", "arrivals": "closed:3,think=50ms", "input_tokens": 2000, "output_tokens": 100},
        {"name": "dialogs", "workload": "multi-turn:turns=3,think=0.2", "concurrency": 2},
        {"name": "waits", "rate": 30, "concurrency": 2, "input_tokens": 1000},
    ]
    run = simulated(tmp_path, n=None, duration_s=10.0, traffic=tables)
    classes = records_by_class(run)
    assert {record.state for record in run.records} == {"complete"}
    open_plan = traffic_classes(Plan(server="vllm", duration_s=10.0, traffic=tables))[0].plan
    assert [record.due_ns for record in classes["chat"]] == list(build_schedule(open_plan).due_ns or ())
    ends = {record.end_ns or 0 for record in classes["batch"]}
    later = [record.due_ns for record in classes["batch"] if record.due_ns]
    assert len(classes["batch"]) - len(later) == 3, "three clients begin at once"
    assert all(due_ns - 50_000_000 in ends for due_ns in later)
    turns = [record for record in classes["dialogs"] if record.turn]
    ends = {record.end_ns or 0 for record in classes["dialogs"]}
    assert Counter(record.turn for record in turns).keys() == {1, 2}
    assert all(record.due_ns - 200_000_000 in ends for record in turns)
    for record in classes["waits"]:
        sent = [each for each in classes["waits"] if (each.sent_ns or 0) <= (record.sent_ns or 0) < (each.end_ns or 0)]
        assert len(sent) <= 2, "never more than two in flight"
    assert any(record.released_ns for record in classes["waits"])
    alone = simulated(tmp_path / "alone", n=None, duration_s=10.0, traffic=tables[:1])
    assert [record.due_ns for record in alone.records] != []
    together = median((record.end_ns or 0) - record.due_ns for record in classes["chat"])
    assert together > 1.1 * median((record.end_ns or 0) - record.due_ns for record in alone.records)


@pytest.mark.parametrize(
    "load",
    [
        {"arrivals": "closed:4,think=30ms", "n": 40},
        {"arrivals": "poisson:20", "concurrency": 2, "n": 40},
        {"arrivals": "closed:2", "workload": "multi-turn:turns=3", "n": 6, "cancel": "20% after 20ms"},
        {"arrivals": "poisson:20", "n": 40, "cancel": "30% after 3 tokens", "timeout_s": 0.3},
    ],
)
def test_the_only_class_runs_like_a_plan_without_classes(tmp_path: Path, load: dict[str, Any]) -> None:
    """The Records of a plan with one class are those of a plan with the settings and the seed of the class."""
    one = simulated(tmp_path / "one", n=None, traffic=[{"name": "a", **load}])
    plain = simulated(tmp_path / "plain", **load, seed=class_seed(0, "a"))
    assert one.records == plain.records


def test_classes_have_their_own_cancel_and_timeout(tmp_path: Path) -> None:
    """Only the requests of one class are abandoned: those that the seed of the class chooses. Only the requests of
    another class time out."""
    tables = [
        {"name": "patient", "rate": 10, "cancel": ""},
        {"name": "hasty", "rate": 20, "cancel": "30% after 50ms", "output_tokens": 200},
        {"name": "late", "concurrency": 2, "timeout_s": 0.4, "output_tokens": 400},
    ]
    run = simulated(tmp_path, n=None, duration_s=5.0, traffic=tables, cancel="50% after 4 tokens")
    classes = records_by_class(run)
    assert {record.state for record in classes["patient"]} == {"complete"}
    assert {record.error_kind for record in classes["late"]} == {"timeout", "abandoned"}
    for record in classes["late"]:
        if record.error_kind == "timeout":
            assert (record.end_ns or 0) - (record.sent_ns or 0) == 400_000_000
    hasty = traffic_classes(Plan(server="vllm", duration_s=5.0, traffic=tables))[1].plan
    assert hasty.cancellation is not None
    chosen = [record.id for record in classes["hasty"] if hasty.cancellation.chooses(hasty.seed, record.id)]
    abandoned = [record for record in classes["hasty"] if record.state == "abandoned"]
    assert [record.id for record in abandoned] == chosen
    assert {(record.end_ns or 0) - (record.sent_ns or 0) for record in abandoned} == {50_000_000}
