"""Files of whole requests: what their lines mean, and how mistakes in them are reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.load_shorthand import expand
from loadgen.workloads import arrivals, raw_requests, workload
from loadgen.workloads.raw_requests import RawRequests
from loadgen.workloads.spec_syntax import NS_PER_S, WorkloadError
from loadgen.workloads.workload import Prompts, WorkloadSpec

CHAT = '{ "max_tokens":8,  "messages":[{"role":"user","content":" hi "}], "model": "m"}'


def file_of(folder: Path, *lines: str) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_body_keeps_its_bytes(tmp_path: Path) -> None:
    """White space, the order of keys and repeated keys are those of the file."""
    bodies = [CHAT, '{"b":1,"a":2,"b":3}', '{"prompt":"\\u00e9 é","x":1.50}']
    path = file_of(tmp_path, *(f'  {{"body": {body} }}  ' for body in bodies))
    assert [entry.request.raw.decode() for entry in raw_requests.read(path)] == bodies


@pytest.mark.parametrize(
    ("line", "path", "tokens", "model"),
    [
        ({"body": {"messages": [], "max_tokens": 8, "model": "m"}}, "/v1/chat/completions", 8, "m"),
        ({"body": {"prompt": "a", "max_completion_tokens": 9}}, "/v1/completions", 9, ""),
        ({"body": {"inputs": "a", "parameters": {"max_new_tokens": 4}}}, "", 4, ""),
        ({"body": {"prompt": "a", "max_tokens": 8, "stream": False}}, "/v1/completions", 0, ""),
        ({"body": {"prompt": "a"}, "url": "/x?y=1"}, "/x?y=1", 0, ""),
        (
            {"custom_id": "7", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}},
            "/v1/embeddings",
            0,
            "",
        ),
    ],
)
def test_a_line_is_a_request(tmp_path: Path, line: dict[str, Any], path: str, tokens: int, model: str) -> None:
    """Path, model and maximum output length come from the line, also from a line of OpenAI's batch API."""
    (entry,) = RawRequests(file_of(tmp_path, json.dumps(line))).entries()
    assert (entry.request.path, entry.request.output_tokens, entry.request.model) == (path, tokens, model)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "wrong field"),
        ("{}", "missing required field `body`"),
        ('{"body": 3}', '"body" is not a JSON object'),
        ('{"body": {"prompt": "a", "echo": true}}', '"echo" makes the response begin with the prompt'),
        ('{"body": {"prompt": "a", "n": 2}}', '"n" is 2, but a request has one response'),
        ('{"body": {"text": "a", "sampling_params": {"n": 3}}}', '"n" is 3, but a request has one response'),
        ('{"body": "text"}', '"body" is not a JSON object'),
        ('{"body": {}, "bdy": 1}', "unknown field `bdy`"),
        ('{"body": {}, "url": 3}', "wrong field"),
        ('{"body": {}, "url": "http://a/v1"}', "is not a path"),
        ('{"body": {}, "url": "/a b"}', "is not a path"),
        ('{"body": {}, "method": "GET"}', "wrong field"),
        ('{"body": {}, "headers": ["a"]}', "wrong field"),
        ('{"body": {}, "headers": {"A": 1}}', "wrong field"),
        ('{"body": {}, "headers": {"A": "b\\nc"}}', "header 'A' cannot be sent"),
        ('{"body": {}, "headers": {"Content-length": "1"}}', "cannot be set"),
        ('{"body": {}, "at": "1"}', "wrong field"),
        ('{"body": {}, "at": -1}', "not a time in seconds"),
        ('{"body": {}, "session": 1.5}', "wrong field"),
        ('{"body": {}, "session": ""}', "0 characters"),
        ('{"body": {}, "custom_id": 1}', "wrong field"),
    ],
)
def test_a_mistake_is_reported_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    """The message names the file and the line, and the hint says what to do. No line is skipped."""
    path = file_of(tmp_path, "", '{"body": {}}' if "at" not in line else '{"body": {}, "at": 0}', line)
    with pytest.raises(WorkloadError, match=r"requests\.jsonl, line 3: ") as caught:
        list(raw_requests.read(path))
    assert message in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"at": 0}, {}, 'has no "at", but the first line has one'),
        ({}, {"at": 1}, 'has an "at", but the first line has none'),
        ({"at": 2}, {"at": 1}, '"at" is before'),
        ({}, {"session": "a"}, "the first line has none"),
    ],
)
def test_lines_that_contradict_each_other_are_refused(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    """All lines have a time or none has one, times do not decrease, and sessions show in the first line."""
    path = file_of(tmp_path, *(json.dumps({"body": {}} | fields) for fields in (first, second)))
    with pytest.raises(WorkloadError, match="line 2") as caught:
        list(raw_requests.read(path))
    assert message in str(caught.value)


def test_sessions_are_sent_one_request_after_the_other(tmp_path: Path) -> None:
    """Requests of a session follow each other, however their lines are mixed. A line without a name stands alone."""
    rows = [("a", 10.0), ("b", 10.5), (None, 11.0), ("a", 12.0), ("a", 12.0)]
    lines = [
        json.dumps({"body": {"prompt": str(number)}, "at": at} | ({"session": name} if name else {}))
        for number, (name, at) in enumerate(rows)
    ]
    path = file_of(tmp_path, *lines)
    settings = expand({"workload": f"requests:{path}"})
    assert settings["workload"] == f"requests:{path},sessions=yes"
    times = arrivals.parse(settings["arrivals"])
    assert [*times.due_ns(0)] == [0, NS_PER_S // 2, NS_PER_S]
    source = workload.parse(settings["workload"])
    assert isinstance(source, RawRequests)
    source = RawRequests(source.path, sessions=True, recorded_times=True)
    spec = WorkloadSpec(source, None, None, 0, None)  # type: ignore[arg-type]
    first, second, third = Prompts(spec, lambda *_: "", len).conversations()
    assert [request.id for request in (first.request(), *first.remaining_requests())] == [0, 1, 2]
    assert [request.raw for request in (first.request(), *first.remaining_requests())] == [
        b'{"prompt": "%d"}' % number for number in (0, 3, 4)
    ]
    assert (second.request().id, third.request().id, third.after("")) == (3, 4, None)
    following = first.after("answer")
    assert following is not None
    assert following.due_after(NS_PER_S) == 2 * NS_PER_S
    assert following.due_after(3 * NS_PER_S) == 3 * NS_PER_S


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "at:{path}"),
        ({"arrivals": "burst"}, "burst"),
        ({"rate": 5}, "poisson:5"),
        ({"concurrency": 2}, "closed:2"),
        ({"duration_s": 9}, "at:{path}"),
    ],
)
def test_a_load_that_the_user_states_wins(tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    """The times in the file decide only if no option says when to send."""
    path = file_of(tmp_path, '{"body": {}, "at": 3}')
    result = expand({"workload": f"requests:{path}"} | settings)
    assert result["arrivals"] == expected.format(path=path)
