"""What the comparison with other load generators computes: truth from a log, figures from results, a table of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.comparison import aiperf, evalscope, genai_bench, guidellm, judge, model, table, vllm_bench
from benchmarks.comparison.client import Client, Load
from loadgen.servers.simulated import tokenizer as simulated

MS = 1_000_000
SUMMARY = {"late_ns": {"p99": 3 * MS}}
RESULTS: dict[str, tuple[Client, str, Any]] = {
    "guidellm": (
        guidellm.CLIENT,
        "report.json",
        {
            "benchmarks": [
                {
                    "metrics": {
                        "time_to_first_token_ms": {"successful": {"median": 501.5}},
                        "inter_token_latency_ms": {"successful": {"median": 20.25}},
                        "time_per_output_token_ms": {"successful": {"median": 24}},
                    }
                }
            ]
        },
    ),
    "aiperf": (
        aiperf.CLIENT,
        "artifacts/profile_export_aiperf.json",
        {"time_to_first_token": {"p50": 501.5}, "inter_token_latency": {"p50": 20.25}},
    ),
    "genai-bench": (
        genai_bench.CLIENT,
        "results/D512_128_text-to-text_num_concurrency_3_time_1s.json",
        {
            "individual_request_metrics": [
                {"ttft": 0.4, "tpot": 0.01},
                {"ttft": 0.5015, "tpot": 0.02025},
                {"ttft": 0.9, "tpot": 0.05},
            ]
        },
    ),
    "evalscope": (
        evalscope.CLIENT,
        "benchmark/parallel_3_number_3/benchmark_percentile.json",
        [
            {"Percentiles": "25%", "TTFT (ms)": 1, "TPOT (ms)": 1},
            {"Percentiles": "50%", "TTFT (ms)": 501.5, "TPOT (ms)": 20.25},
        ],
    ),
    "vllm": (vllm_bench.RUST, "result.json", {"median_ttft_ms": 501.5, "median_tpot_ms": 20.25}),
}


def line(received_ms: int, *sent_ms: int, stamps: str = "ring") -> dict[str, Any]:
    """A request of the server's log, one token per send."""
    return {
        "stamps": stamps,
        "received_ns": received_ms * MS,
        "sent_ns": [at * MS for at in sent_ms],
        "tokens": [1] * len(sent_ms),
    }


def test_the_log_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    """Lines are written when answers end; the judge gets them as they came, and the summary apart."""
    log = tmp_path / "log.jsonl"
    lines: list[dict[str, Any]] = [line(20, 30), line(10, 40), {"summary": SUMMARY}]
    log.write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert judge.read_log(log) == ([line(10, 40), line(20, 30)], SUMMARY)


def test_the_truth_is_counted_from_arrivals() -> None:
    """TTFT counts from when each request came."""
    requests = [line(100, 600, 620, 640), line(101, 610, 630, 652)]
    assert judge.judge(requests, SUMMARY, 2) == judge.Truth(
        requests=2,
        events=6,
        first_request_ns=100 * MS,
        skew_ms=1,
        ttft_ms=504.5,
        tpot_ms=20.5,
        server_late_ms=3,
        stamps="ring",
    )


def test_arrivals_are_as_good_as_the_least_of_their_stamps() -> None:
    """One request of the burst that the kernel did not stamp makes it the server's own word; one before it does not."""
    warm, first, last = line(5, 9, stamps="user"), line(1105, 1600, 1620), line(1110, 1610, 1630)
    assert judge.judge([warm, first, last], SUMMARY, 2).stamps == "ring"
    assert judge.judge([warm, first, {**last, "stamps": "user"}], SUMMARY, 2).stamps == "user"


def test_the_burst_is_found_among_other_requests() -> None:
    """A request that tried the server before, and ones begun at the end and given up, are no part of the skew."""
    requests = [line(0, 500), line(1000, 1500), line(1002, 1503), line(2000, 2500), line(2001)]
    truth = judge.judge(requests, SUMMARY, 2)
    assert (truth.requests, truth.events, truth.skew_ms, truth.ttft_ms) == (5, 4, 2, 500.5)


def test_a_burst_that_did_not_happen_is_not_judged() -> None:
    """Fewer answers than requests asked for are an error, and no figure."""
    with pytest.raises(ValueError, match="answered 1 of 2"):
        judge.judge([line(0, 500), line(1)], SUMMARY, 2)


def test_the_table_marks_the_best_of_each_column() -> None:
    """Better may be more, less, or nearer to zero; the floor does not compete, and a reason stands for figures."""
    columns = (
        table.Column("rate", 0, table.larger),
        table.Column("wall", 1, table.smaller),
        table.Column("error", 2, abs, signed=True),
        table.Column("seen", 0),
    )
    rows: dict[str, table.Row | str] = {
        "a": {"rate": 2000, "wall": 3, "error": -0.1, "seen": 1},
        "b": {"rate": 1000, "wall": 2, "error": 0.2, "seen": 2},
        "c": "would not start",
        "floor": {"rate": 9000, "wall": 1, "error": 0},
    }
    assert table.markdown(columns, rows, floor="floor").splitlines()[2:] == [
        "| a | **2,000** | 3.0 | **-0.10** | 1 |",
        "| b | 1,000 | **2.0** | +0.20 | 2 |",
        "| c | would not start |  |  |  |",
        "| floor | 9,000 | 1.0 | +0.00 |  |",
    ]


def test_medians_are_taken_figure_by_figure() -> None:
    """Each figure is the median of the runs that have it."""
    assert table.medians([{"peak": 7}, {"rate": 1}, {"rate": 3}, {"rate": 8}]) == {"peak": 7, "rate": 3}


@pytest.mark.parametrize(
    "text", ["Shall I compare thee to a summer's day?", " the of ruveko 12\n", "(12 + 34) / 5 = 9.2", "abczzq"]
)
def test_the_peers_tokenizer_is_the_servers(tmp_path: Path, text: str) -> None:
    """English text has as many tokens for a peer as for the simulated server, with the token that begins it."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(model.make(tmp_path) / "tokenizer.json"))
    assert len(made.encode(text).ids) == 1 + simulated.count(text)
    assert made.decode(made.encode(" the of and").ids) == " the of and"


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_peers_are_read(tmp_path: Path, name: str) -> None:
    """The medians are found in a file shaped like the one the peer writes."""
    client, file, content = RESULTS[name]
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(json.dumps(content))
    reported = client.reported(tmp_path)
    assert (reported.ttft_ms, reported.tpot_ms) == (pytest.approx(501.5), pytest.approx(20.25))


@pytest.mark.parametrize("name", [name for name in peers.CLIENTS if not name.startswith("C")])
def test_every_peer_gets_the_same_load(tmp_path: Path, name: str) -> None:
    """The command names the server, the number of requests and both lengths."""
    load = Load(url="http://127.0.0.1:9", n=1234, input_tokens=432, output_tokens=321, model=tmp_path, scratch=tmp_path)
    command = " ".join(peers.CLIENTS[name].command(tmp_path, load))
    assert all(text in command for text in ("http://127.0.0.1:9", "1234", "432", "321"))
