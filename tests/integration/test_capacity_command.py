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
    monkeypatch.setattr("loadgen.studies.capacity.REQUEST_COUNTS", range(100, 151))


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
    assert "The figures assume Poisson arrivals" in " ".join(out.split())
    assert "Pareto set" in out
    assert "  GPUs  tokens/s user" in out
    code, told, _ = in_process(tmp_path, *words, "--json")
    found = json.loads(told)
    assert (code, found["rate_per_s"], len(found["options"])) == (0, 20.0, 4)
    costs = [each["cost_per_hour"] for each in found["options"]]
    assert costs == sorted(costs)
    assert first.startswith(str(found["options"][0]["gpus"]))
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_a_rate_may_have_its_unit(tmp_path: Path) -> None:
    """`--rate 20/s` is the load of `--rate 20`, as in `loadgen run`."""
    words = ("plan-capacity", "--rate", "20/s", *LOAD[2:], "--gpu", "H100", "--tp", "1", "--json")
    code, out, err = in_process(tmp_path, *words)
    assert (code, err) == (0, "")
    assert json.loads(out)["rate_per_s"] == 20.0


@pytest.mark.parametrize("load", ['rate = "50/s"', 'arrivals = "closed:8"', "concurrency = 8"])
def test_the_rate_replaces_the_load_of_a_plan_file(load: str, tmp_path: Path) -> None:
    """A plan of `loadgen run` needs no change. Its lengths count, and its own load does not."""
    (tmp_path / "plan.toml").write_text(f'server = "vllm"\ninput_tokens = 2048\n{load}\n', "utf-8")
    words = (*LOAD, "--gpu", "H100", "--tp", "1", "--json")
    code, out, err = in_process(tmp_path, "plan-capacity", "plan.toml", *words)
    assert (code, err) == (0, "")
    assert json.loads(out) | {"search": {}} == json.loads(
        in_process(tmp_path, "plan-capacity", *words, "--input-tokens", "2048")[1]
    ) | {"search": {}}


def test_cached_prompts_need_fewer_gpus(tmp_path: Path) -> None:
    """Each replica takes a higher rate, and smaller steps change the rate."""
    words = ("plan-capacity", *LOAD, "--gpu", "H100", "--tp", "1", "--json", "--input-tokens", "4096")
    rates = []
    for more in ((), ("--cache-hit-rate", "0.8"), ("--step-tokens", "1024", "--chunked-prefill", "mixed")):
        code, out, _ = in_process(tmp_path, *words, *more)
        assert code == 0
        result = json.loads(out)
        rates.append(result["options"][0]["replica_per_s"])
    assert result["assumptions"] == {"step_tokens": 1024, "chunked_prefill": "mixed"}
    assert rates[1] > 1.5 * rates[0]
    assert rates[2] != rates[0]


def test_a_plan_file_says_the_load(tmp_path: Path) -> None:
    """Prompts and answers of a plan; options win."""
    (tmp_path / "plan.toml").write_text('server = "tgi"\ninput_tokens = 64\noutput_tokens = 16\n', "utf-8")
    words = ("plan-capacity", "plan.toml", *LOAD[:-2], "--gpu", "L4", "--tp", "1", "--input-tokens", "32")
    code, out, _ = in_process(tmp_path, *words)
    assert code == 0
    assert "llama-3.1-8b on tgi: ttft.p99 < 1s\n20 requests/s of 32 + 16 tokens (synthetic)\n" in out


PRICES = """
[[price]]
gpu = "H100"
region = "us"
on_demand = 2.5
spot = 1.0
interruptions_per_hour = 0.05

[[price]]
gpu = "L40S"
region = "eu"
on_demand = 0.9
"""


def test_a_price_list_names_gpus_regions_and_spot_prices(tmp_path: Path) -> None:
    """GPUs come from the list. A region excludes others, and --spot considers spot prices."""
    (tmp_path / "prices.toml").write_text(PRICES, "utf-8")
    words = ("plan-capacity", *LOAD, "--prices", "prices.toml", "--tp", "1", "--json")
    code, told, err = in_process(tmp_path, *words)
    assert (code, err) == (0, "")
    options = json.loads(told)["options"]
    assert {each["gpu"]: (each["region"], each["spot"]) for each in options} == {
        "H100 SXM": ("us", False),
        "L40S": ("eu", False),
    }
    code, told, _ = in_process(tmp_path, *words, "--spot", "--region", "us")
    (option,) = json.loads(told)["options"]
    assert (code, option["gpu"], option["spot"]) == (0, "H100 SXM", True)
    assert option["cost_per_hour"] == 1.0 * (option["gpus"] + option["spare_gpus"])


def test_a_price_list_without_the_gpu_is_a_mistake(tmp_path: Path) -> None:
    """Its plan would have no cost, although the user asked for costs."""
    (tmp_path / "prices.toml").write_text(PRICES, "utf-8")
    words = ("plan-capacity", *LOAD, "--prices", "prices.toml", "--tp", "1", "--gpu", "B200")
    code, told, err = in_process(tmp_path, *words)
    assert (code, told) == (EXIT_USAGE, "")
    assert "prices.toml has no price of B200 SXM" in err


def test_a_search_over_engines_layouts_and_workers(tmp_path: Path) -> None:
    """Each option has its commands, and the search says what it considered."""
    gpus = ("--gpu", "H100=2.5", "--gpu", "L4=0.4")
    words = (*gpus, "--search", "--tp", "1,2", "--max-gpus", "8", "--page", "page.html")
    code, out, err = in_process(tmp_path, "plan-capacity", *LOAD, *words)
    assert (code, err) == (0, "")
    # For each of two GPUs: TP 1 and 2, PP 1, 2 and 4 and separate workers or not; with TGI only TP 1 and 2.
    assert "Searched 76 configurations" in out
    assert "loadgen limits --gpu" in out
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Pareto set" in page
    assert "loadgen simulate --server" in page


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
        (("--rate", "5/min", *LOAD[2:]), "--rate 5/min"),
        (("--rate", "0.0001/s", *LOAD[2:]), "Write at least --rate 0.001."),
        ((*LOAD, "--server", "openai"), "openai"),
        ((*LOAD, "--engine", "nim"), "nim"),
        ((*LOAD, "--ep", "2"), "has no experts"),
        ((*LOAD, "--draft-tokens", "-1"), "--draft-tokens -1 is not a list of numbers from 0"),
        ((*LOAD, "--tp", "3"), "no configuration can run Llama-3.1-8B: --tp 3 does not divide the 32 attention heads"),
        ((*LOAD, "--spot"), "--spot needs a price list"),
        ((*LOAD, "--prices", "none.toml"), "--prices none.toml: No such file"),
        ((*LOAD, "--gpu", "H100=$2", "--gpu", "L4=1 EUR"), "different currencies"),
    ],
)
def test_a_mistake_is_a_sentence(words: tuple[str, ...], said: str) -> None:
    """Exit code 2, and what to write instead."""
    code, out, err = in_process(ROOT, "plan-capacity", *words)
    assert (code, out) == (EXIT_USAGE, "")
    assert said in err
