"""Several classes of traffic in one run: `[[traffic]]` tables of a plan file."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import loadgen
from loadgen.analysis.run import runfile
from loadgen.errors import PlanError
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.traffic import FIRST_IDS_APART, shared_due_times, traffic_classes
from loadgen.workloads.request import number_of_wire_id
from tests.support.command import burst, summary_of
from tests.support.command import loadgen as command
from tests.support.simulated import running

SERVER = SimulatedConfig(server="vllm", ttft_s=0.005, itl_s=0.001, model="base", adapters=("tuned",))
THREE_CLASSES = """
url = "URL"
duration_s = 2
output_tokens = 5
warmup = 2
goodput = ["ttft < 1h"]

[[traffic]]
name = "chat"
rate = 20
input_tokens = 32
header = ["X-Simulated-Fault: 500"]
objectives = ["failed >= 100%"]
goodput = ["e2e < 1h", "ttft < 1h"]

[[traffic]]
name = "batch"
arrivals = "closed:2"
n = 30
input_tokens = 200
model = "tuned"
objectives = ["complete >= 100%", "ttft.p50 < 1h"]

[[traffic]]
name = "dialogs"
workload = "multi-turn:turns=3"
arrivals = "constant:5"
endpoint = "chat"
"""


def write_plan(folder: Path, text: str, url: str = "") -> Path:
    """Write a plan file, with the URL of the server in place of URL."""
    file = folder / "plan.toml"
    file.write_text(text.replace("URL", url))
    return file


@pytest.mark.parametrize("workers", ["1", "2"])
def test_classes_run_together(tmp_path: Path, workers: str) -> None:
    """Each class sends its own requests at its own times: prompts, endpoint, model and headers. Its figures and
    objectives concern it alone, and the figures of all classes add up to the run."""
    with running(SERVER) as simulated:
        plan = write_plan(tmp_path, THREE_CLASSES, simulated.url)
        # A new interpreter: in a fork of this process, uvloop would replace the files of the fifth worker's pipe.
        code, out, _ = burst(tmp_path, str(plan), "--workers", workers, command="run", PYTHONUTF8="1")
        at_server = {number_of_wire_id(line.request_id): line for line in simulated.log if line.request_id}
    assert code in (0, 5), out
    run = runfile.read(tmp_path / "run")
    measured = [record for record in run.records if record.phase == "measured"]
    assert len(run.records) == len(measured) + 6, "two warm-up requests per class"
    classes = {name: [each for each in measured if each.id // FIRST_IDS_APART == number]
               for number, name in enumerate(("chat", "batch", "dialogs"))}  # fmt: skip
    assert sum(map(len, classes.values())) == len(measured)
    assert {record.id for record in run.records} == set(at_server), "ids are unique, also those of warm-up requests"
    assert {record.state for record in classes["chat"]} == {"failed"}, "only this class has the header"
    assert {at_server[record.id].model for record in classes["batch"]} == {"tuned"}
    assert {at_server[record.id].model for record in classes["dialogs"]} == {"base"}
    assert len(classes["batch"]) == 30
    assert all(at_server[record.id].prompt_tokens == 200 for record in classes["batch"])
    assert Counter(record.turn for record in classes["dialogs"]) == {0: 10, 1: 10, 2: 10}
    firsts = sorted(record.due_ns for record in classes["dialogs"] if not record.turn)
    assert firsts == [number * 200_000_000 for number in range(10)]
    summary: dict[str, Any] = summary_of(tmp_path)
    traffic = {part["name"]: part for part in summary["traffic"]}
    assert {name: part["requests"]["sent"] for name, part in traffic.items()} == {
        name: len(records) for name, records in classes.items()
    }
    assert sum(part["output_tokens"] for part in traffic.values()) == summary["tokens"]["output_reported"]
    for rate in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s"):
        total = sum(part["throughput"][rate] or 0 for part in traffic.values())
        assert total == pytest.approx(summary["throughput"][rate])
    assert {name: part["goodput"]["bounds"] for name, part in traffic.items()} == {
        "chat": ["e2e < 1h", "ttft < 1h"], "batch": ["ttft < 1h"], "dialogs": ["ttft < 1h"],
    }  # fmt: skip
    assert traffic["batch"]["goodput"]["attainment"] == 1
    assert traffic["dialogs"]["delivery"]["rate_per_s"]["named"] == 5
    assert [(each["objective"], each["verdict"]) for each in summary["objectives"]] == [
        ("chat: failed >= 100%", "pass"), ("batch: complete >= 100%", "pass"), ("batch: ttft.p50 < 1h", "pass"),
    ]  # fmt: skip
    assert {part["name"]: part["requests"]["sent"] for part in summary["models"]} == {"base": 30 + len(classes["chat"]),
                                                                                     "tuned": 30}  # fmt: skip
    assert summary["run"]["arrivals"] == "traffic"
    assert [turn["n"] for turn in summary["turns"]] == [10, 10, 10], "turns are those of the class with sessions"


def test_a_load_is_shared_by_weight(tmp_path: Path) -> None:
    """The due times of the plan's load are divided by the seed. The classes get exactly these times."""
    text = 'url = "URL"\nrate = 100\nn = 80\noutput_tokens = 3\n'
    text += "".join(f'[[traffic]]\nname = "{name}"\nweight = {weight}\n' for name, weight in (("a", 70), ("b", 30)))
    with running(SERVER) as simulated:
        plan = write_plan(tmp_path, text, simulated.url)
        code, out, _ = burst(tmp_path, str(plan), "--seed", "3", command="run")
    assert code in (0, 5), out
    run = runfile.read(tmp_path / "run")
    due_ns = sorted(record.due_ns for record in run.records)
    assert len(due_ns) == 80
    classes = traffic_classes(loadgen.Plan(**{**run.header.plan, "url": "http://127.0.0.1:1"}))
    expected = shared_due_times(classes, due_ns, 3)
    for number, name in enumerate(("a", "b")):
        assert [record.due_ns for record in sorted(run.records, key=lambda record: record.id)
                if record.id // FIRST_IDS_APART == number] == list(expected[name])  # fmt: skip
    assert run.header.load.rate_per_s == 100


def test_each_class_alone(tmp_path: Path) -> None:
    """--alone runs each class by itself first. The report has the ratio of together and alone, with an interval."""
    text = """url = "URL"
    output_tokens = 4
    [[traffic]]
    name = "a"
    arrivals = "closed:2"
    n = 40
    [[traffic]]
    name = "b"
    arrivals = "closed:2"
    n = 40
    """
    with running(SERVER) as simulated:
        plan = write_plan(tmp_path, text, simulated.url)
        code, out, _ = burst(tmp_path, str(plan), "--alone", command="run", report=True)
        requests = len([line for line in simulated.log if line.request_id])
    assert code in (0, 5), out
    assert requests == 160
    assert "class 2 of 2 alone: b" in out
    for name in ("a", "b"):
        alone = runfile.read(tmp_path / "run-alone" / name)
        assert [facts.name for facts in alone.header.traffic] == [name]
        assert len(alone.records) == 40
        assert alone.header.plan["seed"] != runfile.read(tmp_path / "run").header.plan["seed"], "other prompts"
    summary: dict[str, Any] = summary_of(tmp_path)
    for part in summary["traffic"]:
        figures = {each["figure"]: each for each in part["interference"]}
        median = figures["ttft.p50"]
        assert median["ratio"] == pytest.approx(median["together"] / median["alone"])
        assert median["ratio_ci95"][0] <= median["ratio"] <= median["ratio_ci95"][1]
        assert figures["ttft.p99"]["why"].startswith("too few samples")
    assert "Each class alone and together" in out
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Classes of traffic" in page
    assert "Each class alone and together" in page


def test_each_class_alone_from_python(tmp_path: Path) -> None:
    """`alone=True` does what --alone does. Callbacks see the progress of these runs too."""
    tables = [{"name": "a", "arrivals": "closed:2", "n": 20}, {"name": "b", "n": 20}]
    lines: list[str] = []
    phases: list[str] = []
    with running(SERVER) as simulated:
        plan = loadgen.Plan(url=simulated.url, output_tokens=4, traffic=tables)
        result = loadgen.run(
            plan,
            out=tmp_path / "run",
            alone=True,
            say=lines.append,
            progress=lambda phase, _counts: phases.append(phase),
        )
        requests = len([line for line in simulated.log if line.request_id])
    assert requests == 80
    assert "class 2 of 2 alone: b" in lines
    assert phases.count("ended") == 3
    for part in result.summary.traffic:
        median = next(row for row in part.interference if row.figure == "ttft.p50")
        assert median.ratio is not None
    with pytest.raises(PlanError, match="alone=True runs classes of traffic by themselves"):
        loadgen.run(loadgen.Plan(url="http://127.0.0.1:9", n=3), alone=True)


def test_a_lost_run_of_a_class_is_a_note(tmp_path: Path) -> None:
    """If the run of a class alone was deleted, the report says so, and the other figures stay."""
    text = 'url = "URL"\noutput_tokens = 4\n[[traffic]]\nname = "a"\nn = 5\n[[traffic]]\nname = "b"\nn = 5\n'
    with running(SERVER) as simulated:
        plan = write_plan(tmp_path, text, simulated.url)
        burst(tmp_path, str(plan), "--alone", command="run")
    (tmp_path / "run-alone" / "a" / "run.jsonl").unlink()
    command(tmp_path, "report", "run")
    summary: dict[str, Any] = summary_of(tmp_path)
    assert any("a cannot be compared with its run alone" in note for note in summary["run"]["notes"])
    assert [part["requests"]["complete"] for part in summary["traffic"]] == [5, 5]


def test_classes_in_export_comparison_and_api(tmp_path: Path) -> None:
    """The export has a column with the class. Comparisons have a table per class. The API takes the same tables."""
    tables = [{"name": "a", "n": 20}, {"name": "b", "arrivals": "closed:2", "n": 20}]
    with running(SERVER) as simulated:
        for name in ("one", "two"):
            loadgen.run(loadgen.Plan(url=simulated.url, output_tokens=4, traffic=tables), out=tmp_path / name)
    result = loadgen.read(tmp_path / "one")
    assert [part.name for part in result.summary.traffic] == ["a", "b"]
    assert Counter(result.frame()["class"]) == {"a": 20, "b": 20}
    assert command(tmp_path, "export", "one", "--csv", "tables").returncode == 0
    header, *rows = (tmp_path / "tables" / "requests.csv").read_text().splitlines()
    column = header.split(",").index("class")
    assert Counter(row.split(",")[column] for row in rows) == {"a": 20, "b": 20}
    comparison = json.loads(command(tmp_path, "compare", "one", "two", "--json").stdout)
    assert [part["name"] for part in comparison["classes"]] == ["a", "b"]
    assert "ttft.p50" in [row["figure"] for row in comparison["classes"][0]["rows"]]


def test_turns_of_abandoned_sessions_are_not_excluded_requests(tmp_path: Path) -> None:
    """The turns that were never sent count as abandoned, and a comparison excludes no negative number of requests."""
    text = """server = "vllm"
    cancel = "40% after 3 tokens"
    [[traffic]]
    name = "dialogs"
    workload = "multi-turn:turns=4"
    concurrency = 2
    n = 10
    """
    plan = write_plan(tmp_path, text)
    for name in ("one", "two"):
        done = command(tmp_path, "simulate", str(plan), "--out", name, "--no-report")
        assert done.returncode == 0, done.stderr
    out = command(tmp_path, "compare", "one", "two").stdout
    assert "Excluded" not in out
    assert "-1 request" not in out


def test_classes_in_virtual_time(tmp_path: Path) -> None:
    """`loadgen simulate` runs open loops, closed loops and sessions as classes on one virtual clock."""
    text = """server = "vllm"
    rate = 20
    duration_s = 20
    [[traffic]]
    name = "a"
    weight = 2
    [[traffic]]
    name = "b"
    weight = 1
    model = "x=1,y=1"
    [[traffic]]
    name = "dialogs"
    workload = "multi-turn:turns=2"
    rate = 1
    [[traffic]]
    name = "batch"
    concurrency = 1
    output_tokens = 500
    cancel = "50% after 1s"
    """
    plan = write_plan(tmp_path, text)
    code, out, _ = burst(tmp_path, str(plan), "--no-report", command="simulate")
    assert code == 0, out
    run = runfile.read(tmp_path / "run")
    assert len({record.id for record in run.records}) == len(run.records)
    summary: dict[str, Any] = summary_of(tmp_path)
    sent = {part["name"]: part["requests"]["sent"] for part in summary["traffic"]}
    assert sum(sent.values()) == len(run.records)
    assert sent["a"] > sent["b"] > sent["dialogs"] > 0
    abandoned = {part["name"]: part["requests"]["abandoned"] for part in summary["traffic"]}
    assert sent["batch"] > abandoned.pop("batch") > 0
    assert set(abandoned.values()) == {0}
    assert {part["name"] for part in summary["models"]} == {"Llama-2-7B", "x", "y"}


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("[[traffic]]\nname = 3", (), "plan.toml:\n[[traffic]] table 1 has the name 3"),
        ("[[traffic]]\nname = 'a'\nrat = 1", (), "[[traffic]] 'a': rat: unknown setting; did you mean rate?"),
        ("[[traffic]]\nname = 'a'\nn = 'x'", (), "[[traffic]] 'a': --n x: must be a whole number"),
        ("[traffic]\nname = 'a'", (), "traffic: must be a list of tables"),
        ("n = 3", ("--alone",), "--alone runs classes of traffic by themselves"),
        ("[[traffic]]\nname = 'a'\nn = 3", ("--alone", "--repeats", "2"), "--alone cannot be used with --repeats"),
        ("[[traffic]]\nname = 'a'\nn = 3", ("--assert", "b: failed <= 0"), "no class of traffic and no model 'b'"),
    ],
)
def test_mistakes_name_the_file_and_the_table(
    tmp_path: Path, text: str, arguments: tuple[str, ...], message: str
) -> None:
    """The exit code is 2, and nothing is sent."""
    plan = write_plan(tmp_path, f"simulated = true\n{text}\n")
    code, _, errors = burst(tmp_path, str(plan), *arguments, command="run")
    assert code == 2
    assert message in errors
