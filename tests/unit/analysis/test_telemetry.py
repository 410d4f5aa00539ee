"""What is made of telemetry: curves with gaps, levels of memory, and counts held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.analysis.report.findings import memory_sentences
from loadgen.analysis.run.errors import RunFileError
from loadgen.analysis.run.record import Record
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import CounterCheck, GpuMemory, HostMemoryLevels, KvCache, Memory
from loadgen.analysis.telemetry import all_series, check_counters, mean_phases, memory_use
from tests.support.runs import complete, failed, loop, rejected, run_of, said, summarise, text_of, typed
from tests.support.telemetry import line, told

MS = 1_000_000
GIB = 1 << 30


def curve(run: Any, name: str, of: str = "server") -> dict[float, float | None]:
    (found,) = [each for each in all_series(run) if (each.name, each.of) == (name, of)]
    return dict(zip(found.x_s, found.y, strict=True))


def test_a_run_without_telemetry_says_nothing(tmp_path: Path) -> None:
    """Runs from before there was any are read as ever: no curve, no memory, no counts, no word of it."""
    run = run_of(tmp_path / "run", [complete(0, [MS])])
    summary = summarise(run)
    assert all_series(run) == []
    assert (summary["memory"], summary["server_counters"]) == ({}, {})
    assert said(summary, "memory") == said(summary, "counters") == ""


def test_gauges_and_rates_share_one_axis_and_keep_their_gaps(tmp_path: Path) -> None:
    """A failed reading is None at its instant; a rate needs the reading before; a reset is no negative rate."""
    run = told(
        tmp_path / "run",
        [
            line("server", -1, "idle", running=0, output_tokens=100),
            line("server", 1, running=8, output_tokens=300),
            line("server", 2, gap="busy"),
            line("server", 3, running=8, output_tokens=900),
            line("server", 4, output_tokens=30),
            line("server", 5, running=1, output_tokens=80),
        ],
    )
    assert curve(run, "running") == {-1: 0, 1: 8, 2: None, 3: 8, 4: None, 5: 1}
    assert curve(run, "output_tokens_per_s") == {-1: None, 1: 100, 2: None, 3: None, 4: None, 5: 50}
    assert {each.name for each in all_series(run)} == {"running", "output_tokens_per_s"}


def test_rare_events_are_counted_from_the_first_reading(tmp_path: Path) -> None:
    """Also across a server that began to count anew, and over gaps."""
    values = [7, 9, None, 10, 2, 3]
    lines = [
        line("server", at, **({"gap": "x"} if value is None else {"preemptions": value}))
        for at, value in enumerate(values)
    ]
    assert list(curve(told(tmp_path / "run", lines), "preemptions").values()) == [0, 2, None, 3, 5, 6]


def test_mean_phases_are_the_growth_of_sums_by_the_growth_of_counts(tmp_path: Path) -> None:
    """The warm-up before the first reading is excluded; phases that the server does not publish are missing."""
    lines = [
        line("server", -2, "idle", queue_s_sum=1, queue_s_count=1, prefill_s_sum=1, prefill_s_count=1),
        line("server", -1, "start", queue_s_sum=5, queue_s_count=2, prefill_s_sum=2, prefill_s_count=2),
        line("server", 9, "end", queue_s_sum=35, queue_s_count=12, prefill_s_sum=4, prefill_s_count=12),
    ]
    run = run_of(tmp_path / "run", loop(10), telemetry=lines)
    assert mean_phases(run) == {"queue": 3.0, "prefill": 0.2, "requests": 10.0}
    reset = [*lines, line("server", 10, "after", queue_s_sum=1, queue_s_count=1)]
    assert mean_phases(run_of(tmp_path / "reset", loop(10), telemetry=reset)).keys() == {"prefill", "requests"}
    assert mean_phases(run_of(tmp_path / "none", loop(10))) == {}


def test_cards_and_processes_have_curves_of_their_own(tmp_path: Path) -> None:
    """A lost card is a gap in its curve alone; a process on two cards is one curve; the host stands beside."""
    held = {"processes": [{"pid": 5, "memory_used_bytes": 10}, {"pid": 6, "memory_used_bytes": None}]}
    both = [{"index": index, "memory_used_bytes": 20, "power_w": 300, **held} for index in (0, 1)]
    run = told(
        tmp_path / "run",
        [
            line("gpu", 1, gpus=both),
            line("gpu", 2, gpus=[both[0], {"index": 1, "gap": "GPU is lost"}]),
            line("host", 1, memory_used_bytes=7, processes=[{"pid": 5, "rss_bytes": 3, "members": 1}]),
            line("host", 2, memory_used_bytes=8, processes=[{"pid": 5, "gap": "gone"}]),
        ],
    )
    assert curve(run, "gpu_memory_used", "GPU 0") == {1: 20, 2: 20}
    assert curve(run, "gpu_memory_used", "GPU 1") == {1: 20, 2: None}
    assert curve(run, "gpu_memory_held", "process 5") == {1: 20, 2: 10}
    assert curve(run, "host_memory_used", "host") == {1: 7, 2: 8}
    assert curve(run, "process_memory", "process 5") == {1: 3, 2: None}
    assert not [each for each in all_series(run) if each.of == "process 6"]


@pytest.mark.parametrize("listed", [None, 7, "no list", [7, None, {"index": 0, "pid": 5}], {"index": 0}])
def test_lists_of_another_type_are_damage(tmp_path: Path, listed: Any) -> None:
    """Their lines are left out and counted, and take no other reading with them; in a header they leave no run."""
    gpu = {"index": 0, "memory_used_bytes": 20}
    lines = [
        line("gpu", 1, gpus=[gpu]),
        line("gpu", 2, gpus=listed),
        line("gpu", 3, gpus=[gpu | {"processes": listed}]),
        line("host", 1, memory_used_bytes=7),
        line("host", 2, memory_used_bytes=7, processes=listed),
    ]
    run = told(tmp_path / "run", lines)
    assert run.damaged_lines == 3
    assert (curve(run, "gpu_memory_used", "GPU 0"), curve(run, "host_memory_used", "host")) == ({1: 20}, {1: 7})
    with pytest.raises(RunFileError, match="telemetry"):
        told(tmp_path / "other", [], facts={"gpu": {"gpus": listed}})


def test_a_line_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    """A killed gathering leaves telemetry in the part and in the run."""
    run = told(tmp_path / "run", [line("server", 1, running=3)])
    again = tmp_path / "run" / "part-telemetry.jsonl"
    again.write_bytes(msgspec.json.encode(line("server", 1, running=3)) + b"\n")
    assert curve(told(tmp_path / "other", [line("server", 1, running=3)] * 2), "running") == {1: 3}
    assert curve(run, "running") == {1: 3}


CARD = {"index": 0, "name": "A800", "memory_total_bytes": 80 * GIB}


def levels(tmp_path: Path, server: str = "vllm", **more: Any) -> Memory:
    moments = [("idle", -1, 70, 0.0), ("start", -0.1, 71, 0.0), ("run", 1, 73, 0.4), ("run", 2, 72, 0.2)]
    readings = [*moments, ("end", 3, 72, 0.1), ("after", 4, 71, 0.0)]
    lines = [
        each
        for moment, at, size, share in readings
        for each in (
            line("gpu", at, moment, gpus=[{"index": 0, "memory_used_bytes": size * GIB}]),
            line("server", at, moment, kv_used=share, **more),
        )
    ]
    found = memory_use(told(tmp_path / server, lines, server=server, facts={"gpu": {"gpus": [CARD]}}))
    assert found is not None
    return found


def test_memory_before_after_and_at_most(tmp_path: Path) -> None:
    """Idle before the first request, loaded after the last, the peak of all readings in between."""
    found = levels(tmp_path, taken_share=0.9, kv_tokens=1000)
    levels_of_it = {"idle_bytes": 70 * GIB, "loaded_bytes": 71 * GIB, "peak_bytes": 73 * GIB, "readings": 6}
    assert found.gpus == [GpuMemory(of="GPU 0", name="A800", total_bytes=80 * GIB, **levels_of_it)]
    assert found.kv_cache == KvCache(idle_share=0.0, mean_share=0.3, peak_share=0.4, readings=2, tokens=1000)


def test_the_fullest_of_several_engines_is_told_too(tmp_path: Path) -> None:
    """Requests of one engine may be preempted while the mean over all engines looks idle."""
    shares = [("run", 1, 0.3, 0.5), ("run", 2, 0.5, 0.9), ("run", 3, 0.4, 0.8), ("after", 4, 0.0, 0.0)]
    lines = [
        line("server", at, moment, kv_used=mean, kv_used_max=fullest, engines=2, kv_tokens=32_000)
        for moment, at, mean, fullest in shares
    ]
    run = told(tmp_path / "run", lines, server="vllm")
    found = memory_use(run)
    assert found is not None
    assert found.kv_cache is not None
    assert (found.kv_cache.peak_share, found.kv_cache.peak_fullest_share, found.kv_cache.engines) == (0.5, 0.9, 2)
    assert curve(run, "kv_used_max") == {1: 0.5, 2: 0.9, 3: 0.8, 4: 0.0}
    assert (
        "KV cache of 32,000 tokens in 2 engines: peak 50% on average and 90% in the fullest"
        in memory_sentences(typed(summarise(run)))[0]
    )


@pytest.mark.parametrize(
    ("server", "more", "share", "note"),
    [
        ("vllm", {"taken_share": 0.92}, 0.92, "vLLM reserves 92% of each GPU's memory when it starts"),
        ("vllm", {}, None, "vLLM reserves 90 to 92% by default of each GPU's memory"),
        ("lightllm", {}, None, "LightLLM reserves 80 to 90% by default of each GPU's memory"),
        ("tgi", {}, None, "TGI reserves all that is left of each GPU's memory"),
    ],
)
def test_what_an_engine_takes_at_its_start_is_named(
    tmp_path: Path, server: str, more: dict[str, float], share: float | None, note: str
) -> None:
    """Memory in use says little about the load: how much each engine takes anyway stands beside it."""
    found = levels(tmp_path, server, **more).taken_at_start
    assert found.share == share
    assert found.note.startswith(note)
    assert levels(tmp_path / "generic", "openai").taken_at_start is None


def test_gaps_and_what_is_not_measured_are_told(tmp_path: Path) -> None:
    """How often and why, so that a missing figure is never taken for a zero."""
    lines = [line("server", 1, gap="busy"), line("server", 2, gap="busy"), line("host", 1, memory_used_bytes=5)]
    found = memory_use(told(tmp_path / "run", lines, facts={"not_measured": {"gpu": "none"}}))
    assert found is not None
    assert found.gaps == {"server": {"busy": 2}}
    assert found.not_measured == {"gpu": "none"}
    assert (found.gpus, found.kv_cache, found.taken_at_start) == ([], None, None)
    assert found.host == HostMemoryLevels(
        of="host", total_bytes=None, idle_bytes=None, loaded_bytes=None, peak_bytes=5, readings=1
    )


def counted(prompt: float, output: float, finished: float, **more: float) -> dict[str, float]:
    return {"prompt_tokens": prompt, "output_tokens": output, "requests_finished": finished, **more}


def compared(folder: Path, lines: list[Any], records: list[Record], **changes: Any) -> dict[str, CounterCheck]:
    run = told(folder, lines, records, **changes)
    return check_counters(run, frame_of_run(run))


RECORDS = loop(10, warmup=2)
"""Ten requests and two of warm-up, 512 tokens in and 10 out each."""
BEFORE = line("server", -9, "idle", **counted(100, 10, 1))
AFTER = line("server", 9, "after", **counted(100 + 12 * 512, 10 + 120, 13))


def test_the_same_counts_agree(tmp_path: Path) -> None:
    """What the server counted before does not matter, and warm-up is part of both sides."""
    found = compared(tmp_path / "run", [BEFORE, AFTER], RECORDS)
    assert {word: (entry.server, entry.client, entry.agree) for word, entry in found.items()} == {
        "prompt_tokens": (6144, 6144, True),
        "output_tokens": (120, 120, True),
        "requests_finished": (12, 12, True),
    }


def test_without_a_reading_before_warm_up_only_the_run_is_compared(tmp_path: Path) -> None:
    """The first good reading was taken after the warm-up: its requests are on neither side."""
    lines = [
        line("server", -9, "idle", gap="busy"),
        line("server", -0.1, "start", **counted(1000, 0, 0)),
        line("server", 9, "after", **counted(1000 + 5120, 100, 10)),
    ]
    assert all(entry.agree for entry in compared(tmp_path / "run", lines, RECORDS).values())


def test_a_counter_that_appears_later_began_at_zero(tmp_path: Path) -> None:
    """TGI publishes a counter with its first count: the first page of a fresh server has none."""
    lines = [line("server", -9, "idle", running=0), line("server", 9, "after", **counted(6144, 120, 12))]
    assert all(entry.agree for entry in compared(tmp_path / "run", lines, RECORDS).values())


@pytest.mark.parametrize(
    ("server", "output", "why"),
    [
        ("vllm", 200, "another client"),
        ("vllm", 100, "not counted everything"),
        ("lightllm", 100, "LightLLM drops counts under load"),
    ],
)
def test_disagreement_is_a_warning(tmp_path: Path, server: str, output: int, why: str) -> None:
    """Both numbers and what it may come from, in the terminal as well."""
    lines = [BEFORE, line("server", 9, "after", **counted(100 + 6144, 10 + output, 13))]
    run = told(tmp_path / "run", lines, RECORDS, server=server)
    summary = summarise(run)
    entry = summary["server_counters"]["output_tokens"]
    assert (entry["agree"], entry["difference"]) == (False, output - 120)
    same, _, warning = said(summary, "counters").partition(". ")
    assert warning.startswith(f"The server counted {output} output tokens, the client 120: ")
    assert why in warning
    assert f"The server counted {output} output tokens" in " ".join(text_of(summary).split())
    assert same == "The server counted the same prompt tokens and finished requests, 2 warm-up requests included"


@pytest.mark.parametrize(("output", "agree"), [(119, False), (120, True), (150, True), (184, True), (185, False)])
def test_of_failed_requests_nobody_knows_what_the_server_counted(tmp_path: Path, output: int, agree: bool) -> None:
    """Anything from nothing to all that was asked is no disagreement."""
    lines = [BEFORE, line("server", 9, "after", **counted(100 + 6144, 10 + output, 13))]
    entry = compared(tmp_path / "run", lines, [*RECORDS, failed(99)])["output_tokens"]
    assert (entry.client, entry.client_most, entry.agree) == (120, 184, agree)


@pytest.mark.parametrize(
    ("server_counted", "agree", "why"),
    [
        (3, True, ""),
        (0, False, "a proxy in front of TGI rejected the other requests"),
        (9, False, "another client was using the server"),
    ],
)
def test_rejections_are_compared_with_the_clients_count(
    tmp_path: Path, server_counted: int, agree: bool, why: str
) -> None:
    """Three requests were rejected. They are in no other count, as the server did no work for them."""
    lines = [
        line("server", -9, "idle", **counted(0, 0, 0, rejections=5)),
        line("server", 9, "after", **counted(6144, 120, 12, rejections=5 + server_counted)),
    ]
    records = [*RECORDS, *(rejected(90 + place) for place in range(3))]
    summary = summarise(told(tmp_path / "run", lines, records))
    entry = summary["server_counters"]["rejections"]
    assert (entry["server"], entry["client"], entry["agree"]) == (server_counted, 3, agree)
    assert entry["why"].startswith(why)
    assert summary["server_counters"]["prompt_tokens"]["client_most"] is None
    sentences = said(summary, "counters")
    if agree:
        assert sentences.startswith(
            "The server counted the same prompt tokens, output tokens, finished requests and rej"
        )
    else:
        assert f"The server counted {server_counted} rejections, the client 3: {why}" in sentences


@pytest.mark.parametrize(("prompt", "agree"), [(6143, False), (6144, True), (9000, None)])
def test_of_turns_that_broke_off_nobody_knows_the_prompt(tmp_path: Path, prompt: int, agree: bool | None) -> None:
    """A later turn's length is the server's to tell: where it did not, more than was counted is no disagreement."""
    lines = [BEFORE, line("server", 9, "after", **counted(100 + prompt, 10 + 120, 13))]
    unknown = failed(99, prompt_tokens_asked=0)
    entry = compared(tmp_path / "run", lines, [*RECORDS, unknown])["prompt_tokens"]
    assert (entry.server, entry.client, entry.agree) == (prompt, 6144, agree)


@pytest.mark.parametrize(
    ("lines", "changes", "why"),
    [
        ([BEFORE, AFTER], {"ended": False}, "interrupted"),
        ([BEFORE, AFTER], {"interrupted": True}, "interrupted"),
        ([BEFORE, line("server", 9, "end", gap="dead")], {}, "after the run (dead)"),
        ([line("server", -9, "idle", gap="late"), AFTER], {}, "before the run (late)"),
        ([BEFORE, line("server", 1, **counted(5, 5, 5)), AFTER], {}, "reset its counters 1 time"),
    ],
)
def test_what_cannot_be_compared_says_why(tmp_path: Path, lines: list[Any], changes: dict[str, Any], why: str) -> None:
    """No reading at one end, a run cut short, a server that began anew: no verdict, no warning, a reason."""
    found = compared(tmp_path / "run", lines, RECORDS, **changes)
    assert [entry.agree for entry in found.values()] == [None] * 3
    assert all(why in entry.why for entry in found.values())


def test_a_reset_does_not_lose_what_was_counted_before(tmp_path: Path) -> None:
    """100 to 400, then from 0 to 50: 350 in all."""
    lines = [line("server", at, "run" if at else "idle", preemptions=value) for at, value in enumerate([100, 400, 50])]
    entry = compared(tmp_path / "run", lines, RECORDS)["preemptions"]
    assert (entry.server, entry.client, entry.resets) == (350, None, 1)


def test_long_answers_of_tgi_are_explained(tmp_path: Path) -> None:
    """It runs them in pieces of 1024 tokens and counts the prompt of each piece."""
    record = complete(0, [MS], tokens=[2000])
    lines = [line("server", -9, "idle", **counted(0, 0, 0)), line("server", 9, "end", **counted(2512, 2000, 1))]
    entry = compared(tmp_path / "run", lines, [record])["prompt_tokens"]
    assert entry.agree is False
    assert "in pieces" in entry.why


@pytest.mark.parametrize(("endpoint", "why"), [("rerank", "each text of a request"), ("completions", "another client")])
def test_texts_that_vllm_ranks_by_embeddings_are_explained(tmp_path: Path, endpoint: str, why: str) -> None:
    """It runs the query and the document of a request by themselves, and has finished two."""
    run = told(tmp_path / "run", [BEFORE, line("server", 9, "after", **counted(6244, 130, 25))], RECORDS, server="vllm")
    run.header.plan["endpoint"] = endpoint
    entry = check_counters(run, frame_of_run(run))["requests_finished"]
    assert (entry.agree, entry.difference) == (False, 12)
    assert why in entry.why


def test_memory_in_words(tmp_path: Path) -> None:
    """One sentence per thing, sizes as the drivers' tools show them; many cards are counted."""
    cards = [{"index": index, "memory_used_bytes": 70 * GIB} for index in range(6)]
    lines = [
        line("gpu", -1, "idle", gpus=cards),
        line("gpu", 1, gpus=cards),
        line("server", 1, kv_used=0.314, kv_tokens=120_000, taken_share=0.92),
        line("host", 1, memory_used_bytes=GIB, processes=[{"pid": 9, "rss_bytes": 100 << 20, "members": 2}]),
    ]
    facts = {"gpu": {"gpus": [CARD]}, "host": {"processes": [{"pid": 9, "name": "vllm"}]}}
    summary = summarise(told(tmp_path / "run", lines, RECORDS, server="vllm", facts=facts))
    assert memory_sentences(typed(summary)) == [
        "KV cache of 120,000 tokens: peak 31%, as reported by the server.",
        "GPU 0 (A800): 70.0 GiB before the first request, peak 70.0 GiB of 80.0 GiB.",
        *(f"GPU {index}: 70.0 GiB before the first request, peak 70.0 GiB." for index in (1, 2, 3)),
        "2 more GPUs in summary.json.",
        "vLLM reserves 92% of each GPU's memory when it starts (--gpu-memory-utilization).",
        "Process 9 (vllm): peak 100 MiB.",
    ]
