"""Session files: what each format means, and every mistake in a file with its line and what to do."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from loadgen.workloads import workload
from loadgen.workloads.session_files import SessionFile, SessionStarts
from loadgen.workloads.session_formats import FORMATS
from loadgen.workloads.session_formats.rows import Options
from loadgen.workloads.session_graph import TraceSession
from loadgen.workloads.spec_syntax import WorkloadError

S = 1_000_000_000
MS = 1_000_000

OWN: dict[str, Any] = {
    "session": "a",
    "at_s": 1.5,
    "nodes": [
        {"id": "plan", "input_tokens": 90, "output_tokens": 8},
        {"id": "search", "after": ["plan"], "role": "sub-agent", "history": "fresh", "input_tokens": 30},
        {"id": "answer", "after": [{"node": "plan", "delay_s": 1}, "search"], "input_tokens": 12, "tool_s": 0.25},
    ],
}
MOONCAKE = [
    {"session_id": "x", "timestamp": 100, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
    {"session_id": "y", "timestamp": 150, "input_length": 20, "output_length": 6},
    {"session_id": "x", "timestamp": 400, "input_length": 1500, "output_length": 7, "hash_ids": [1, 2, 3]},
    {"session_id": "y", "delay": 250, "input_length": 40, "output_length": 8},
]
BAILIAN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 32, "output_length": 5, "type": "text"}
    | {"turn": 1, "hash_ids": [7, 8]},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 2.75, "input_length": 40, "output_length": 6, "type": "text"}
    | {"turn": 2, "hash_ids": [7, 8, 9]},
    {"chat_id": 3, "parent_chat_id": 1, "timestamp": 3.0, "input_length": 33, "output_length": 7, "type": "text"}
    | {"turn": 2, "hash_ids": [7, 8, 11]},
]
CALL = {"t": 0.0, "type": "s", "model": "m", "in": 200, "out": 9, "hash_ids": [1, 2, 3], "api_time": 2.0}
WEKA: dict[str, Any] = {
    "id": "trace_1",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        CALL,
        {"t": 3.0, "type": "subagent", "agent_id": "agent_1", "subagent_type": "Explore", "status": "completed"}
        | {"models": ["m"], "requests": [CALL | {"t": 3.0}, CALL | {"t": 6.0, "think_time": 0.5}]},
        CALL | {"t": 9.0, "in": 260, "hash_ids": [1, 2, 3, 4], "input_types": ["tool_result"], "think_time": 1.0},
    ],
}
USER = {"role": "user", "content": "hello"}
DAG = [
    {
        "session_id": "root",
        "turns": [
            {"messages": [{"role": "system", "content": "be brief"}, USER], "max_tokens": 8, "spawns": ["search"]},
            {"messages": [USER], "delay": 250, "forks": ["summary"], "extra": {"top_p": 0.5}},
        ],
    },
    {"session_id": "search", "turns": [{"messages": [USER], "model": "small"}, {"messages": [USER]}]},
    {"session_id": "summary", "turns": [{"messages": [USER]}]},
]


def span(span_id: str, operation: str, start: float, end: float, parent: str = "", **usage: Any) -> dict[str, Any]:
    """Return a span that started and ended at these seconds."""
    values: dict[str, Any] = {"gen_ai.operation.name": operation, **usage}
    attributes = [
        {
            "key": key.replace("__", "."),
            "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value},
        }
        for key, value in values.items()
    ]
    times = {"startTimeUnixNano": str(round(start * S)), "endTimeUnixNano": str(round(end * S))}
    return {"traceId": "t", "spanId": span_id, "parentSpanId": parent, **times, "attributes": attributes}


def usage(tokens_in: int, tokens_out: int) -> dict[str, Any]:
    return {"gen_ai.usage.input_tokens": tokens_in, "gen_ai.usage.output_tokens": tokens_out}


SPANS = [
    span("top", "invoke_agent", 10, 30),
    span("c1", "chat", 10, 12, "top", **usage(100, 9)),
    span("tool", "execute_tool", 12.5, 14, "top"),
    span("sub", "invoke_agent", 13, 20, "tool"),
    span("s1", "chat", 13, 15, "sub", **usage(40, 5)),
    span("s2", "chat", 16, 18, "sub", **usage(60, 5)),
    span("c2", "chat", 21, 23, "top", **usage(150, 7)),
]


def export(spans: list[dict[str, Any]]) -> list[Any]:
    return [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}]


def written(folder: Path, lines: list[Any], name: str = "file.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(folder: Path, lines: list[Any], options: str = "") -> list[TraceSession]:
    source = workload.parse(f"sessions:{written(folder, lines)}{options}")
    assert isinstance(source, SessionFile)
    return list(source.sessions(0))


def edges(session: TraceSession) -> list[list[tuple[int, str, int]]]:
    return [[(edge.parent, edge.after, edge.delay_ns) for edge in node.edges] for node in session.nodes]


def test_own_format(tmp_path: Path) -> None:
    """Edges, roles, histories and times for tools are read as documented."""
    (session,) = read(tmp_path, [OWN])
    assert (session.name, session.start_ns) == ("a", 0)
    assert edges(session) == [[], [(0, "end", 0)], [(0, "end", S + S // 4), (1, "end", S // 4)]]
    assert [node.history for node in session.nodes] == ["fresh", "fresh", "inherited"]
    assert [node.context for node in session.nodes] == [None, None, 0]
    assert [(node.role, node.tool_ns, node.depth) for node in session.nodes] == [
        ("root", 0, 0),
        ("sub-agent", 0, 1),
        ("root", S // 4, 2),
    ]


def test_mooncake_with_sessions(tmp_path: Path) -> None:
    """Blocks of 512 tokens, times in ms; a row without a time has a delay after the response before."""
    x, y = read(tmp_path, MOONCAKE)
    assert (x.start_ns, y.start_ns) == (0, 50 * MS)
    assert edges(x) == [[], [(0, "start", 300 * MS), (0, "end", 0)]]
    assert edges(y) == [[], [(0, "end", 250 * MS)]]
    assert x.nodes[1].spans == ((-2, 512), (-3, 512), (-4, 512))
    assert [node.input_tokens for node in x.nodes] == [1000, 1500]


def test_bailian(tmp_path: Path) -> None:
    """Blocks of 16 tokens, times in seconds, and a tree of requests."""
    (chat,) = read(tmp_path, BAILIAN)
    assert edges(chat) == [[], [(0, "start", 2_250 * MS), (0, "end", 0)], [(0, "start", 2_500 * MS), (0, "end", 0)]]
    assert chat.nodes[2].spans == ((-8, 16), (-9, 16), (-12, 16))
    orphan = BAILIAN[1] | {"parent_chat_id": 99}
    assert [session.name for session in read(tmp_path, [BAILIAN[0], orphan], ",orphans=yes")] == ["chat 1", "chat 2"]


def test_weka(tmp_path: Path) -> None:
    """Local blocks of 64 tokens; the sub-agent starts after the first request, and the last request waits for it."""
    first, second = read(tmp_path, [WEKA, WEKA | {"id": "trace_2"}])
    assert edges(first) == [[], [(0, "end", S)], [(1, "end", S // 2)], [(0, "end", S), (2, "end", 0)]]
    assert [node.role for node in first.nodes] == ["root", "sub-agent", "sub-agent", "root"]
    assert first.nodes[3].tool_ns == S
    assert first.nodes[0].spans[0][1] == 64
    assert first.nodes[0].spans == first.nodes[3].spans[:3]
    assert first.nodes[0].spans != second.nodes[0].spans
    late = CALL | {"t": 5.0}
    (without_think_time,) = read(tmp_path, [WEKA | {"requests": [CALL, late]}])
    assert edges(without_think_time) == [[], [(0, "start", 5 * S), (0, "end", 0)]]


def test_aiperf_dag(tmp_path: Path) -> None:
    """Spawns are joined by the next turn, and forks continue the history."""
    (session,) = read(tmp_path, DAG)
    assert edges(session) == [
        [],
        [(0, "end", 0)],
        [(1, "end", 0)],
        [(0, "end", 250 * MS), (2, "end", 0)],
        [(3, "end", 0)],
    ]
    assert [node.history for node in session.nodes] == ["fresh", "fresh", "inherited", "inherited", "forked"]
    assert [node.model for node in session.nodes] == ["", "small", "", "", ""]
    assert session.nodes[3].body == {"top_p": 0.5}
    assert session.nodes[0].output_tokens == 8


def test_opentelemetry(tmp_path: Path) -> None:
    """Sub-agents start after the agent's request; the agent's next request waits for them; tools take their time."""
    (session,) = read(tmp_path, export(SPANS))
    assert edges(session) == [[], [(0, "end", S)], [(1, "end", S)], [(2, "end", 3 * S)]]
    assert [node.role for node in session.nodes] == ["root", "sub-agent", "sub-agent", "root"]
    assert session.nodes[1].tool_ns == S // 2
    assert sum(length for _, length in session.nodes[3].spans) == 150
    assert session.nodes[0].spans == session.nodes[3].spans[:1]
    assert session.nodes[1].spans == session.nodes[2].spans[:1]


@pytest.mark.parametrize(
    ("rows", "agents", "parents"),
    [
        ([WEKA], [0, 1, 1, 0], [None, 0, 0, None]),
        (DAG, [0, 1, 1, 0, 4], [None, 0, 0, None, 0]),
        (export(SPANS), [0, 1, 1, 0], [None, 0, 0, None]),
        ([OWN], [0, 1, 0], [None, 0, None]),
        (
            [
                {
                    "session": "deep",
                    "nodes": [
                        {"id": "a", "input_tokens": 9},
                        {"id": "b", "input_tokens": 9, "after": ["a"], "role": "sub-agent"},
                        {"id": "c", "input_tokens": 9, "after": ["a"], "role": "sub-agent"},
                        {"id": "d", "input_tokens": 9, "after": ["b"], "role": "sub-agent"},
                        {"id": "e", "input_tokens": 9, "after": ["d"], "role": "sub-agent", "agent": "nested"},
                        {"id": "f", "input_tokens": 9, "after": ["c", "e"], "role": "sub-agent", "agent": "nested"},
                    ],
                }
            ],
            [0, 1, 2, 1, 4, 4],
            [None, 0, 0, 0, 1, 1],
        ),
    ],
)
def test_agents(rows: list[Any], agents: list[int], parents: list[int | None], tmp_path: Path) -> None:
    """Each sub-agent is known by its first request, and so is the agent that started it."""
    session = read(tmp_path, rows)[0]
    assert [node.agent for node in session.nodes] == agents
    assert [node.parent_agent for node in session.nodes] == parents


def test_system_instructions_and_tools_are_replayed(tmp_path: Path) -> None:
    """What spans record beside the messages is sent: a system message first, and the definitions of tools."""
    recorded = {
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]),
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "be brief"}]),
        "gen_ai.tool.definitions": json.dumps([{"type": "function", "name": "search", "parameters": {"a": 1}}]),
    }
    (session,) = read(tmp_path, export([span("c", "chat", 0, 1, **recorded)]))
    (node,) = session.nodes
    assert node.messages == ({"role": "system", "content": "be brief"}, USER)
    assert node.body == {"tools": [{"type": "function", "function": {"name": "search", "parameters": {"a": 1}}}]}
    for name in ("gen_ai.system_instructions", "gen_ai.tool.definitions"):
        with pytest.raises(WorkloadError, match=f"span c: {name}: Expected"):
            read(tmp_path, export([span("c", "chat", 0, 1, **recorded | {name: "5"})]))


def test_recorded_messages_are_replayed(tmp_path: Path) -> None:
    """Text, tool calls and their results become messages of OpenAI's chat endpoint."""
    messages = [
        {"role": "user", "parts": [{"type": "text", "content": "weather?"}]},
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "1", "name": "get", "arguments": {"city": "Oslo"}}],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "1", "response": "rain"}]},
    ]
    (session,) = read(tmp_path, export([span("c", "chat", 1, 2, **{"gen_ai.input.messages": json.dumps(messages)})]))
    assert session.nodes[0].messages[0] == {"role": "user", "content": "weather?"}
    assert session.nodes[0].messages[1]["tool_calls"][0]["function"] == {"name": "get", "arguments": '{"city":"Oslo"}'}
    assert session.nodes[0].messages[2] == {"role": "tool", "tool_call_id": "1", "content": "rain"}


def test_compressed_files_are_read(tmp_path: Path) -> None:
    """Files compressed with gzip and zstd give the same sessions."""
    path = tmp_path / "file.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(OWN).encode()))
    packed = tmp_path / "file.jsonl.zst"
    packed.write_bytes(pa.compress(json.dumps(OWN).encode(), codec="zstd", asbytes=True))
    sessions = [list(SessionFile(one).sessions(0)) for one in (path, packed)]
    assert sessions[0] == sessions[1]
    assert sessions[0][0].name == "a"


def test_options(tmp_path: Path) -> None:
    """Speed and the cap on idle times shorten starts and delays; a sample takes whole sessions."""
    lines = [OWN | {"session": f"{number}", "at_s": 100.0 * number} for number in range(100)]
    sessions = read(tmp_path, lines, ",speed=2,idle_cap=1s,limit=3")
    assert [session.start_ns for session in sessions] == [0, S // 2, S]
    assert edges(sessions[0])[2] == [(0, "end", S // 2), (1, "end", S // 8)]
    sample = read(tmp_path, lines, ",sample=30%")
    assert 15 <= len(sample) <= 45
    assert all(len(session.nodes) == 3 for session in sample)
    source = SessionFile.parse(f"{tmp_path / 'file.jsonl'},limit=2,loop=yes")
    looped = [session.start_ns for session, _ in zip(source.sessions(0), range(5), strict=False)]
    assert looped == [0, 100 * S, 200 * S, 300 * S, 400 * S]
    text = "f.jsonl,format=weka,block_tokens=64,speed=0.5,limit=7,idle_cap=10s,sample=12.5%,salt=x,loop=yes,orphans=yes"
    parsed = SessionFile.parse(text)
    assert (str(parsed), parsed.speed) == (f"sessions:{text}", Fraction(1, 2))
    assert str(SessionStarts.parse(text)) == f"starts:{text}"
    assert SessionFile.parse(str(parsed).removeprefix("sessions:")) == parsed


def test_a_salt_changes_the_prompts() -> None:
    """Each salt gives another seed, and no salt leaves the seed of the run."""

    def seed(salt: str) -> int:
        lengths: Any = None
        return workload.WorkloadSpec(SessionFile(Path("f"), salt=salt), lengths, None, 7, n=1).prompt_seed

    assert len({seed(""), seed("a"), seed("b"), 7}) == 3


def without(row: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != field}


def with_node(**fields: Any) -> list[Any]:
    nodes: list[dict[str, Any]] = OWN["nodes"]
    return [OWN | {"nodes": [nodes[0], nodes[1] | fields, nodes[2]]}]


def with_call(**fields: Any) -> list[Any]:
    return [WEKA | {"requests": [CALL, CALL | {"t": 3.0} | fields]}]


def with_turn(**fields: Any) -> list[Any]:
    return [{"session_id": "root", "turns": [{"messages": [USER]} | fields, {"messages": [USER]}]}, *DAG[1:]]


MISTAKES: list[tuple[str, list[Any], str]] = [
    # loadgen's own format
    ("sessions", [OWN | {"session": 3}], "line 1: Expected `str`, got `int`"),
    ("sessions", [OWN | {"session": ""}], "`session`"),
    ("sessions", [OWN | {"at_s": "0"}], "Expected `float`, got `str` in `at_s`"),
    ("sessions", [OWN | {"at_s": -1}], "line 1: at_s is -1"),
    ("sessions", [OWN, OWN | {"at_s": 1}], "line 2: session 'a' starts before the one above"),
    ("sessions", [OWN | {"nodes": []}], "`nodes`"),
    ("sessions", [OWN | {"nodes": {}}], "Expected `array`, got `object` in `nodes`"),
    ("sessions", [OWN | {"extra": 1}], "unknown field `extra`"),
    ("sessions", [OWN | {"block_tokens": "16"}], "in `block_tokens`"),
    ("sessions", [OWN | {"local_blocks": 1}], "in `local_blocks`"),
    ("sessions", with_node(id=7), "in `nodes[1].id`"),
    ("sessions", with_node(id="plan"), "'plan' occurs twice"),
    ("sessions", with_node(after="plan"), "in `nodes[1].after`"),
    ("sessions", with_node(after=["nobody"]), "line 1: 'search' follows 'nobody'"),
    ("sessions", with_node(after=["answer"]), "waits for itself"),
    ("sessions", with_node(after=["search"]), "waits for itself"),
    ("sessions", with_node(after=[{"node": "plan", "delay_s": -0.5}]), "delay_s is -0.5"),
    ("sessions", with_node(after=[{"node": "plan", "delay_s": "1"}]), "delay_s"),
    ("sessions", with_node(after=[{"node": "plan", "on": "middle"}]), "Invalid enum value 'middle'"),
    ("sessions", with_node(history="shared"), "Invalid enum value 'shared'"),
    ("sessions", with_node(history="inherited", continues="answer"), "continues a conversation"),
    ("sessions", with_node(history="inherited", after=[{"node": "plan", "on": "start"}]), "continues a conversation"),
    ("sessions", with_node(input_tokens=0), "input_tokens is 0"),
    ("sessions", with_node(input_tokens=1.5), "in `nodes[1].input_tokens`"),
    ("sessions", with_node(input_tokens=None), "needs either messages or input_tokens"),
    ("sessions", with_node(messages=[USER]), "needs either messages or input_tokens"),
    ("sessions", with_node(input_tokens=None, messages=[{"content": "x"}]), "a message without a role"),
    ("sessions", with_node(input_tokens=None, messages="x"), "in `nodes[1].messages`"),
    ("sessions", with_node(output_tokens=-3), "output_tokens is -3"),
    ("sessions", with_node(output_tokens="3"), "in `nodes[1].output_tokens`"),
    ("sessions", with_node(tools={}), "in `nodes[1].tools`"),
    ("sessions", with_node(body=[]), "in `nodes[1].body`"),
    ("sessions", with_node(blocks=[1]), "blocks need block_tokens"),
    ("sessions", [with_node(blocks=[1, 2, 3, 4])[0] | {"block_tokens": 16}], "4 block ids cannot be a prompt of 30"),
    ("sessions", [with_node(blocks=[1, -2])[0] | {"block_tokens": 16}], "-2 is no block id"),
    ("sessions", with_node(blocks=["a"]), "in `nodes[1].blocks[0]`"),
    ("sessions", with_node(model=None), "in `nodes[1].model`"),
    ("sessions", with_node(role=""), "in `nodes[1].role`"),
    ("sessions", with_node(tool_s=-1), "tool_s is -1"),
    ("sessions", with_node(at_s=-1), "at_s is -1"),
    ("sessions", with_node(mode="x"), "unknown field `mode`"),
    # Mooncake
    ("mooncake", [without(MOONCAKE[0], "input_length")], "missing required field `input_length`"),
    ("mooncake", [MOONCAKE[0] | {"input_length": "10"}], "in `input_length`"),
    ("mooncake", [MOONCAKE[0] | {"input_length": 0}], "input_length is 0"),
    ("mooncake", [MOONCAKE[0] | {"output_length": None}], "in `output_length`"),
    ("mooncake", [MOONCAKE[0] | {"output_length": -1}], "output_length is -1"),
    ("mooncake", [MOONCAKE[0] | {"timestamp": "now"}], "in `timestamp`"),
    ("mooncake", [MOONCAKE[0] | {"timestamp": -5}], "line 1: "),
    ("mooncake", [MOONCAKE[2], MOONCAKE[0]], "line 2: its time is before"),
    ("mooncake", [MOONCAKE[0], MOONCAKE[1], MOONCAKE[3] | {"delay": -1}], "line 3: delay is -1"),
    ("mooncake", [MOONCAKE[3], without(MOONCAKE[3], "delay")], "line 2: has neither a timestamp nor a delay"),
    ("mooncake", [MOONCAKE[3] | {"delay": True}], "in `delay`"),
    ("mooncake", [MOONCAKE[0] | {"session_id": 1.5}], "in `session_id`"),
    ("mooncake", [MOONCAKE[0] | {"hash_ids": 3}], "in `hash_ids`"),
    ("mooncake", [MOONCAKE[0] | {"hash_ids": [1]}], "line 1: 1 block ids"),
    ("mooncake", [MOONCAKE[0] | {"hash_ids": list(range(63))}], "63 block ids cannot be a prompt of 1,000 tokens"),
    # Qwen-Bailian
    ("bailian", [without(BAILIAN[0], "timestamp")], "missing required field `timestamp`"),
    ("bailian", [BAILIAN[0] | {"chat_id": "1"}], "in `chat_id`"),
    ("bailian", [BAILIAN[0] | {"parent_chat_id": None}], "in `parent_chat_id`"),
    ("bailian", [BAILIAN[0] | {"timestamp": -1}], "line 1: "),
    ("bailian", [BAILIAN[1] | {"parent_chat_id": -1}, BAILIAN[0]], "line 2: its time is before"),
    ("bailian", [BAILIAN[0], BAILIAN[0]], "line 2: chat_id 1 occurs twice"),
    ("bailian", [BAILIAN[1]], "line 1: chat 2 follows chat 1, which no line above has"),
    ("bailian", [BAILIAN[0] | {"parent_chat_id": 1}], "chat 1 follows chat 1"),
    ("bailian", [BAILIAN[0] | {"input_length": 3.5}], "in `input_length`"),
    ("bailian", [BAILIAN[0] | {"output_length": 0}], "output_length is 0"),
    ("bailian", [BAILIAN[0] | {"hash_ids": [1, 2, 3, 4]}], "4 block ids cannot be a prompt of 32 tokens"),
    ("bailian", [BAILIAN[0] | {"hash_ids": [1, 1 << 62]}], "is no block id"),
    # WEKA
    ("weka", [WEKA | {"id": 5}], "in `id`"),
    ("weka", [WEKA, WEKA], "line 2: the id 'trace_1' occurs twice"),
    ("weka", [WEKA | {"block_size": 0}], "block_size is 0"),
    ("weka", [WEKA | {"block_size": "64"}], "in `block_size`"),
    ("weka", [WEKA | {"hash_id_scope": "some"}], "Invalid enum value 'some'"),
    ("weka", [WEKA | {"requests": []}], "'trace_1' has no requests"),
    ("weka", [WEKA | {"requests": {}}], "in `requests`"),
    ("weka", with_call(type="x"), "requests[1]: Invalid enum value 'x'"),
    ("weka", with_call(t="0"), "requests[1]: Expected `float`"),
    ("weka", with_call(t=-1), "requests[1]: "),
    ("weka", [WEKA | {"requests": [CALL | {"t": 3.0}, CALL]}], "requests[1]: its time is before"),
    ("weka", with_call(**{"in": None}), "requests[1]: Expected `int`"),
    ("weka", with_call(**{"in": 0}), "requests[1]: in is 0"),
    ("weka", with_call(out=-1), "requests[1]: out is -1"),
    ("weka", with_call(hash_ids=["1"]), "requests[1]: Expected `int`"),
    ("weka", with_call(hash_ids=[1, 2, 3, 4, 5]), "requests[1]: 5 block ids cannot be a prompt of 200 tokens"),
    ("weka", with_call(hash_ids=[1, 2, 1 << 40]), "is no block id"),
    ("weka", with_call(think_time=-2), "requests[1]: think_time is -2"),
    ("weka", with_call(think_time="2"), "requests[1]: Expected `float | null`"),
    ("weka", with_call(type="subagent"), "missing required field `agent_id`"),
    ("weka", with_call(type="subagent", agent_id="a", requests=[CALL | {"in": "1"}]), "Expected `int`"),
    # AIPerf DAG
    ("aiperf-dag", [DAG[0] | {"session_id": ""}], "in `session_id`"),
    ("aiperf-dag", [DAG[1], DAG[1]], "line 2: session_id 'search' occurs twice"),
    ("aiperf-dag", [DAG[0] | {"turns": []}], "in `turns`"),
    ("aiperf-dag", [DAG[0] | {"orchestrator": True}], "unknown field `orchestrator`"),
    ("aiperf-dag", [DAG[1] | {"pre_session_spawns": "x"}], "in `pre_session_spawns`"),
    ("aiperf-dag", [DAG[1] | {"pre_session_spawns": ["x"]}], "line 1: starts 'x', which the file does not have"),
    ("aiperf-dag", [DAG[1] | {"context_mode": 3}], "in `context_mode`"),
    ("aiperf-dag", with_turn(messages=[]), "in `turns[0].messages`"),
    ("aiperf-dag", with_turn(messages=[{"content": "x"}]), "a message without a role"),
    ("aiperf-dag", with_turn(max_tokens=0), "in `turns[0].max_tokens`"),
    ("aiperf-dag", with_turn(max_tokens=True), "in `turns[0].max_tokens`"),
    ("aiperf-dag", with_turn(model=3), "in `turns[0].model`"),
    ("aiperf-dag", with_turn(tools="x"), "in `turns[0].tools`"),
    ("aiperf-dag", with_turn(extra=[]), "in `turns[0].extra`"),
    ("aiperf-dag", with_turn(delay=-1), "turns[0]: delay is -1"),
    ("aiperf-dag", with_turn(delay="1"), "in `turns[0].delay`"),
    ("aiperf-dag", with_turn(spawns=["nobody"]), "line 1: starts 'nobody'"),
    ("aiperf-dag", with_turn(spawns=["root"]), "waits for itself"),
    ("aiperf-dag", with_turn(spawns=[{"children": ["search"], "join_at": 5}]), "turns[0] is joined at turn 5"),
    ("aiperf-dag", with_turn(spawns=[{"children": []}]), "children"),
    ("aiperf-dag", with_turn(forks=["search"]), "the fork 'search' is not in the last turn"),
    ("aiperf-dag", with_turn(forks=[3]), "in `turns[0].forks[0]`"),
    ("aiperf-dag", with_turn(max_token=3), "unknown field `max_token`"),
    (
        "aiperf-dag",
        [*DAG[:1], {"session_id": "search", "turns": [{"messages": [USER], "forks": ["search"]}]}, DAG[2]],
        "'search' starts itself: root -> search -> search",
    ),
    # OpenTelemetry
    ("opentelemetry", [{"resourceSpans": 1}], "in `resourceSpans`"),
    ("opentelemetry", export([without(SPANS[1], "spanId")]), "missing required field `spanId`"),
    ("opentelemetry", export([SPANS[1] | {"traceId": 5}]), "traceId"),
    ("opentelemetry", export([SPANS[1], SPANS[1]]), "line 1: the span c1 occurs twice"),
    ("opentelemetry", export([SPANS[1] | {"startTimeUnixNano": "soon"}]), "span c1: its times are not numbers"),
    ("opentelemetry", export([SPANS[1] | {"endTimeUnixNano": "1"}]), "span c1: ends before it starts"),
    ("opentelemetry", export([SPANS[1] | {"attributes": {}}]), "attributes"),
    ("opentelemetry", export([span("c", "chat", 1, 2)]), "has neither gen_ai.usage.input_tokens"),
    ("opentelemetry", export([span("c", "chat", 1, 2, **{"gen_ai.usage.input_tokens": "many"})]), "is no whole number"),
    ("opentelemetry", export([span("c", "chat", 1, 2, **{"gen_ai.usage.input_tokens": -1})]), "input_tokens is -1"),
    ("opentelemetry", export([span("c", "chat", 1, 2, **{"gen_ai.usage.output_tokens": -1})]), "output_tokens is -1"),
    (
        "opentelemetry",
        export([span("c", "chat", 1, 2, **{"gen_ai.request.model": 4})]),
        "gen_ai.request.model is no text",
    ),
    ("opentelemetry", export([span("c", "chat", 1, 2, **{"gen_ai.input.messages": "x"})]), "gen_ai.input.messages: "),
    (
        "opentelemetry",
        export([span("c", "chat", 1, 2, **{"gen_ai.input.messages": '[{"role":"user","parts":[{"type":"blob"}]}]'})]),
        "parts of the type blob cannot be replayed",
    ),
]


@pytest.mark.parametrize(("format_name", "lines", "message"), MISTAKES)
def test_each_mistake_names_its_place_and_what_to_do(
    format_name: str, lines: list[Any], message: str, tmp_path: Path
) -> None:
    """The message names the file and the line, and a hint says what to do."""
    with pytest.raises(WorkloadError) as failure:
        read(tmp_path, lines, f",format={format_name}")
    assert message in str(failure.value)
    assert "file.jsonl" in str(failure.value)
    assert "line" in str(failure.value)
    assert failure.value.hint


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"a": 1}', "nonsense", '"text"', "\xff"])
def test_files_of_no_known_format_are_refused(text: str, tmp_path: Path) -> None:
    """The message names the line."""
    path = tmp_path / "file.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(WorkloadError) as failure:
        list(SessionFile(path).sessions(0))
    assert "line 1" in str(failure.value)


@pytest.mark.parametrize(
    "options",
    [
        "format=x",
        "block_tokens=0",
        "speed=0",
        "limit=0",
        "idle_cap=-1s",
        "sample=0%",
        "sample=10",
        "sample=200%",
        "loop=1",
        "orphans=maybe",
        f"salt={'x' * 65}",
        "limit=1,limit=2",
    ],
)
def test_invalid_options_are_refused(options: str) -> None:
    """An invalid value of an option is an error of the workload."""
    with pytest.raises(WorkloadError):
        workload.parse(f"sessions:f.jsonl,{options}")


def flat_rows(name: str, step: float, count: int = 20) -> list[dict[str, Any]]:
    """Return rows of Mooncake or Qwen-Bailian with this distance between timestamps."""
    lengths = {"input_length": 20, "output_length": 5}
    if name == "mooncake":
        return [{"timestamp": n * step, **lengths} for n in range(count)]
    return [{"chat_id": n, "parent_chat_id": -1, "timestamp": n * step, **lengths} for n in range(count)]


@pytest.mark.parametrize(
    ("rows", "message", "hint"),
    [
        (
            flat_rows("mooncake", 1),
            "read in ms, as Mooncake traces are, its first 20 requests come at 1,000 per second",
            "s",
        ),
        (flat_rows("mooncake", 0.5), "timestamps have fractions", "s"),
        (flat_rows("mooncake", 2_000_000), "come at 1.8 per hour, read in us at 0.5 per second", "us"),
        (flat_rows("bailian", 1500), "read in s, as Qwen-Bailian traces are", "ms"),
        (
            flat_rows("bailian", 30_000_000, 3),
            "session 'chat 2' starts 694 days after the first one if its times are in s",
            "ms",
        ),
        (flat_rows("mooncake", 0.0001, 9) + flat_rows("mooncake", 0.0001, 12)[9:], "is unclear", "ms"),
    ],
)
def test_implausible_units(rows: list[Any], message: str, hint: str, tmp_path: Path) -> None:
    """The message says what the times would mean, and the hint names the option. A stated unit is used."""
    with pytest.raises(WorkloadError) as caught:
        read(tmp_path, rows)
    assert message in str(caught.value)
    assert f"unit={hint}" in caught.value.hint
    sessions = read(tmp_path, rows, f",unit={hint}")
    unit_ns = {"s": S, "ms": MS, "us": 1_000}[hint]
    assert [session.start_ns for session in sessions] == [round(row["timestamp"] * unit_ns) for row in rows]


def test_own_times_that_cannot_be_seconds(tmp_path: Path) -> None:
    """A file whose format states the unit must be corrected."""
    node = [{"id": "a", "input_tokens": 9}]
    lines = [{"session": f"{n}", "at_s": 0.00001 * n, "nodes": node} for n in range(12)]
    with pytest.raises(WorkloadError, match=r"its 12 sessions start within 0\.11 ms"):
        read(tmp_path, lines)
    lines = [{"session": f"{n}", "at_s": 1_700_000 * n, "nodes": node} for n in range(30)]
    with pytest.raises(WorkloadError, match="session '21' starts 413 days after the first one") as caught:
        read(tmp_path, lines)
    assert caught.value.hint == "correct the times of the file"


def test_units_of_weka_files_and_wrong_units(tmp_path: Path) -> None:
    """`unit` applies to times and think times, and takes only known units."""
    (session,) = read(tmp_path, [WEKA], ",unit=ms")
    assert edges(session) == [[], [(0, "end", MS)], [(1, "end", MS // 2)], [(0, "end", MS), (2, "end", 0)]]
    with pytest.raises(WorkloadError, match="unit 'min' is not one of s, ms, us, ns"):
        read(tmp_path, [WEKA], ",unit=min")


def test_reader_that_another_thread_closes(tmp_path: Path) -> None:
    """The garbage collector may close a reader that was not read to its end in any thread."""
    path = tmp_path / "file.jsonl"
    path.write_text("\n".join(map(json.dumps, flat_rows("bailian", 2))))
    reader = FORMATS["bailian"].sessions(path, Options())
    next(reader)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(reader.close).result()  # type: ignore[attr-defined]
    assert list(reader) == []
