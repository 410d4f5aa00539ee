"""Lengths of a file's own, lengths that answers may stay below, and servers that count nothing: from the command line
to the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.analysis.run.record import Record
from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from tests.support.command import FAST, in_process, summary_of
from tests.support.command import burst as command
from tests.support.simulated import running
from tests.support.small_servers import SGLANG, small_server
from tests.support.stub_server import OPENAI, answering

run = partial(command, command="run")
DATA = Path(__file__).parent.parent / "data/datasets"


@pytest.fixture(scope="module")
def vllm() -> Iterator[str]:
    """The URL of a simulated vLLM for the whole module."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        yield simulated.url


@pytest.fixture
def uncounting() -> Iterator[str]:
    """The URL of a server that reports the length of a prompt only after it has run the prompt."""
    routes = {name: route for name, route in SGLANG.items() if name != "POST /tokenize"}
    with small_server(routes) as server:
        yield server.url


def said(out: str) -> str:
    """What was printed, as one line."""
    return " ".join(out.split())


def records_of(folder: Path) -> Sequence[Record]:
    """In order of id."""
    return sorted(runfile.read(folder / "run").records, key=lambda record: record.id)


def lines(folder: Path, *lengths: int | None) -> Path:
    """A JSONL file of prompts with these output lengths."""
    named: list[dict[str, Any]] = [
        {"prompt": f"Question number {place}?"} | ({} if length is None else {"output_tokens": length})
        for place, length in enumerate(lengths)
    ]
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in named))
    return file


def test_a_jsonl_file_gets_the_lengths_it_names(vllm: str, tmp_path: Path) -> None:
    """300 where it says 300, 128 where it says nothing: asked of the server, in the first line and in the report."""
    file = lines(tmp_path, 300, 7, None)
    code, out, err = run(tmp_path, "--server", "vllm", "--url", vllm, "--workload", f"jsonl:{file}", "--n", "3")
    assert code in (0, 5), err
    assert [record.output_tokens_asked for record in records_of(tmp_path)] == [300, 7, 128]
    assert [record.output_tokens for record in records_of(tmp_path)] == [300, 7, 128]
    assert "the file's tokens in, the file's (128 where it names none) out" in said(out)
    assert "the output lengths of its file" in said(out)
    assert runfile.read(tmp_path / "run").header.plan["output_tokens"] == "answers"


@pytest.mark.parametrize(
    ("workload", "expected"), [("alpaca:{data}/alpaca.json", 2), ("multi-turn:{data}/sharegpt.json", 3)]
)
def test_recorded_answers_give_the_lengths_also_in_a_plan_file(
    workload: str, expected: int, vllm: str, tmp_path: Path
) -> None:
    """No option names them: neither 128 nor any other constant is asked, but what the server counts of the answers."""
    plan = tmp_path / "plan.toml"
    plan.write_text(f'server = "vllm"\narrivals = "closed:1"\nn = 2\nworkload = "{workload.format(data=DATA)}"\n')
    run(tmp_path, str(plan), "--url", vllm)
    asked = [record.output_tokens_asked for record in records_of(tmp_path)]
    assert len(asked) == expected
    assert 128 not in asked
    assert len(set(asked)) > 1
    assert {record.state for record in records_of(tmp_path)} == {"complete"}


def test_a_burst_takes_a_workload(vllm: str, tmp_path: Path) -> None:
    """As `run --arrivals burst` does."""
    file = lines(tmp_path, 5, 6)
    code, _, err = command(tmp_path, "--server", "vllm", "--url", vllm, "--workload", f"jsonl:{file}", "--n", "2")
    assert code in (0, 5), err
    assert [record.output_tokens for record in records_of(tmp_path)] == [5, 6]
    assert runfile.read(tmp_path / "run").header.plan["arrivals"] == "burst"


def test_an_answer_that_may_end_early_is_complete(tmp_path: Path) -> None:
    """`max:9` on a server whose model stops after 4: complete, and equal work is said not to be given; without `max:`
    the same answers are truncated."""
    config = SimulatedConfig(server="vllm", **FAST, faults=(parse_rule("early-stop@4"),))
    with running(config) as simulated:
        load = ["--server", "vllm", "--url", simulated.url, "--n", "3", "--input-tokens", "16"]
        code, out, err = command(tmp_path, *load, "--output-tokens", "max:9")
        assert code in (0, 5), err
        assert [(record.state, record.output_tokens) for record in records_of(tmp_path)] == [("complete", 4)] * 3
        assert "at most 9 out" in said(out)
        assert "at most 9 output tokens each" in said(out)
        assert "not strictly comparable" in said(out)
        assert summary_of(tmp_path)["tokens"]["output_mismatches"] == 0
        code, _, _ = command(tmp_path / "run", *load, "--output-tokens", "9")
    assert code == 1
    assert {record.state for record in records_of(tmp_path / "run")} == {"truncated"}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_file_needs_no_tokenizer(endpoint: str, uncounting: str, tmp_path: Path) -> None:
    """A server that counts nothing beforehand is sent the file as it is; its lengths are not called as requested."""
    file = lines(tmp_path, 5, 6)
    load = [
        "--server",
        "openai",
        "--endpoint",
        endpoint,
        "--url",
        uncounting,
        "--workload",
        f"jsonl:{file}",
        "--n",
        "2",
    ]
    code, out, err = command(tmp_path, *load)
    assert code in (0, 5), err
    assert [(record.state, record.output_tokens) for record in records_of(tmp_path)] == [
        ("complete", n) for n in (5, 6)
    ]
    assert "not counted before the run" in said(out)
    assert "Prompt lengths not known beforehand; all output lengths as requested." in said(out)


def test_synthetic_prompts_go_on_with_an_assumption(uncounting: str, tmp_path: Path) -> None:
    """By samples, the default, prompts come out as long as asked; approximate ones are never called exact, and exact
    ones are refused."""
    load = ["--server", "openai", "--url", uncounting, "--n", "4", "--input-tokens", "40", "--output-tokens", "5"]
    code, _, err = command(tmp_path, *load, "--lengths", "exact")
    assert code == 2
    assert "--lengths exact" in err
    code, out, err = command(tmp_path, *load)
    assert code in (0, 5), err
    assert {record.prompt_tokens for record in records_of(tmp_path)} == {40}
    assert "about 40 tokens (estimated) in, 5 out" in said(out)
    assert "4 prompts of about 40 tokens (estimated)" in said(out)
    assert "is assumed" in said(out)
    _, out, _ = command(tmp_path / "run", *load, "--lengths", "approximate")
    assert {record.state for record in records_of(tmp_path / "run")} == {"complete"}
    assert "4 prompts of about 40 tokens (estimated)" in said(out)
    assert "4 requests of about 40 tokens (estimated)" in said(out)


def test_chunks_are_not_called_tokens(tmp_path: Path) -> None:
    """A server that gives no total: nobody says that answers have the length asked for, though as many chunks came."""
    event = 'data: {"choices":[{"text":"a","finish_reason":%s}]}\n\n'
    stream = (event % "null" + event % '"length"' + "data: [DONE]\n\n").encode()
    with answering({**OPENAI, "POST /v1/completions": (200, stream)}) as stub:
        load = ["--server", "openai", "--url", stub.url, "--workload", f"jsonl:{lines(tmp_path, 2)}", "--n", "1"]
        code, out, err = command(tmp_path, *load)
    assert code in (0, 5), err
    (record,) = records_of(tmp_path)
    assert (record.state, record.counted_by, record.chunk_tokens) == ("complete", "chunks", [1, 1])
    assert "output lengths unknown for 1 request, as only chunks were counted" in said(out)
    assert "output lengths as requested" not in said(out)


def test_help_says_what_lengths_there_are(tmp_path: Path) -> None:
    """Of `burst` as of `run`."""
    for name in ("burst", "run"):
        shown = " ".join(in_process(tmp_path, name, "--help-all")[1].split())
        assert "--workload" in shown
        assert "--lengths" in shown
        assert "max:128" in shown
