"""`loadgen anonymise`: the trace has the log's lengths, times, sessions and shared beginnings, and no text of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from loadgen.workloads.session_files import SessionFile
from loadgen.workloads.session_graph import TraceSession
from tests.support.command import in_process
from tests.support.tiny_tokenizers import save

S = 1_000_000_000
SYSTEM = "You advise the clients of Northwind Savings and never reveal the passphrase marzipan-elephant-77. " * 8
QUESTION = "My name is Wilhelmina Farquharson, what did I spend at Kettleworth Bakery?"
ANSWER = "Wilhelmina, you spent 48 pounds at Kettleworth Bakery on Tuesday."
FOLLOW_UP = "Then transfer the same amount to Bartholomew, please."
TOOL = {
    "type": "function",
    "function": {"name": "lookup_ledger_entries", "parameters": {"type": "object", "title": "LedgerQueryForm"}},
}
FIRST = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
SECOND = [*FIRST, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": FOLLOW_UP}]
MODEL = "/srv/models/wilhelmina/secret-llama-9b"
SECRETS = [
    *(SYSTEM, QUESTION, ANSWER, FOLLOW_UP, MODEL, json.dumps(TOOL)),
    "chatcmpl-7f3e9ab2c1d0",
    "sess-northwind-00417",
    "sk-verysecretkey1234567890",
    "farquharson@example.com",
    "203.0.113.77:4096",
    "Bearer abcdefghijklmnop",
]
"""Everything in the logs of this module that must not be in a trace."""


def litellm_rows() -> list[dict[str, Any]]:
    """Return two requests of a session, one outside it, and three that are not replayed."""
    payload = {
        **{"id": "chatcmpl-7f3e9ab2c1d0", "trace_id": "sess-northwind-00417", "call_type": "acompletion"},
        **{"status": "success", "startTime": 1_790_000_000.25, "endTime": 1_790_000_002.25, "prompt_tokens": 200},
        **{"completion_tokens": 40, "model": MODEL, "api_base": "http://203.0.113.77:4096/v1", "messages": FIRST},
        **{"end_user": "farquharson@example.com", "metadata": {"user_api_key_hash": "sk-verysecretkey1234567890"}},
        **{"model_parameters": {"tools": [TOOL], "extra_headers": {"Authorization": "Bearer abcdefghijklmnop"}}},
        **{"response": {"choices": [{"message": {"role": "assistant", "content": ANSWER}}]}, "cache_hit": False},
    }
    later = {"startTime": 1_790_000_005.5, "endTime": 1_790_000_006.0, "prompt_tokens": 240, "messages": SECOND}
    alone = {"startTime": 1_790_000_001.0, "endTime": 1_790_000_009.0, "trace_id": None, "prompt_tokens": 180}
    return [
        payload,
        payload | alone | {"id": "chatcmpl-b", "messages": FIRST[:1]},
        payload | later | {"id": "chatcmpl-c"},
        payload | {"id": "chatcmpl-d", "status": "failure"},
        payload | {"id": "chatcmpl-e", "cache_hit": "True"},
        payload | {"id": "chatcmpl-f", "call_type": "aembedding"},
    ]


def attributes(**values: Any) -> list[dict[str, Any]]:
    return [
        {
            "key": key.replace("__", "."),
            "value": {"intValue": f"{value}"} if isinstance(value, int) else {"stringValue": value},
        }
        for key, value in values.items()
    ]


def parts(messages: list[dict[str, Any]]) -> str:
    return json.dumps(
        [{"role": entry["role"], "parts": [{"type": "text", "content": entry["content"]}]} for entry in messages]
    )


def otel_rows(*, text: bool = True) -> list[dict[str, Any]]:
    """Return the two requests of a conversation, a tool between them, and a span of an HTTP client."""

    def span(number: int, operation: str, start_s: float, end_s: float, **values: Any) -> dict[str, Any]:
        times = {"startTimeUnixNano": f"{round(start_s * S)}", "endTimeUnixNano": f"{round(end_s * S)}"}
        named = {"gen_ai__operation__name": operation} if operation else {"http__url": "http://203.0.113.77:4096/"}
        return {"traceId": "t" * 32, "spanId": f"{number:016x}", **times, "attributes": attributes(**named, **values)}

    def chat(number: int, start_s: float, tokens: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {
            "gen_ai__conversation__id": "sess-northwind-00417",
            "gen_ai__request__model": MODEL,
            "gen_ai__usage__input_tokens": tokens,
            "gen_ai__usage__output_tokens": 40,
            "user__email": "farquharson@example.com",
        }
        if text:
            system = json.dumps([{"type": "text", "content": SYSTEM}])
            tools = json.dumps([{"type": "function", "name": "lookup_ledger_entries", "parameters": {}}])
            values |= {"gen_ai__input__messages": parts(messages), "gen_ai__system_instructions": system}
            values |= {"gen_ai__tool__definitions": tools}
        return span(number, "chat", start_s, start_s + 2, **values)

    spans = [
        chat(1, 1_790_000_000, 200, FIRST[1:]),
        span(2, "execute_tool", 1_790_000_002.5, 1_790_000_004, gen_ai__tool__name="lookup_ledger_entries"),
        span(3, "", 1_790_000_000, 1_790_000_001),
        chat(4, 1_790_000_005, 240, SECOND[1:]),
    ]
    return [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}]


def request_rows() -> list[dict[str, Any]]:
    """Return two requests of a session with times, and one for embeddings."""
    body = {"model": MODEL, "messages": FIRST, "tools": [TOOL], "max_tokens": 40, "user": "farquharson@example.com"}
    headers = {"Authorization": "Bearer abcdefghijklmnop", "X-Key": "sk-verysecretkey1234567890"}
    line = {"custom_id": "chatcmpl-7f3e9ab2c1d0", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return [
        line | {"at": 3.0, "session": "sess-northwind-00417", "headers": headers},
        line | {"at": 3.5, "url": "/v1/embeddings", "body": {"model": MODEL, "input": QUESTION}},
        line | {"at": 7.25, "session": "sess-northwind-00417", "body": body | {"messages": SECOND}},
    ]


def vllm_lines() -> str:
    """Return a log with two requests in the old form, one in the new form, and one without a prompt."""
    head = "(APIServer pid=7) INFO 12-31 23:59:59 [logger.py:40] "
    settings = "params: SamplingParams(n=1, temperature=0.0, max_tokens=8180)"
    rest = "prompt_embeds shape: None, lora_request: None."
    prompts = [SYSTEM + QUESTION, SYSTEM + FOLLOW_UP]
    debug = head.replace("INFO", "DEBUG").replace("12-31 23:59:59", "01-01 00:00:01")
    info = debug.replace("DEBUG", "INFO")
    ids = list(range(100))
    return "\n".join(
        [
            "INFO:     Started server process [7]",
            "INFO 12-31 23:59:50 [api_server.py:1] args: Namespace(api_key='sk-verysecretkey1234567890')",
            f"{head}Received request chatcmpl-1: prompt: {prompts[0]!r}, {settings}, prompt_token_ids: None, {rest}",
            f"{head}Received request chatcmpl-2: prompt: {prompts[1]!r}, {settings}, prompt_token_ids: None, {rest}",
            f"{head}Generated response chatcmpl-2 (streaming delta): output: 'Wil', output_token_ids: [1], "
            "finish_reason: None",
            f"{head}Generated response chatcmpl-2 (streaming delta) details: output_token_ids: [8, 9]",
            f"{head}Generated response chatcmpl-2 (streaming delta): output: 'hel', finish_reason: None",
            f"{head}Generated response chatcmpl-2 (streaming complete) details: output_token_ids: None",
            f"{head}Generated response chatcmpl-2 (streaming complete): output: 'Wilhel', finish_reason: stop",
            f"{head}Generated response chatcmpl-1: output: {ANSWER!r}, output_token_ids: [5, 6, 7], "
            "finish_reason: stop",
            'INFO:     203.0.113.77:4096 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
            f"{debug}Request chatcmpl-3 details: prompt: {prompts[0]!r}, prompt_token_ids: {ids}, {rest}",
            f"{info}Received request chatcmpl-3: {settings}, lora_request: None.",
            f"{info}Generated response chatcmpl-3 (streaming complete): output: '<streaming_complete: 9 tokens>', "
            "finish_reason: streaming_complete",
            f"{info}Received request chatcmpl-4: {settings}, lora_request: None.",
            f"{info}Received request tokenize-5: params: None, lora_request: None.",
        ]
    )


def log_text(name: str) -> str:
    if name == "vllm":
        return vllm_lines() + "\n"
    rows = {"litellm": litellm_rows, "opentelemetry": otel_rows, "requests": request_rows}[name]()
    return "".join(json.dumps(row) + "\n" for row in rows)


def anonymised(folder: Path, text: str, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what the command reports as JSON, and the lines of the trace, which loadgen can read as sessions."""
    (folder / "log").write_text(text)
    code, out, err = in_process(folder, "anonymise", "log", "--json", *options)
    assert code == 0, err
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert len(sessions_of(folder)) == len(lines)
    report: dict[str, Any] = json.loads(out)
    return report, lines


def sessions_of(folder: Path) -> list[TraceSession]:
    return list(SessionFile(folder / "trace.jsonl").sessions(0))


def nodes(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [node for line in lines for node in line["nodes"]]


@pytest.mark.parametrize("name", ["litellm", "opentelemetry", "requests", "vllm"])
def test_no_piece_of_the_log_is_in_the_trace(name: str, tmp_path: Path) -> None:
    """No eight characters in a row of a prompt, response, id, header, key, model or user are in the trace."""
    text = log_text(name)
    anonymised(tmp_path, text)
    trace = (tmp_path / "trace.jsonl").read_text()
    pieces = {secret[start : start + 8] for secret in SECRETS for start in range(len(secret) - 7)}
    assert sum(piece in text for piece in pieces) > 100
    assert [piece for piece in pieces if piece in trace] == []


def test_litellm(tmp_path: Path) -> None:
    """Lengths are the log's counts, a request follows the response before it, and what is left out is counted."""
    report, lines = anonymised(tmp_path, log_text("litellm"))
    assert [line["at_s"] for line in lines] == [0, 0.75]
    first, second = lines[0]["nodes"]
    assert (first["input_tokens"], first["output_tokens"], second["input_tokens"]) == (200, 40, 240)
    assert second["after"] == [{"node": "1", "on": "end", "delay_s": 3.25}]
    assert report["left_out"] == {
        "failed requests": 1,
        "responses from LiteLLM's cache, which no server computed": 1,
        "calls that generate no text, such as embeddings": 1,
    }
    shared = [len(set(first["blocks"]) & set(node["blocks"])) for node in (second, lines[1]["nodes"][0])]
    assert shared[0] in (12, 13)
    assert 9 <= shared[1] < shared[0]
    assert (report["models"], report["models_kept"]) == (1, 0)


def test_spend_logs_and_arrays(tmp_path: Path) -> None:
    """A JSON array of LiteLLM's database rows: times as text, messages inside the stored request, or no text at all."""
    rows = [
        {"request_id": "a", "session_id": "x", "call_type": "", "startTime": "2026-01-31T12:00:00.500Z"}
        | {"endTime": "2026-01-31T12:00:02.000Z", "prompt_tokens": 64, "completion_tokens": 4, "messages": "{}"},
        {"request_id": "b", "session_id": "x", "call_type": "acompletion", "startTime": "2026-01-31 12:00:03"}
        | {"endTime": "2026-01-31 12:00:04", "prompt_tokens": 100, "completion_tokens": 4, "messages": {}},
        {"request_id": "c", "session_id": "y", "call_type": "acompletion", "startTime": "2026-01-31 12:00:03.5"}
        | {"prompt_tokens": 30, "completion_tokens": 4, "messages": {}}
        | {"proxy_server_request": json.dumps({"messages": FIRST})},
    ]
    report, lines = anonymised(tmp_path, json.dumps(rows, indent=1))
    (first, second), (third,) = (line["nodes"] for line in lines)
    assert second["after"] == [{"node": "1", "on": "end", "delay_s": 1}]
    assert (len(first["blocks"]), len(second["blocks"])) == (4, 7)
    assert second["blocks"][:4] == first["blocks"]
    assert len(third["blocks"]) == 2
    assert [count for remark, count in report["remarks"].items() if remark.startswith("prompts without text")] == [2]


def test_a_redacted_prompt_has_no_text(tmp_path: Path) -> None:
    """LiteLLM's placeholder for a hidden prompt is not taken for a prompt that all requests share."""
    hidden = [{"role": "user", "content": "redacted-by-litellm"}]
    rows = [row | {"messages": hidden, "trace_id": None} for row in litellm_rows()[:3]]
    _, lines = anonymised(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert not any("blocks" in node for node in nodes(lines))


@pytest.mark.parametrize("text", [True, False])
def test_spans(text: bool, tmp_path: Path) -> None:
    """Tool delays and lengths are those of the spans. Prompts without text begin like the one before."""
    rows = "".join(json.dumps(row) + "\n" for row in otel_rows(text=text))
    report, lines = anonymised(tmp_path, rows)
    first, second = nodes(lines)
    assert second["after"] == [{"node": "1", "on": "end", "delay_s": 1.5}]
    assert (second["tool_s"], second["input_tokens"], second["output_tokens"]) == (1.5, 240, 40)
    assert second["blocks"][:12] == first["blocks"][:12]
    assert report["left_out"] == {"spans that are no request to a model": 1}


def test_request_bodies(tmp_path: Path) -> None:
    """Requests of a session follow each other, not before their own time. Lengths are estimated, which is said."""
    report, lines = anonymised(tmp_path, log_text("requests"))
    first, second = nodes(lines)
    assert second["after"] == [
        {"node": "1", "on": "start", "delay_s": 4.25},
        {"node": "1", "on": "end", "delay_s": 0},
    ]
    assert report["input_lengths"] == {"estimated from the text": 2}
    assert first["output_tokens"] == 40
    assert report["left_out"] == {"requests to routes that generate no text, such as embeddings": 1}
    assert second["blocks"][: len(first["blocks"]) - 1] == first["blocks"][:-1]


def test_batch_files_have_no_times(tmp_path: Path) -> None:
    """Requests of OpenAI's batch format are sessions of one request without a time."""
    body = {"messages": FIRST}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    report, lines = anonymised(tmp_path, "".join(json.dumps(line) + "\n" for _ in range(3)))
    assert [list(line) for line in lines] == [["session", "block_tokens", "nodes"]] * 3
    assert report["span_s"] == 0
    assert len({tuple(node["blocks"]) for node in nodes(lines)}) == 1


def test_vllm(tmp_path: Path) -> None:
    """Both forms of vLLM's lines, seconds that are spread, the end of the year, and lengths from token ids."""
    report, lines = anonymised(tmp_path, log_text("vllm"))
    assert [line["at_s"] for line in lines] == [0, 0.5, 2]
    first, second, third = nodes(lines)
    assert [node["output_tokens"] for node in (first, second, third)] == [3, 3, 9]
    assert third["input_tokens"] == 100
    shared = len(set(first["blocks"]) & set(second["blocks"]))
    assert 6 <= shared < len(first["blocks"])
    assert {reason.partition(":")[0]: count for reason, count in report["left_out"].items()} == {
        "lines that describe no request": 3,
        "requests without a prompt": 1,
        "requests that generate no text, such as embeddings and tokenize": 1,
    }


def test_docker_times_are_exact(tmp_path: Path) -> None:
    """A complete time in front of vLLM's line is used instead of vLLM's whole second."""
    line = (
        "2026-11-05T12:39:35.{}Z INFO 11-05 12:39:35 [logger.py:40] Received request a: prompt: 'Hi', "
        "params: SamplingParams(n=1), prompt_token_ids: [1, 2], lora_request: None.\n"
    )
    _, lines = anonymised(tmp_path, line.format("250000000") + line.format("750"))
    assert [line["at_s"] for line in lines] == [0, 0.5]


def test_a_tokenizer_counts(tmp_path: Path) -> None:
    """With a tokenizer, lengths are its counts, and blocks hold whole tokens."""
    tokenizer = str(save("byte_level", tmp_path))
    report, lines = anonymised(tmp_path, log_text("litellm"), "--tokenizer", tokenizer, "--block-tokens", "4")
    assert set(report["input_lengths"]) == {"counted with the tokenizer"}
    for node in nodes(lines):
        assert len(node["blocks"]) == -(-node["input_tokens"] // 4)
    assert [line["block_tokens"] for line in lines] == [4, 4]


def test_the_salt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs have different hashes, unless the same salt is in the environment. The salt is not written."""
    text = log_text("litellm")
    monkeypatch.setenv("TRACE_SALT", "0123456789abcdef-salt")
    runs = [anonymised(tmp_path, text, *options)[1] for options in [(), (), *[("--salt-env", "TRACE_SALT")] * 2]]
    assert runs[0] != runs[1]
    assert runs[2] == runs[3]
    assert "0123456789abcdef" not in (tmp_path / "trace.jsonl").read_text()
    monkeypatch.setenv("TRACE_SALT", "short")
    code, _, err = in_process(tmp_path, "anonymise", "log", "--salt-env", "TRACE_SALT")
    assert (code, "could be guessed" in err) == (2, True)


def test_models_by_new_names(tmp_path: Path) -> None:
    """A model of the log has a name in the trace only if the user states one."""
    report, lines = anonymised(tmp_path, log_text("litellm"), "--model", f"{MODEL}=small")
    assert {node["model"] for node in nodes(lines)} == {"small"}
    assert (report["models"], report["models_kept"]) == (1, 1)


def test_compressed_files_and_several_logs(tmp_path: Path) -> None:
    """Logs may be compressed, several are one trace with one clock, and the trace may be compressed."""
    rows = litellm_rows()
    (tmp_path / "b.gz").write_bytes(gzip.compress(json.dumps(rows[2]).encode()))
    with pa.CompressedOutputStream(str(tmp_path / "a.zst"), "zstd") as file:
        file.write((json.dumps(rows[0]) + "\n").encode())
    code, out, err = in_process(tmp_path, "anonymize", "b.gz", "a.zst", "-o", "trace.jsonl.gz")
    assert code == 0, err
    (session,) = SessionFile(tmp_path / "trace.jsonl.gz").sessions(0)
    assert [node.input_tokens for node in session.nodes] == [200, 240]
    assert "trace.jsonl.gz: 2 requests in 1 session over 5 s, from LiteLLM log" in out


def test_parallel_requests_of_a_session(tmp_path: Path) -> None:
    """Requests that overlap both follow the one before, and the next one waits for both."""
    base = litellm_rows()[0]
    times = [(0, 1), (2, 5), (3, 4), (6, 7)]
    rows = [base | {"id": f"{n}", "startTime": start, "endTime": end} for n, (start, end) in enumerate(times)]
    _, lines = anonymised(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    after = [sorted((edge["node"], edge["delay_s"]) for edge in node.get("after", [])) for node in nodes(lines)]
    assert after == [[], [("1", 1)], [("1", 2)], [("2", 1), ("3", 2)]]


LITELLM = json.dumps(litellm_rows()[0])
WRONG: list[tuple[str, str, str]] = [
    ("", "log: the file is empty", "name a log"),
    ('{"foo": 1}\n', "its first entry has 'foo'", "name the format with --format: opentelemetry, litellm"),
    ('{\n"foo": 1}\n', "line 1: is not JSON", "jq -c . FILE"),
    (LITELLM + "\n{\n", "log, line 2: is not JSON", "correct or remove the line"),
    (LITELLM + "\n[1]\n", "log, line 2: is no JSON object", "correct or remove the line"),
    (LITELLM + "\n" + LITELLM + "\n", "entry 2: the request 'chatcmpl-7f3e9ab2c1d0' occurs twice", "remove one"),
    ("INFO nothing\n", "no line has 'Received request'", "--enable-log-requests"),
    ("INFO Received request a: params: SamplingParams(), lora_request: None.\n", "no request is left", "another log"),
    ("INFO 11-05 12:39:35 [x] Received request a: prompt: 'Hel\n", "line 1: the request a is incomplete", "remove"),
    (
        "INFO 11-05 12:39:35 [x] Received request a: prompt: 'C:\\users', params: SamplingParams(), "
        "prompt_token_ids: None, prompt_embeds shape: None, lora_request: None.\n",
        "line 1: the text in quotes is damaged",
        "",
    ),
    (
        '{"body": {"prompt": [9223372036854775808], "model": "m"}}\n',
        "a number that is no token id",
        "correct or remove the line",
    ),
    (
        "INFO [x] Received request a: prompt: 'Hi', params: SamplingParams(), lora_request: None.\n",
        "line 1: there is no time in front of the message",
        "keep the beginning of the lines",
    ),
    (
        "INFO 13-05 12:39:35 Received request a: prompt: 'Hi', params: SamplingParams(), lora_request: None.\n",
        "13-05 12:39:35 is no time",
        "remove",
    ),
    ('{"body": {"messages": 5}}\n', 'line 1: "messages" is no list of messages', "role"),
    ('{"body": {"prompt": ["a", "b"]}}\n', "line 1: has 2 prompts in one body", "one line per prompt"),
    ('{"body": {"prompt": {"a": 1}}}\n', 'line 1: "prompt" is neither text nor a list', "correct or remove"),
    ('{"body": {}}\n', "no request is left: requests without a prompt (1)", "another log"),
    ('{"body": 5}\n', '"body" is not a JSON object', "body"),
    ('{"resourceSpans": 5}\n', "line 1: Expected `array`", "correct or remove"),
]
WRONG += [
    (json.dumps(litellm_rows()[0] | {field: value}), f"log, line 1: {message}", hint)
    for field, value, message, hint in (
        ("startTime", "yesterday", "its startTime 'yesterday' is no time", "seconds since 1970"),
        ("startTime", 1_790_000_000_000, "its startTime 1790000000000.0 is no time in seconds", "jq -c"),
        ("startTime", -1, "its startTime -1.0 is no time in seconds", "convert"),
        ("startTime", None, "has a wrong field: Expected `float | str`", "correct or remove"),
        ("endTime", 5, "its endTime is before its startTime", "correct or remove"),
        ("prompt_tokens", "many", "has a wrong field: Expected `int | null`, got `str`", "correct or remove"),
        ("completion_tokens", -4, "has a wrong field: Expected `int` >= 0", "correct or remove"),
        ("model", 7, "has a wrong field: Expected `str | null`", "correct or remove"),
        ("trace_id", 7, "has a wrong field: Expected `str | null`", "correct or remove"),
        ("call_type", 7, "has a wrong field: Expected `str | null`", "correct or remove"),
        ("cache_hit", 7, "has a wrong field: Expected `bool | str | null`", "correct or remove"),
    )
]


@pytest.mark.parametrize(("text", "message", "hint"), WRONG)
def test_mistakes(text: str, message: str, hint: str, tmp_path: Path) -> None:
    """Every mistake ends with exit code 2, the file, the line and what to do. No trace is left."""
    (tmp_path / "log").write_text(text)
    code, _, err = in_process(tmp_path, "anonymise", "log")
    assert (code, message in err, hint in err) == (2, True, True), err
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("log", "--format", "csv"), "--format csv is no format of logs"),
        (("log", "--model", "x"), "--model x is not OLD=NEW"),
        (("log", "--model", "a=b", "--model", "a=c"), "--model names a twice"),
        (("log", "--out", "log"), "--out log is the log itself"),
        (("log", "--out", "t.zst"), "traces are not written with zstd"),
        (("log", "--salt-env", "NOT_SET_ANYWHERE"), "the environment variable NOT_SET_ANYWHERE of --salt-env"),
        (("missing",), "cannot read the log missing"),
        (("log", "--out", "no/folder/t.jsonl"), "cannot write no/folder/t.jsonl"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """Wrong options end with exit code 2 and a message."""
    (tmp_path / "log").write_text(log_text("litellm"))
    code, _, err = in_process(tmp_path, "anonymise", *arguments)
    assert (code, message in err) == (2, True), err
