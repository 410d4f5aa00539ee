"""`loadgen run`: open loops, closed loops, plan files and the catalog, against simulated servers."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn
from loadgen.workloads import arrivals
from loadgen.workloads.spec_syntax import parse_rate
from tests.support.command import FAST, ROOT, accounted, events_sent, start, summary_of, wait_for
from tests.support.command import burst as command
from tests.support.simulated import running

run = partial(command, command="run")


def test_an_open_loop_sends_what_the_arrivals_say(tmp_path: Path) -> None:
    """Each due instant is in the Run exactly as the seeded arrivals gave it; nothing is dropped or missing."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        asked = [
            "--arrivals",
            "poisson:100",
            "--duration",
            "1s",
            "--seed",
            "5",
            "--output-tokens",
            "4",
            "--workers",
            "2",
        ]
        run(tmp_path, "--server", "vllm", "--url", simulated.url, *asked)
    due_ns = list(arrivals.due_instants(arrivals.Poisson(parse_rate("100")), 5, until_ns=10**9))
    assert accounted(tmp_path, len(due_ns)) == {"complete": len(due_ns)}
    records = sorted(runfile.read(tmp_path / "run").records, key=lambda record: record.id)
    assert [record.due_ns for record in records] == due_ns
    assert all((record.sent_ns or 0) >= record.due_ns for record in records)


def test_connections_are_used_again(tmp_path: Path) -> None:
    """Requests that do not overlap share connections: the server sees the 40 spare ones, and one more for each request
    that was under way, prepared, or not yet read to its end, while another look was taken at them."""
    with running(SimulatedConfig(server="tgi", ttft_s=0.001, itl_s=0.0)) as simulated:
        asked = ["--arrivals", "constant:40", "--n", "60", "--output-tokens", "2"]
        run(tmp_path, "--server", "tgi", "--url", simulated.url, *asked)
    assert accounted(tmp_path, 60) == {"complete": 60}
    records = runfile.read(tmp_path / "run").records
    instants = sorted([(r.sent_ns or 0, 1) for r in records] + [(r.end_ns or 0, -1) for r in records])
    most = max(accumulate(step for _, step in instants))
    apart_s = summary_of(tmp_path)["client"]["sweep_max_s"]
    assert isinstance(apart_s, float)
    assert apart_s <= 0.1
    assert len({record.connected_ns for record in records}) <= 40 + most + 1 + 40 * apart_s


def test_a_closed_loop_keeps_its_clients_busy(tmp_path: Path) -> None:
    """Never more than the clients under way, and each next request is due when an answer has ended."""
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        asked = ["--arrivals", "closed:5", "--n", "40", "--output-tokens", "4"]
        run(tmp_path, "--server", "tgi", "--url", simulated.url, *asked)
    assert accounted(tmp_path, 40) == {"complete": 40}
    records = runfile.read(tmp_path / "run").records
    instants = sorted([(r.sent_ns or 0, 1) for r in records] + [(r.end_ns or 0, -1) for r in records])
    under_way = [sum(step for _, step in instants[: place + 1]) for place in range(len(instants))]
    assert max(under_way) <= 5


@pytest.mark.parametrize(("server", "endpoint"), [("tgi", "generate"), ("lightllm", "generate"), ("vllm", "chat")])
def test_text_prompts_need_no_number_of_requests(server: str, endpoint: str, tmp_path: Path) -> None:
    """Two clients for a second: every prompt has its exact length, two workers send what one would send, and the
    server's vocabulary is stored for the next run."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    options = ["--endpoint", endpoint, "--arrivals", "closed:2", "--duration", "0.5s", "--output-tokens", "2"]
    sent = []
    with running(SimulatedConfig(server=server, **FAST)) as simulated:
        for workers in ("1", "2"):
            folder = tmp_path / workers
            folder.mkdir()
            code, _, err = run(
                folder, "--server", server, "--url", simulated.url, *options, "--workers", workers, **cache
            )
            assert code in (0, 5), err
            records = runfile.read(folder / "run").records
            assert {record.prompt_tokens for record in records} == {512}
            sent.append({record.id for record in records})
        assert len(list((tmp_path / "cache/llm-loadgen/vocabularies").iterdir())) == 1
    assert min(map(len, sent)) >= 2, "each client sends at least one request, on a busy machine too"


def test_warm_up_requests_come_first_and_count_nowhere(tmp_path: Path) -> None:
    """They are in the Run, marked, before instant 0; the summary is of the others."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        asked = ["--arrivals", "burst", "--n", "10", "--warmup", "4", "--output-tokens", "4"]
        run(tmp_path, "--server", "vllm", "--url", simulated.url, *asked)
    records = runfile.read(tmp_path / "run").records
    warm = [record for record in records if record.phase == "warmup"]
    assert [record.state for record in warm] == ["complete"] * 4
    assert all(record.end_ns is not None and record.end_ns < 0 for record in warm)
    assert summary_of(tmp_path)["requests"]["sent"] == 10
    assert summary_of(tmp_path)["latency"]["ttft_s"]["n"] == 10


def test_past_the_limit_requests_are_dropped_and_the_exit_code_says_so(tmp_path: Path) -> None:
    """A slow server and two requests in flight at most: the others are dropped, counted and named."""
    with running(SimulatedConfig(server="tgi", ttft_s=0.5, itl_s=0.01)) as simulated:
        asked = ["--arrivals", "constant:40", "--n", "20", "--max-in-flight", "2", "--output-tokens", "2"]
        code, out, _ = run(tmp_path, "--server", "tgi", "--url", simulated.url, *asked)
    run_read = runfile.read(tmp_path / "run")
    assert run_read.footer is not None
    assert run_read.footer.dropped + run_read.footer.sent == 20 == len(run_read.records)
    assert run_read.footer.dropped >= 10
    assert code == 1
    assert "dropped" in out


def test_a_plan_file_and_the_catalog_are_plans_too(tmp_path: Path) -> None:
    """Options win over the file; the resolved plan is in the Run."""
    plan = tmp_path / "plan.toml"
    plan.write_text('server = "tgi"\narrivals = "burst:5/50ms"\nn = 10\noutput_tokens = 4\nlabel = "from-file"\n')
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        run(tmp_path, str(plan), "--url", simulated.url, "--n", "15")
        stored = runfile.read(tmp_path / "run").header.plan
        assert (stored["n"], stored["arrivals"], stored["label"]) == (15, "burst:5/0.05s", "from-file")
        asked = ["--catalog", "paper-burst", "--n", "4", "--output-tokens", "4"]
        run(tmp_path / "run", "--server", "tgi", "--url", simulated.url, *asked)
    stored = runfile.read(tmp_path / "run" / "run").header.plan
    assert (stored["n"], stored["arrivals"], stored["input_tokens"]) == (4, "burst", 512)


def test_mistakes_are_told_before_anything_is_sent(tmp_path: Path) -> None:
    """Unknown keys, bad arrivals, plans without end: exit 2, all at once, and no folder."""
    plan = tmp_path / "plan.toml"
    plan.write_text('server = "tgi"\narrivals = "poison:5"\ncolour = "red"\n')
    code, _, err = run(tmp_path, str(plan))
    assert code == 2
    assert "poison" in err
    assert "colour" in err
    assert not (tmp_path / "run").exists()
    assert run(tmp_path, "--server", "tgi", "--arrivals", "constant:5")[0] == 2
    assert run(tmp_path, "--server", "tgi", "--catalog", "nothing")[0] == 2


def test_an_interrupted_open_loop_accounts_for_what_was_due(tmp_path: Path) -> None:
    """Ctrl-C in the middle: what was due has a Record, what was not due yet has none."""
    with spawn(SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.01)) as url:
        asked = ["--arrivals", "constant:50", "--duration", "60s", "--output-tokens", "4"]
        process = start(tmp_path, "--server", "vllm", "--url", url, *asked, command="run")
        wait_for(lambda: events_sent(url) >= 40, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    records = runfile.read(tmp_path / "run").records
    assert sorted(record.id for record in records) == list(range(len(records)))
    assert 10 <= len(records) < 3000


def test_a_killed_worker_of_an_open_loop_loses_only_its_own_requests(tmp_path: Path) -> None:
    """What had been due at the killed worker and was not yet written is `worker_lost`; the other's go on."""
    with spawn(SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.01)) as url:
        asked = ["--arrivals", "constant:40", "--duration", "3s", "--workers", "2", "--output-tokens", "4"]
        process = start(tmp_path, "--server", "vllm", "--url", url, *asked, command="run")
        wait_for(lambda: events_sent(url) >= 40, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        process.communicate(timeout=30)
    assert process.returncode == 1
    records = runfile.read(tmp_path / "run").records
    other = [record for record in records if record.worker == 1]
    assert [record.state for record in other] == ["complete"] * 60
    lost = [record for record in records if record.error_kind == "worker_lost"]
    assert lost
    assert {record.worker for record in lost} == {0}


@pytest.mark.parametrize("server", ["vllm", "tgi"])
@pytest.mark.parametrize(
    "asked",
    [
        ["--arrivals", "trace:{data}/traces/azure-2023.csv,speed=100"],
        ["--arrivals", "trace:{data}/traces/mooncake.jsonl,speed=100"],
        ["--arrivals", "burst", "--n", "20", "--input-tokens", "uniform:20..90", "--output-tokens", "uniform:2..9"],
        ["--arrivals", "burst", "--n", "20", "--workload", "shared-prefix:groups=2,tokens=40", "--output-tokens", "4"],
        ["--arrivals", "burst", "--n", "2", "--workload", "jsonl:{prompts}", "--output-tokens", "4"],
    ],
    ids=["azure", "mooncake", "uniform", "shared-prefix", "jsonl"],
)
def test_any_workload_is_exact_as_ids_and_as_text(server: str, asked: list[str], tmp_path: Path) -> None:
    """Traces, drawn lengths, shared prefixes and files: the server counts each prompt as it was asked."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is a token?"}\n{"prompt": "And what is a prompt?"}\n')
    filled = [part.format(data=ROOT / "tests/data", prompts=prompts) for part in asked]
    with running(SimulatedConfig(server=server, **FAST)) as simulated:
        run(tmp_path, "--server", server, "--url", simulated.url, *filled, "--no-report")
    records = runfile.read(tmp_path / "run").records
    assert records
    assert {record.state for record in records} == {"complete"}
    assert [record.prompt_tokens for record in records] == [record.prompt_tokens_asked for record in records]
    assert [record.output_tokens for record in records] == [record.output_tokens_asked for record in records]


def test_a_file_with_too_few_prompts_says_how_many_there_are(tmp_path: Path) -> None:
    """Asked for more than the file holds: exit 2 and the number to ask for."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is a token?"}\n')
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        asked = ["--n", "5", "--workload", f"jsonl:{prompts}"]
        code, _, err = run(tmp_path, "--server", "tgi", "--url", simulated.url, *asked)
    assert code == 2
    assert "--n 1" in err
    assert "--repeat-file" in err


def test_a_closed_loop_ends_with_its_file_or_repeats_it(tmp_path: Path) -> None:
    """Chat messages are sent as they stand, on the chat endpoint without being told, once each. With --repeat-file they
    are sent again, and the output and the run say so. A burst of a file sends every prompt."""
    prompts = tmp_path / "chats.jsonl"
    turns = [[("system", "Be brief."), ("user", f"Name river {number}.")] for number in range(7)]
    lines = ({"messages": [{"role": role, "content": text} for role, text in turn]} for turn in turns)
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        asked = ["--server", "tgi", "--url", simulated.url, "--arrivals", "closed:4", "--workload", str(prompts)]
        code, out, err = run(tmp_path, *asked, "--output-tokens", "3")
        assert code in (0, 5), err
        assert f"prompts from jsonl:{prompts}: OpenAI chat messages" in out
        assert accounted(tmp_path, 7) == {"complete": 7}
        (again := tmp_path / "again").mkdir()
        code, out, err = run(again, *asked, "--output-tokens", "3", "--n", "9", "--repeat-file")
        assert code in (0, 5), err
        assert "the file's 7 prompts are repeated, so a prefix cache may help the server" in out
        (whole := tmp_path / "whole").mkdir()
        burst = ["--server", "tgi", "--url", simulated.url, "--workload", str(prompts), "--output-tokens", "3"]
        code, out, err = command(whole, *burst)
        assert code in (0, 5), err
    assert accounted(again, 9) == {"complete": 9}
    assert accounted(whole, 7) == {"complete": 7}
    stored = runfile.read(again / "run")
    assert stored.header.plan["endpoint"] == "chat"
    assert "7 prompts are repeated" in stored.header.client["prompts"]


@pytest.mark.parametrize("workers", [1, 2])
def test_requests_beyond_the_concurrency_wait(workers: int, tmp_path: Path) -> None:
    """A rate that the server cannot carry with four requests at a time: all are sent, at their turn, and none dropped.
    The report says how many waited, and the client is not blamed for it."""
    with running(SimulatedConfig(server="vllm", ttft_s=0.1, itl_s=0.0)) as simulated:
        asked = ["--rate", "100", "--concurrency", "4", "-n", "40", "--output-tokens", "2"]
        asked += ["--workers", str(workers)]
        code, out, _ = run(tmp_path, "--server", "vllm", "--url", simulated.url, *asked)
    assert code in (0, 5)
    assert accounted(tmp_path, 40) == {"complete": 40}
    stored = runfile.read(tmp_path / "run")
    assert stored.header.plan["concurrency"] == stored.header.load.concurrency == 4
    due_ns = list(arrivals.due_instants(arrivals.Poisson(parse_rate("100")), 0, n=40))
    records = sorted(stored.records, key=lambda record: record.id)
    assert [record.due_ns for record in records] == due_ns
    changes = sorted([(r.sent_ns or 0, 1) for r in records] + [(r.end_ns or 0, -1) for r in records])
    assert max(accumulate(step for _, step in changes)) <= 4
    waited = [record for record in records if record.released_ns is not None]
    assert len(waited) > 20
    for record in waited:
        assert record.due_ns < (record.released_ns or 0) <= (record.sent_ns or 0)
    words = " ".join(out.split())
    assert f"{len(waited)} requests waited because of --concurrency" in words
    assert "at most 4 in flight (others wait)" in words
    assert "TTFT from due" in words
    delivery = summary_of(tmp_path)["delivery"]
    late, wait = delivery["late_s"], delivery["queue_wait"]
    assert isinstance(late, dict)
    assert isinstance(wait, dict)
    assert late["p50"] < wait["p50"] / 4


def test_sessions_wait_for_their_turn(tmp_path: Path) -> None:
    """The turns of sessions count as requests in flight, too."""
    with running(SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.0)) as simulated:
        asked = ["--rate", "100", "--concurrency", "2", "-n", "6", "--workload", "multi-turn:turns=3", "--endpoint"]
        asked += ["chat", "--output-tokens", "2", "--input-tokens", "16"]
        run(tmp_path, "--server", "vllm", "--url", simulated.url, *asked)
    records = runfile.read(tmp_path / "run").records
    assert {record.state for record in records} == {"complete"}
    assert len(records) == 18
    changes = sorted([(r.sent_ns or 0, 1) for r in records] + [(r.end_ns or 0, -1) for r in records])
    assert max(accumulate(step for _, step in changes)) <= 2


def test_an_interrupt_ends_requests_that_wait(tmp_path: Path) -> None:
    """Ctrl-C records them as not sent, and the run ends at once."""
    with running(SimulatedConfig(server="vllm", ttft_s=0.0, itl_s=60.0)) as simulated:
        asked = ["--rate", "1000", "-c", "3", "-n", "30", "--output-tokens", "2"]
        process = start(tmp_path, "--server", "vllm", "--url", simulated.url, *asked, command="run")
        wait_for(lambda: events_sent(simulated.url) >= 3, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    records = runfile.read(tmp_path / "run").records
    assert sum(record.sent_ns is not None for record in records) == 3
    assert {record.error_kind for record in records if record.sent_ns is None} == {"cancelled"}
