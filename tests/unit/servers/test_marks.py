"""The mark of a simulated server: where it is found, and where words that look like it are not taken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis import format as said
from loadgen.analysis.run import runfile
from loadgen.analysis.run.runfile import Telemetry
from loadgen.cli import twin
from loadgen.engine.resolve_server import simulated_name
from loadgen.errors import PlanError
from loadgen.servers import marks
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.marks import Mark
from tests.support.answers import Key, recorded, whole
from tests.support.runs import complete, footer, header, healthy, summarise, typed, write

MS = 1_000_000
VLLM: Key = ("vllm", "completions")


@pytest.mark.parametrize(
    ("value", "mark"),
    [
        ({"simulated_speed": 5.0}, Mark(5.0)),
        ([{"generated_text": "a", "simulated_speed": 0.5}], Mark(0.5)),
        ({"object": "list", "data": [{"id": "m", "simulated_speed": 2}]}, Mark(2.0)),
        ({"id": "cmpl-simulated-x5-0000000100000002"}, Mark(5.0)),
        ({"id": "simulated-x2.5-8"}, Mark(2.5)),
        ({"id": "", "system_fingerprint": "3.3.6-dev0-simulated-x1e-05"}, Mark(1e-05)),
        ({"docker_label": "simulated-x1"}, Mark(1.0)),
        ({"id": "chatcmpl-simulated-77"}, Mark(None)),
        ({"simulated_speed": "fast"}, Mark(None)),
        ({"simulated_speed": 0}, Mark(None)),
    ],
)
def test_every_form_of_the_mark_is_found(value: Any, mark: Mark) -> None:
    """Fields, model cards, ids, fingerprints and labels; a speed that cannot be one is unknown."""
    assert marks.in_value(value) == mark


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [5],
        {},
        {"data": []},
        {"data": ["simulated-x5"]},
        {"object": "list", "data": [{"id": "simulated-x5-model", "owned_by": "vllm"}]},
        {"model": "simulated-x5", "choices": [{"text": "simulated-x5"}]},
        {"id": "cmpl-unsimulated-x5", "system_fingerprint": "simulatedx5"},
        {"id": 5, "system_fingerprint": None},
    ],
)
def test_other_words_are_no_mark(value: Any) -> None:
    """Names of models and texts of answers belong to the user, and a real server may say them."""
    assert marks.in_value(value) is None


def test_the_mark_of_a_head_is_found_however_it_is_written() -> None:
    """Gateways may change the case of a header's name."""
    assert marks.in_head(b"HTTP/1.1 200 OK\r\nserver: x\r\nX-Simulated-Speed:  5\r\nvia: y") == Mark(5.0)
    assert marks.in_head(b"HTTP/1.1 200 OK\r\nserver: x-simulated-speed\r\nx-simulated-speedy: 5") is None
    assert marks.in_header(None) is None


def test_a_payload_may_be_anything() -> None:
    """Bytes that are no JSON hold no mark."""
    assert marks.in_payload(b'{"id":"cmpl-simulated-x5-1"}') == Mark(5.0)
    assert marks.in_payload(b"simulated-x5") is None
    assert marks.in_payload(b"[DONE]") is None


def test_one_response_per_sample_is_looked_at() -> None:
    """The worker's health says what the first response showed. A response without a mark says nothing."""
    marked = [event.replace('{"', '{"id":"cmpl-simulated-x5-1","', 1) for event in whole(VLLM)[:-1]]
    _, health = recorded(VLLM, *marked, "[DONE]")
    assert (health["simulated"], health["simulated_speed"]) == (True, 5.0)
    _, health = recorded(VLLM, *whole(VLLM))
    assert "simulated" not in health


def run_of(folder: Path, values: dict[str, Any] | None, **facts: Any) -> runfile.Run:
    """A run whose probe saw a real server, and one of whose workers found this."""
    records = [complete(1, [500 * MS, 600 * MS]), complete(2, [500 * MS, 600 * MS])]
    start = header(2, server="vllm")
    start.server |= {"notes": {}, **facts}
    lines: list[Any] = [start, *records, *healthy(), footer(records)]
    if values is not None:
        lines.insert(1, Telemetry(source="client", at_ns=5, values=values))
    return runfile.read(write(folder, lines))


@pytest.mark.parametrize(
    ("values", "mark"),
    [
        (None, ""),
        ({"simulated": True, "simulated_speed": 1.0}, "SIMULATED"),
        ({"simulated": True, "simulated_speed": 5.0}, "SIMULATED at 5 times speed"),
        ({"simulated": True}, "SIMULATED at unknown speed"),
    ],
)
def test_a_run_is_marked_by_what_its_workers_found(values: dict[str, Any] | None, mark: str, tmp_path: Path) -> None:
    """The probe took the server for a real one. Every report of the run says otherwise, with the speed or without."""
    summary = typed(summarise(run_of(tmp_path / "run", values)))
    assert said.simulated(summary) == mark
    assert said.knows_speed(summary) == (mark != "SIMULATED at unknown speed")


def test_the_probes_own_finding_stays(tmp_path: Path) -> None:
    """It knows more: the speed and the hardware."""
    run = run_of(tmp_path / "run", {"simulated": True}, simulated=True, speed=2.0)
    assert run.header.server["speed"] == 2.0


@pytest.mark.parametrize(("values", "words"), [({"simulated": True}, "unknown speed"), (
    {"simulated": True, "simulated_speed": 5.0}, "5 times real time")])  # fmt: skip
def test_no_twin_is_fitted_to_it(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A twin is of real time, also where only the responses told that the server is simulated."""
    path = run_of(tmp_path / "run", values).path
    with pytest.raises(PlanError, match=words):
        twin._read(path)


def test_an_unknown_speed_is_said_so() -> None:
    """In the line that names the server before a run."""
    facts = ServerFacts("vllm", "http://h", simulated=True)
    assert simulated_name(facts) == "SIMULATED vllm at unknown speed"
