"""`loadgen plan-capacity`: as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.errors import EXIT_USAGE
from tests.support.command import ROOT, in_process

LOAD = ("--rate", "20", "--objective", "ttft.p99 < 1s", "--model", "llama-3.1-8b", "--output-tokens", "32")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations of a tenth of the requests: what is said, not how exactly it is known."""
    monkeypatch.setattr("loadgen.studies.capacity.REQUEST_COUNTS", range(100, 501))


def test_a_table_and_json_say_the_same(tmp_path: Path) -> None:
    """The cheapest first; what is assumed; nothing but JSON with --json."""
    words = ("plan-capacity", *LOAD, "--gpu", "L40S=0.9", "--gpu", "H100=2.5", "--tp", "1,2")
    code, out, err = in_process(tmp_path, *words, "--page", "page.html")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Page: page.html"
    assert "20 requests/s of 512 + 32 tokens" in (tmp_path / "page.html").read_text("utf-8")
    heading, load, _, head, first, *_ = out.splitlines()
    assert heading == "SIMULATED (virtual)  llama-3.1-8b on vllm: ttft.p99 < 1s"
    assert load == "20 requests/s of 512 + 32 tokens (synthetic)"
    assert head.split()[0] == "GPUs"
    assert max(map(len, out.splitlines())) <= 80
    assert "They assume" in out
    code, told, _ = in_process(tmp_path, *words, "--json")
    found = json.loads(told)
    assert (code, found["rate_per_s"], len(found["options"])) == (0, 20.0, 4)
    costs = [each["cost_per_hour"] for each in found["options"]]
    assert costs == sorted(costs)
    assert first.startswith(str(found["options"][0]["gpus"]))
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_cached_prompts_need_fewer_gpus(tmp_path: Path) -> None:
    """Each replica takes a higher rate, and smaller steps change the rate."""
    words = ("plan-capacity", *LOAD, "--gpu", "H100", "--tp", "1", "--json", "--input-tokens", "4096")
    rates = []
    for more in ((), ("--cache-hit-rate", "0.8"), ("--step-tokens", "1024", "--chunked-prefill", "mixed")):
        code, out, _ = in_process(tmp_path, *words, *more)
        assert code == 0
        rates.append(json.loads(out)["options"][0]["replica_per_s"])
    assert rates[1] > 1.5 * rates[0]
    assert rates[2] != rates[0]


def test_a_plan_file_says_the_load(tmp_path: Path) -> None:
    """Prompts and answers of a plan; options win."""
    (tmp_path / "plan.toml").write_text('server = "tgi"\ninput_tokens = 64\noutput_tokens = 16\n', "utf-8")
    words = ("plan-capacity", "plan.toml", *LOAD[:-2], "--gpu", "L4", "--tp", "1", "--input-tokens", "32")
    code, out, _ = in_process(tmp_path, *words)
    assert code == 0
    assert "llama-3.1-8b on tgi: ttft.p99 < 1s\n20 requests/s of 32 + 16 tokens (synthetic)\n" in out


def test_classes_of_traffic_are_refused(tmp_path: Path) -> None:
    """The message says which command takes a mix."""
    (tmp_path / "plan.toml").write_text('[[traffic]]\nname = "chat"\nrate = 5\n', "utf-8")
    code, _, err = in_process(tmp_path, "plan-capacity", "plan.toml", *LOAD)
    assert code == EXIT_USAGE
    assert "loadgen sweep PLAN --virtual H100" in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rate", "5"), "Name one or more: --objective"),
        (("--rate", "5", "--objective", "complete >= 99%"), "complete >= 99%: plan-capacity needs upper bounds"),
        (("--rate", "5", "--objective", "ttft.p99 <"), "--objective 'ttft.p99 <'"),
        ((*LOAD, "--gpu", "H1000"), "H1000"),
        ((*LOAD, "--gpu", "H100=cheap"), "cheap is not a price"),
        ((*LOAD, "--tp", "one"), "--tp one"),
        ((*LOAD, "--format", "bf17"), "bf17"),
        ((*LOAD[:4], "--model", "no-such-model"), "no-such-model"),
        (("--rate", "0", *LOAD[2:]), "--rate"),
        ((*LOAD, "--server", "openai"), "openai"),
    ],
)
def test_a_mistake_is_a_sentence(words: tuple[str, ...], said: str) -> None:
    """Exit code 2, and what to write instead."""
    code, out, err = in_process(ROOT, "plan-capacity", *words)
    assert (code, out) == (EXIT_USAGE, "")
    assert said in err
