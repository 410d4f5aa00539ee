"""`loadgen ui PLAN`: users choose a class of traffic by its weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.analysis.summary import from_json
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.traffic import FIRST_IDS_APART
from loadgen.workloads.request import number_of_wire_id
from tests.support.simulated import running
from tests.support.ui import headless

OK = (0, 5)  # 5: this machine was too busy, which is not what is tested here
SERVER = SimulatedConfig(server="vllm", ttft_s=0.005, itl_s=0.001, model="base", adapters=("tuned",))
PLAN = """
server = "vllm"
duration_s = 60
rate = 20
output_tokens = 4
[[traffic]]
name = "chat"
weight = 60
input_tokens = 40
objectives = ["failed >= 100%"]
header = ["X-Simulated-Fault: 500"]
[[traffic]]
name = "documents"
weight = 20
input_tokens = 300
model = "tuned"
endpoint = "chat"
[[traffic]]
name = "dialogs"
weight = 20
workload = "multi-turn:turns=3"
input_tokens = 50
session_header = ["X-Session-ID"]
"""


def test_users_choose_classes_by_weight(tmp_path: Path) -> None:
    """Each class sends its own prompts, headers, model and endpoint. Its figures and objectives concern it alone."""
    (tmp_path / "plan.toml").write_text(PLAN)
    with running(SERVER) as server:
        load = ("--users", "4", "--run-time", "4s", "--no-report", "--url", server.url)
        code, out, err = headless(tmp_path, "plan.toml", *load)
        lines = {number_of_wire_id(line.request_id): line for line in server.log if line.request_id}
    assert code in (1, *OK), err
    assert "plan.toml: the users are the load, not duration_s, rate" in out + err
    run = runfile.read(tmp_path / "run")
    names = [facts.name for facts in run.header.traffic]
    classes = {name: [record for record in run.records if record.id // FIRST_IDS_APART == number]
               for number, name in enumerate(names)}  # fmt: skip
    assert names == ["chat", "documents", "dialogs"]
    assert {record.id for record in run.records if record.sent_ns} == set(lines)
    assert {record.http_status for record in classes["chat"]} == {500}
    complete = [record for record in classes["documents"] if record.state == "complete"]
    assert {lines[record.id].model for record in complete} == {"tuned"}
    assert {lines[record.id].prompt_tokens for record in complete} == {300}
    assert {record.turn for record in classes["dialogs"]} == {0, 1, 2}
    assert all(lines[record.id].session for record in classes["dialogs"] if record.sent_ns)
    sessions = sum(not record.turn for record in classes["dialogs"])
    total = len(classes["chat"]) + len(classes["documents"]) + sessions
    assert len(classes["chat"]) / total == pytest.approx(0.6, abs=0.15)
    summary: Any = from_json((tmp_path / "run" / "summary.json").read_bytes())
    assert {part.name: part.requests.sent for part in summary.traffic}["documents"] == len(classes["documents"])
    assert [(each.objective, each.verdict) for each in summary.objectives] == [("chat: failed >= 100%", "pass")]
    assert "3 classes of traffic (chat 60% of the users' load" in " ".join(out.split())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("rate = 5", "[[traffic]] 'chat' has its own load, but in loadgen ui the users are the load"),
        ("weight = 5\ncancel = '5% after 2s'", "[[traffic]] 'chat': loadgen ui cannot use cancel"),
        ("weight = 5\nrat = 2", "[[traffic]] 'chat': rat: unknown setting; did you mean rate?"),
    ],
)
def test_mistakes_name_the_file_and_the_class(tmp_path: Path, table: str, message: str) -> None:
    """The exit code is 2, and Locust is not started."""
    (tmp_path / "plan.toml").write_text(f"server = 'vllm'\nsimulated = true\n[[traffic]]\nname = 'chat'\n{table}\n")
    code, _, err = headless(tmp_path, "plan.toml", "--run-time", "2s")
    assert code == 2
    assert message in err
    assert "plan.toml:" in err


def test_a_setting_that_users_cannot_have_is_refused(tmp_path: Path) -> None:
    """Plan files without classes work too."""
    (tmp_path / "plan.toml").write_text("server = 'vllm'\nwarmup = 3\n")
    code, _, err = headless(tmp_path, "plan.toml", "--run-time", "2s")
    assert (code, "loadgen ui cannot use warmup" in err) == (2, True)
