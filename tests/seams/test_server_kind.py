"""The seam of server kinds: a made-up kind with a protocol of its own, added here alone, is everywhere.

Run as a program, this module is `loadgen` with the made-up kind in the registry.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.errors import PlanError
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import (
    Backend,
    GetJson,
    KnownFault,
    MetricNames,
    ProcessCommand,
    ServerFacts,
    ServerLimit,
    as_dict,
    known_limits,
)
from loadgen.servers.backends.dialect import Answer, Dialect, Route
from loadgen.servers.backends.lenient import end_marker
from loadgen.servers.backends.stream_events import decode_events, finalise, note_finish
from loadgen.servers.discovery import check_limits, endpoint_dialect, probe, resolve
from loadgen.servers.errors import EndpointError, LaunchError, LimitError, UnreachableError, WrongServerError
from loadgen.servers.launch import LaunchSpec, compose, process
from loadgen.servers.launch.spec import LOCAL, known_fault
from loadgen.servers.telemetry import page_values, parse_page
from loadgen.workloads.request import Request

ROOT = Path(__file__).parents[2]


class MadeUpMeta(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int | None = None
    finish_reason: str | None = None


class MadeUpEvent(msgspec.Struct):
    """Each repeats the whole answer so far."""

    text: str = ""
    meta: MadeUpMeta | None = None


EVENTS = msgspec.json.Decoder(MadeUpEvent)


def encode(request: Request, _model: str) -> bytes:
    return msgspec.json.encode({"text": request.prompt, "max_new_tokens": request.output_tokens, "stream": True})


def decode(payloads: Sequence[bytes]) -> Answer:
    events, broken = decode_events(payloads, EVENTS)
    answer, before = Answer([0] * len(payloads)), 0
    for index, event in enumerate(events):
        if event.meta:
            answer.tokens[index], before = event.meta.completion_tokens - before, event.meta.completion_tokens
            answer.prompt_tokens = event.meta.prompt_tokens
            note_finish(answer, event.meta.finish_reason or "", payloads[index])
    answer.end_event = end_marker(payloads)
    return finalise(answer, before, broken)


def text(payloads: Sequence[bytes]) -> str:
    return max((event.text for event in decode_events(payloads, EVENTS)[0]), key=len, default="")


def recognise(ask: GetJson, url: str) -> ServerFacts | None:
    said = as_dict(ask("/get_server_info")[1])
    if "madeup_version" not in said:
        return None
    limits = known_limits(MADE_UP.limits, said)
    return ServerFacts("madeup", url, said["madeup_version"], "tiny", limits, ("/count",))


COUNT = Route("/count", lambda text, _: {"text": text}, lambda answer: int(answer["tokens"]))
MADE_UP = Backend(
    name="madeup",
    title="MadeUp",
    native="generate",
    dialects={
        "generate": Dialect(
            *("madeup", "generate", "/generate"),
            encode=encode,
            decode=decode,
            text=text,
            count=COUNT,
            count_by_running=COUNT,
            fixed_output=True,
        )
    },
    identify=recognise,
    limits={"context_length": ServerLimit("--context-length", "total")},
    port=8099,
    metrics=MetricNames(prefix="madeup:", names={"running": ("madeup:running",)}),
    process=ProcessCommand(
        module=("madeup.serve", "--model", "{model}"),
        arguments=("--host", "{host}", "--port", "{port}"),
        parallel=("--gpus", "{tensor_parallel}"),
    ),
    faults=(KnownFault(r"the (\w+) is too small", "its {0} is too small", "make it larger"),),
    notes={"memory_option": "--share", "memory_taken": "all"},
)


class FakeServer(BaseHTTPRequestHandler):
    """What is made up, as a server."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/get_server_info":
            self.answer(200, "application/json", json.dumps({"madeup_version": "9.1", "context_length": 4096}))
        else:
            self.answer(404, "application/json", "{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        words = len(asked["text"].split())
        if self.path == "/count":
            self.answer(200, "application/json", json.dumps({"tokens": words}))
            return
        events: list[dict[str, Any]] = [
            {"text": " a" * count, "meta": {"completion_tokens": count, "prompt_tokens": words}}
            for count in range(1, asked["max_new_tokens"] + 1)
        ]
        events[-1]["meta"]["finish_reason"] = "length"
        stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self.answer(200, "text/event-stream", f"{stream}data: [DONE]\n\n")

    def answer(self, status: int, kind: str, content: str) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
        self.wfile.write((head + content).encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "madeup", MADE_UP)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the made-up kind."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.02))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def loadgen(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`loadgen ...` where the made-up kind is in the registry from the start."""
    return subprocess.run(
        [sys.executable, __file__, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder), "COLUMNS": "200"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_plan_takes_it_and_its_endpoints() -> None:
    """A run and a matrix may name it; an endpoint that it has not is refused with those that it has."""
    from loadgen.plan import Plan
    from loadgen.studies.matrix import (
        MatrixPlan,  # not above: the program below registers the kind before they are loaded
    )

    assert Plan(server="madeup", n=1).server == "madeup"
    with pytest.raises(PlanError, match="choose 'vllm', 'tgi', 'lightllm', 'sglang', 'tei', 'openai' or 'madeup'"):
        Plan(server="nobody", n=1)
    plan = MatrixPlan(name="x", servers=["madeup"], models=["m"], workloads=[{"name": "burst", "n": 1}])
    assert plan.servers[0].server == "madeup"
    assert endpoint_dialect("madeup", None).path == "/generate"
    with pytest.raises(EndpointError, match="--endpoint chat: madeup has no such endpoint") as caught:
        endpoint_dialect("madeup", "chat")
    assert caught.value.hint == "It has: generate."


def test_it_is_found_and_told_from_others(url: str) -> None:
    """The probe reads its facts, names it where another was expected, and its limits name their options."""
    facts = resolve("madeup", None, {"LOADGEN_MADEUP_URL": url})
    assert facts is not None
    assert (facts.version, facts.title, facts.limits) == ("9.1", "MadeUp", {"context_length": 4096})
    with pytest.raises(WrongServerError, match=r"this is MadeUp 9\.1, not vLLM") as caught:
        probe(url, "vllm")
    assert caught.value.hint == "use --server madeup"
    with pytest.raises(LimitError, match="context_length of 4096") as over:
        check_limits(facts, 1, 4096, 1)
    assert "--context-length" in over.value.hint
    with pytest.raises(UnreachableError, match="no MadeUp answers on port"):
        resolve("madeup", None, {})


def test_it_is_started_and_its_failures_are_known() -> None:
    """Its command comes from its entry, and so do its port and what its log means; TGI has no command."""
    spec = LaunchSpec("madeup", LOCAL, "m", "process", {"python": sys.executable, "tensor_parallel": 2})
    words = process.command_of(spec, "127.0.0.1", 7).words
    assert words[1:] == ("-m", "madeup.serve", "--model", "m", "--host", "127.0.0.1", "--port", "7", "--gpus", "2")
    assert compose.server_url({}, LaunchSpec("madeup", LOCAL, "", "compose")) == "http://127.0.0.1:8099"
    assert known_fault("the cache is too small", "log", "madeup") == ("its cache is too small", "make it larger")
    with pytest.raises(LaunchError, match="cannot be started as a process"):
        process.command_of(LaunchSpec("tgi", LOCAL, "m", "process"), "127.0.0.1", 7)


def test_its_metrics_are_read() -> None:
    """In the common words, also where it is spoken to as a generic server."""
    page = parse_page(b"madeup:running 3\n", ("madeup:",))
    assert page_values(page, "madeup") == page_values(page, "openai") == {"running": 3.0}


def test_the_documentation_has_it() -> None:
    """The generated pages list its endpoint and the names of its metrics."""
    pages = runpy.run_path(str(ROOT / "docs/generate.py"))
    assert "| madeup | **generate** | `/generate` | no | truncated |" in pages["dialects"]()
    assert "`madeup:running`" in pages["telemetry"]()


@pytest.mark.parametrize(
    "command", [("burst", "--help-all"), ("ui", "--help-all"), ("servers", "up", "--help")], ids=" ".join
)
def test_the_command_line_offers_it(command: tuple[str, ...], tmp_path: Path) -> None:
    """`--server` lists it, for runs, for the web page and for starting servers."""
    done = loadgen(tmp_path, *command)
    assert "madeup" in done.stdout, done.stderr


def test_a_burst_is_sent_and_reported(url: str, tmp_path: Path) -> None:
    """Prompts of exact length by its own count, complete answers in its own protocol, its name on the report."""
    sizes = ("--n", "6", "--input-tokens", "12", "--output-tokens", "7")
    done = loadgen(tmp_path, "burst", "--server", "madeup", "--url", url, *sizes, "--out", "run")
    assert done.returncode in (0, 5), done.stderr
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (found["requests"]["complete"], found["tokens"]["output_reported"]) == (6, 42)
    assert (found["server"]["name"], found["server"]["version"]) == ("madeup", "9.1")
    assert found["tokens"]["prompt_reported"] == 72
    page = (tmp_path / "run" / "report.html").read_text()
    assert "madeup" in page.partition("</title>")[0]
    header = json.loads((tmp_path / "run" / "run.jsonl").read_text().partition("\n")[0])
    assert (header["server"]["title"], header["server"]["notes"]["memory_option"]) == ("MadeUp", "--share")


if __name__ == "__main__":
    BACKENDS["madeup"] = MADE_UP
    from loadgen.cli import main

    main()
