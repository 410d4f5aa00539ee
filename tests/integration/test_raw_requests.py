"""Requests that are sent as a file has them: their bytes at a socket, their times, and what is reported about them."""

import json
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import burst, in_process
from tests.support.plain_openai import Talk, plain_openai
from tests.support.simulated import running

ADDED = b',"stream":true,"stream_options":{"include_usage":true}}'
FAST = {"ttft_s": 0.002, "itl_s": 0.001}


def test_bodies_arrive_byte_for_byte(tmp_path: Path) -> None:
    """Read at a socket, each body is that of the file, apart from the two fields that are added and reported once.
    Headers of a line are sent, and win over loadgen's in any spelling."""
    bodies = [
        '{ "max_tokens":2,  "messages":[{"role":"user","content":"  é\\u00e9 "}],"tools":[{"type":"x"}], "model":"m"}',
        '{"stream":true,"stream_options":{"include_usage":true},"messages":[],"b":1,"a":2,"b":3}',
    ]
    headers = '{"x-REQUEST-id": "mine", "X-Tenant": "a"}'
    lines = [
        f'{{"body": {bodies[0]}, "url": "/v1/chat/completions", "headers": {headers}}}',
        f'{{"custom_id": "1", "method": "POST", "body": {bodies[1]}}}',
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    with plain_openai(Talk.stream) as server:
        code, out, _ = burst(
            tmp_path, "--server", "openai", "--url", server.url, "--workload", "requests:log.jsonl",
            "--arrivals", "closed:1", "--metrics-every", "0", command="run",
        )  # fmt: skip
    assert code in (0, 5), out
    received = [request.split(b"\r\n\r\n", 1) for _, request in server.requests]
    assert [body for _, body in received] == [bodies[0][:-1].encode() + ADDED, bodies[1].encode()]
    assert b"\r\nx-REQUEST-id: mine\r\n" in received[0][0]
    assert b"X-Tenant: a" in received[0][0]
    assert received[0][0].lower().count(b"x-request-id") == 1
    assert received[0][0].startswith(b"POST /v1/chat/completions HTTP/1.1")
    assert out.count("are sent as they are") == 1
    assert "`stream` is added to 1 of 2" in out


def test_times_paths_and_sessions_of_the_file_are_kept(tmp_path: Path) -> None:
    """Requests are due at the times in the file, each response is read by the dialect of its path, and a session sends
    its next request after the end of the previous response."""
    rows = [
        {"body": {"prompt": "a b", "max_tokens": 5, "model": "m"}, "at": 7.0, "session": "x"},
        {"body": {"messages": [{"role": "user", "content": "c"}], "max_tokens": 4}, "at": 7.1, "session": "y"},
        {"body": {"prompt": "d", "max_tokens": 3, "stream": False}, "at": 7.15, "session": "x"},
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with running(SimulatedConfig(server="vllm", model="m", **FAST)) as simulated:
        code, out, _ = burst(tmp_path, "--url", simulated.url, "--workload", "requests:log.jsonl", command="run")
    assert code in (0, 5), out
    records = {record.id: record for record in runfile.read(tmp_path / "run").records}
    assert {number: record.state for number, record in records.items()} == dict.fromkeys(range(3), "complete")
    first, following, other = (records[number] for number in range(3))
    assert (first.session, following.session, other.session) == (0, 0, 2)
    assert (first.due_ns, other.due_ns) == (0, 100_000_000)
    assert following.due_ns == max(150_000_000, following.due_ns)
    assert [len(record.chunk_ns) for record in (first, following, other)] == [5, 0, 4]
    assert (following.output_tokens, following.counted_by) == (3, "server")
    assert "1 of 3 responses are not streamed" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--extra-body", '{"a": 1}'), "--extra-body"),
        (("--output-tokens", "5"), "--output-tokens"),
        (("--path", "v1"), "--path v1: must begin with /"),
    ],
)
def test_options_that_would_change_a_body_are_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    """Nothing is sent, and the message names the option."""
    (tmp_path / "log.jsonl").write_text('{"body": {"prompt": "a"}}\n')
    code, _, err = in_process(
        tmp_path, "run", "--server", "vllm", "--simulated", "--workload", "requests:log.jsonl", *options
    )  # fmt: skip
    assert code == 2
    assert message in err


def test_an_unknown_path_is_refused_unless_an_endpoint_is_named(tmp_path: Path) -> None:
    """Without --endpoint nobody knows how to read the response. The simulated server answers 404 to the path."""
    (tmp_path / "log.jsonl").write_text('{"body": {"prompt": "a"}, "url": "/v2/made-up"}\n')
    arguments = ("run", "--server", "vllm", "--simulated", "--workload", "requests:log.jsonl")
    code, _, err = in_process(tmp_path, *arguments)
    assert code == 2
    assert "/v2/made-up is not the path of an endpoint of vllm" in err
    assert "--endpoint" in err
    code, _, _ = burst(tmp_path, *arguments[1:], "--endpoint", "completions", command="run")
    assert code != 2
    (record,) = runfile.read(tmp_path / "run").records
    assert (record.state, record.http_status) == ("failed", 404)


def test_a_burst_ignores_the_times_of_a_file_and_times_that_end_are_no_lost_requests(tmp_path: Path) -> None:
    """`loadgen burst` sends all requests at once. A run of more requests than the file has times is refused."""
    lines = (f'{{"body": {{"prompt": "a", "max_tokens": 2}}, "at": {at}}}' for at in (0, 9))
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    arguments = ("--server", "vllm", "--simulated", "--workload", "requests:log.jsonl")
    code, out, _ = burst(tmp_path, *arguments)
    assert code in (0, 5), out
    assert [record.due_ns for record in runfile.read(tmp_path / "run").records] == [0, 0]
    code, _, err = in_process(tmp_path, "run", *arguments, "-n", "3", "--repeat-file")
    assert code == 2
    assert "holds the times of only 2 prompts, but the plan needs 3" in err
