"""What a user adds to each request, end to end: headers, fields of the body, answers that may end by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, accounted, burst, summary_of
from tests.support.simulated import running
from tests.support.stub_server import VLLM, answering

CHUNK = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop","token_ids":[5]}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":1}}\n\ndata: [DONE]\n\n'


def short(_: Any) -> bytes:
    """An answer of one token, whatever was asked."""
    return CHUNK + USAGE


def test_headers_go_with_every_question_and_their_secrets_into_no_file(tmp_path: Path) -> None:
    """The probe, the count, the load and the metrics all pass a gate; the run can be repeated from what it kept."""
    with running(SimulatedConfig(server="vllm", api_key="hunter2", **FAST)) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--n", "3", "--output-tokens", "4"]
        burst(tmp_path, *common, "--header", "Authorization: Bearer hunter2", report=True)
        assert accounted(tmp_path, 3) == {"complete": 3}
        assert all(b"hunter2" not in path.read_bytes() for path in (tmp_path / "run").iterdir())
        header = runfile.read(tmp_path / "run").header
        again = header.command[header.command.index("burst") :]
        assert "Authorization: $AUTHORIZATION" in again
        code, _, err = burst(tmp_path, *again[3:], "--out", str(tmp_path / "again"))
        assert (code, "$AUTHORIZATION is not set" in err) == (2, True)
        again[again.index(str(tmp_path / "run"))] = str(tmp_path / "again")
        burst(tmp_path, *again[1:], AUTHORIZATION="Bearer hunter2")
    assert runfile.read(tmp_path / "again").footer.complete == 3  # type: ignore[union-attr]


def test_secret_fields_reach_the_server_and_no_file(tmp_path: Path) -> None:
    """A literal secret and one from the environment are sent, but not stored. The recorded command repeats the run."""
    extra = json.dumps({"user": "me", "api_key": "literal-secret", "metadata": {"token": "$BODY_TOKEN"}})
    with answering(VLLM | {"POST /v1/completions": short}) as stub:
        common = ["--server", "vllm", "--url", stub.url, "--n", "2", "--output-tokens", "1", "--input-tokens", "4"]
        secret = {"BODY_TOKEN": "secret-of-environment"}
        _, out, err = burst(tmp_path, *common, "--extra-body", extra, report=True, **secret)
        sent = [body for body in stub.bodies if body and body.get("stream")]
        again = runfile.read(tmp_path / "run").header.command[2:]
        again[again.index(str(tmp_path / "run"))] = str(tmp_path / "again")
        code, _, complaint = burst(tmp_path, *again, **secret)
        assert (code, "--extra-body api_key: $API_KEY is not set" in complaint) == (2, True), complaint
        stub.bodies.clear()
        burst(tmp_path, *again, API_KEY="literal-secret", **secret)
        sent_again = [body for body in stub.bodies if body and body.get("stream")]
    assert len(sent) == len(sent_again) == 3  # with the request for one token before the run
    for body in (*sent, *sent_again):
        assert (body["api_key"], body["metadata"]) == ("literal-secret", {"token": "secret-of-environment"})
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").iterdir()) + (out + err).encode()
    assert b"literal-secret" not in written
    assert b"secret-of-environment" not in written


def test_fields_of_the_plan_and_of_the_file_reach_the_server(tmp_path: Path) -> None:
    """Those of a line win over those of all; what the tool decides stands; the plan has them."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a", "body": {"temperature": 0.9, "lora": "x"}}, {"prompt": "b"}]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with answering(VLLM | {"POST /v1/completions": short}) as stub:
        common = ["--server", "vllm", "--url", stub.url, "--n", "2", "--output-tokens", "8", "--quiet"]
        extra = '{"temperature": 0.7, "stream_options": {"continuous_usage_stats": true}, "return_token_ids": null}'
        more = ["--workload", f"jsonl:{file}", "--extra-body", extra, "--no-ignore-eos"]
        _, _, err = burst(tmp_path, *common, *more, command="run")
    streamed = (body for body in stub.bodies if body and body.get("stream") and body["prompt"] != "Hello")
    sent = sorted(streamed, key=lambda body: body["prompt"])
    rest = {
        "model": "tiny",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert sent == [
        rest | {"prompt": "a", "temperature": 0.9, "lora": "x"},
        rest | {"prompt": "b", "temperature": 0.7},
    ], err
    assert runfile.read(tmp_path / "run").header.plan["extra_body"] == json.loads(extra)


def test_an_answer_that_ends_by_itself_is_complete_where_it_may(tmp_path: Path) -> None:
    """With --no-ignore-eos one token of eight is complete; held to its length the server has truncated it."""
    for name, more, state in (("held", [], "truncated"), ("free", ["--no-ignore-eos"], "complete")):
        with answering(VLLM | {"POST /v1/completions": short}) as stub:
            common = ["--server", "vllm", "--url", stub.url, "--n", "2", "--output-tokens", "8", "--quiet"]
            (tmp_path / name).mkdir()
            burst(tmp_path / name, *common, *more)
        assert summary_of(tmp_path / name)["requests"][state] == 2
        assert runfile.read(tmp_path / name / "run").header.plan["ignore_eos"] is not bool(more)


def test_pictures_reach_a_chat_and_nothing_else(tmp_path: Path) -> None:
    """Synthetic ones beside those of the file; on another endpoint they are refused before anything is sent."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "What?", "image": "https://x/y.png"}\n')
    answer = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"length","token_ids":[5]}]}\n\n'
    routes = VLLM | {"POST /v1/chat/completions": lambda _: answer + USAGE, "POST /v1/completions": short}
    options = ["--n", "1", "--output-tokens", "1", "--workload", f"jsonl:{file}", "--image", "32x16"]
    with answering(routes) as stub:
        common = ["--server", "vllm", "--url", stub.url, *options]
        code, out, err = burst(tmp_path, *common, "--endpoint", "chat", command="run")
        _, body = [body for body in stub.bodies if body and body.get("stream")]
        refused, _, said = burst(tmp_path, *common, "--out", str(tmp_path / "other"), command="run")
    assert code in (0, 5), err
    text, first, second = body["messages"][0]["content"]
    assert (text["text"], first["image_url"]["url"]) == ("What?", "https://x/y.png")
    assert second["image_url"]["url"].startswith("data:image/png;base64,")
    assert "Prompt lengths not known beforehand" in " ".join(out.split())
    assert runfile.read(tmp_path / "run").header.plan["image"] == ["32x16"]
    assert (refused, "only chat messages" in said) == (2, True)
