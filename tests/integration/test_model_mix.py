"""Several models in one run: `--model a=70,b=30`, and lines of a file that name their own model."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.workloads.request import number_of_wire_id
from tests.support.command import burst, summary_of
from tests.support.simulated import running

REQUESTS = 200
SERVER = SimulatedConfig(server="vllm", ttft_s=0.005, itl_s=0.001, model="base", adapters=("tuned",))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_requests_are_split_over_two_models(tmp_path: Path, workers: str) -> None:
    """The server sees 70% and 30% within the 99% interval, each request with the model of its Record. The tables per
    model add up to the run, and the same seed gives the same split for any number of workers."""
    with running(SERVER) as simulated:
        code, out, _ = burst(
            tmp_path, "--url", simulated.url, "--model", "base=70,tuned=30", "-n", str(REQUESTS), "--seed", "7",
            "--output-tokens", "5", "--input-tokens", "32", "--workers", workers,
            "--assert", "tuned: complete >= 100%", "--assert", "base: ttft.p50 < 1h",
        )  # fmt: skip
        at_server = {number_of_wire_id(line.request_id): line.model for line in simulated.log if line.request_id}
    assert code in (0, 5), out
    records = {record.id: record.model for record in runfile.read(tmp_path / "run").records}
    assert at_server == records
    counts = Counter(records.values())
    assert abs(counts["base"] - 0.7 * REQUESTS) <= 2.576 * math.sqrt(REQUESTS * 0.7 * 0.3)
    assert counts == {"base": 143, "tuned": 57}, "the seed decides"
    summary = summary_of(tmp_path)
    models = {model["name"]: model for model in summary["models"]}  # type: ignore[call-overload, index]
    assert {name: model["requests"]["complete"] for name, model in models.items()} == counts
    assert sum(model["output_tokens"] for model in models.values()) == summary["tokens"]["output_reported"]
    rates = sum(model["throughput"]["output_tokens_per_s"] for model in models.values())
    assert rates == pytest.approx(summary["throughput"]["output_tokens_per_s"])
    assert [objective["verdict"] for objective in summary["objectives"]] == ["pass", "pass"]  # type: ignore[index]
    assert "tuned" in out


def test_a_session_stays_with_its_model(tmp_path: Path) -> None:
    """All turns of a session name the model of its first turn."""
    with running(SERVER) as simulated:
        code, out, _ = burst(
            tmp_path, "--url", simulated.url, "--model", "base=50,tuned=50", "--workload", "multi-turn:turns=3",
            "--arrivals", "closed:4", "-n", "12", "--output-tokens", "3", "--input-tokens", "16", command="run",
        )  # fmt: skip
    assert code in (0, 5), out
    sessions: dict[int | None, set[str]] = {}
    for record in runfile.read(tmp_path / "run").records:
        sessions.setdefault(record.session, set()).add(record.model)
    assert len(sessions) == 12
    assert all(len(models) == 1 for models in sessions.values())
    assert set().union(*sessions.values()) == {"base", "tuned"}


@pytest.mark.parametrize("kind", ["jsonl", "requests"])
def test_lines_with_their_own_model_get_tables(tmp_path: Path, kind: str) -> None:
    """Requests without a model belong to the model of the run."""
    names = ["tuned", "base", "", "tuned"] * 5
    lines = [
        {"prompt": f"prompt {number}", "max_tokens": 4, **({"model": name} if name else {})}
        for number, name in enumerate(names)
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line if kind == "jsonl" else {"body": line}) + "\n" for line in lines))
    with running(SERVER) as simulated:
        code, out, _ = burst(
            tmp_path, "--url", simulated.url, "--workload", f"{kind}:{file}", "--assert", "tuned: complete >= 10"
        )
    assert code in (0, 5), out
    summary = summary_of(tmp_path)
    models = {model["name"]: model["requests"]["complete"] for model in summary["models"]}  # type: ignore[call-overload, index]
    assert models == {"tuned": 10, "base": 10}


def test_a_model_that_the_server_refuses_ends_the_run(tmp_path: Path) -> None:
    """Every model of the split is checked before the first request."""
    with running(SERVER) as simulated:
        code, _, errors = burst(tmp_path, "--url", simulated.url, "--model", "base=70,unknown=30", "-n", "4")
    assert code == 3
    assert "refuses the model unknown" in errors
    assert "it lists: base, tuned" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "a=70,b"), "--model a=70,b: 'b' is not a model with a weight; write a=70,b=30"),
        (
            ("--model", "a=70,b=30", "--assert", "c: ttft.p99 < 1s"),
            "the plan has no class of traffic and no model 'c'; choose a or b",
        ),
        (("--assert", "c: ttft.p99 < 1s"), "the plan has no class of traffic and no model 'c'; write 'ttft.p99 < 1s'"),
        (("--assert", ": ttft.p99 < 1s"), "no class of traffic, model or replica is named before the colon"),
    ],
)
def test_mistakes_are_reported(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """The message says what to write, and nothing is sent."""
    code, _, errors = burst(tmp_path, "--simulated", "-n", "4", *arguments)
    assert code == 2
    assert message in errors


def test_whole_requests_cannot_be_split(tmp_path: Path) -> None:
    """Bodies that are sent as they are keep their model."""
    file = tmp_path / "lines.jsonl"
    file.write_text('{"body": {"prompt": "a", "model": "x"}}\n')
    code, _, errors = burst(tmp_path, "--simulated", "--workload", f"requests:{file}", "--model", "a=1,b=1")
    assert code == 2
    assert "--model: --workload" in errors
