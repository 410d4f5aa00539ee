"""Tool calls and JSON from the simulated servers, checked against their schemas and judged by --assert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.servers.simulated.config import FaultRule, SimulatedConfig
from tests.support.command import burst, summary_of
from tests.support.simulated import running

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["days"],
}
CHAT_TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]}
JSON_FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("vllm", "chat", CHAT_TOOLS),
    ("vllm", "chat", JSON_FORMAT),
    ("vllm", "chat", {"guided_json": SCHEMA}),
    ("vllm", "responses", {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}),
    ("vllm", "messages", {"tools": [{"name": "weather", "input_schema": SCHEMA}]}),
    ("sglang", "chat", CHAT_TOOLS),
    ("openai", "chat", CHAT_TOOLS),
]


@pytest.mark.parametrize(("server", "endpoint", "body"), CASES)
def test_outputs_are_checked(tmp_path: Path, server: str, endpoint: str, body: dict[str, Any]) -> None:
    """One response is cut, and one does not fit its schema. All are complete, and every token of a call counts."""
    imitated = "vllm" if server == "openai" else server
    faults = (FaultRule("invalid-json", requests=frozenset({6})), FaultRule("wrong-json", requests=frozenset({7})))
    config = SimulatedConfig(
        server=imitated, ttft_s=0.02, itl_s=0.001, structured=True, reasoning_tokens=3, faults=faults
    )
    with running(config) as simulated:
        where = ("--server", server, "--endpoint", endpoint, "--url", simulated.url, "--extra-body", json.dumps(body))
        load = ("--n", "8", "--input-tokens", "16", "--output-tokens", "max:64", "--metrics-every", "0")
        judged = ("--assert", "valid_output >= 99%", "--assert", "valid_output >= 50%")
        code, out, err = burst(tmp_path, *where, *load, *judged)
    assert code in (4, 5), (out, err)  # 5: this machine is busy
    summary = summary_of(tmp_path)
    assert summary["requests"]["complete"] == 8, summary["requests"]
    outputs = summary["outputs"]
    assert (outputs["checked"], outputs["valid"], outputs["unchecked"], outputs["uncalled"]) == (8, 6, 0, 0)
    assert sorted(outputs["errors"].values()) == [1, 1]  # type: ignore[attr-defined]
    assert [each["verdict"] for each in summary["objectives"]] == ["fail", "pass"]  # type: ignore[index]
    assert "6 of 8 responses with a tool call or JSON are valid (75%" in " ".join(out.split())
    assert summary["tokens"]["reasoning"] == 8 * 3


def test_a_run_without_schemas_has_no_valid_outputs(tmp_path: Path) -> None:
    """An objective on them fails, because the run does not have the figure."""
    with running(SimulatedConfig(server="vllm", ttft_s=0.01, itl_s=0.001)) as simulated:
        where = ("--server", "vllm", "--url", simulated.url, "--metrics-every", "0", "--assert", "valid_output > 1%")
        code, out, err = burst(tmp_path, *where, "--n", "2", "--input-tokens", "16", "--output-tokens", "4")
    assert code in (4, 5), (out, err)
    assert "outputs" not in summary_of(tmp_path)
