"""Whole requests of a file in an interactive session."""

from pathlib import Path
from typing import Any, cast

from loadgen.engine.prepare import with_file_endpoint
from loadgen.interactive.live_run import LiveTarget
from loadgen.plan import Plan
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import ServerFacts
from loadgen.workloads.raw_requests import RawRequests
from loadgen.workloads.request import Request


def test_each_request_has_its_own_body_and_dialect(tmp_path: Path) -> None:
    """The path of a line chooses the dialect, and a body that states `stream` stays as it is."""
    file = tmp_path / "log.jsonl"
    file.write_text('{"body": {"messages": [], "stream": false}}\n{"body": {"prompt": "a"}}\n')
    plan = with_file_endpoint(Plan(server="vllm", workload=f"requests:{file}"))
    target = LiveTarget(plan, ServerFacts("vllm", "http://a", model="m"), *cast("Any", (None, None, print)))
    chat = BACKENDS["vllm"].dialects["chat"]
    assert plan.endpoint == "chat"
    source = plan.prompt_source
    assert isinstance(source, RawRequests)
    results = [target.encoded(entry.request, chat) for entry in source.entries()]
    assert [(body, dialect.endpoint, dialect.streams) for body, dialect in results] == [
        (b'{"messages": [], "stream": false}', "chat", False),
        (b'{"prompt": "a","stream":true,"stream_options":{"include_usage":true}}', "completions", True),
    ]
    body, dialect = target.encoded(Request(0, "hi", 1, 2, model="other"), chat)
    assert dialect is chat
    assert b'"other"' in body
