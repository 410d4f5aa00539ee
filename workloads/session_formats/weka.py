"""Reads traces of coding agents in the format of WEKA's kv-cache-tester, which AgentX uses too.

A line, or the whole file, is one conversation (callanjfox/kv-cache-tester, docs/trace_replay_tester.md):

    {"id": ..., "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "type": "s", "model": ..., "in": 11578, "out": 320, "hash_ids": [...], "api_time": 6.9, ...},
        {"t": 9.1, "type": "subagent", "agent_id": ..., "requests": [...], ...}, ...]}

Times are in seconds after the start of the conversation. `in` and `hash_ids` describe the complete prompt. An id stands
for a full block of tokens. With the scope `local`, equal ids in different conversations stand for different tokens.

A request is due `think_time` after the end of the previous request. Without `think_time`, the request keeps its
recorded distance from the start of the previous request, but is never sent before the end of the previous request. A
sub-agent starts after the end of the request before it in the file. The next request in the file waits for the end of
the sub-agent, unless the status of the sub-agent is `async_launched`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from loadgen.workloads.session_formats.rows import Options, block_spans, nanoseconds, rows, tokens
from loadgen.workloads.session_graph import (
    ROOT_ROLE,
    SUB_AGENT_ROLE,
    After,
    DraftNode,
    TraceSession,
    graph_of,
)
from loadgen.workloads.spec_syntax import NS_PER_S, WorkloadError
from loadgen.workloads.traces import UNITS_NS

ASYNC = "async_launched"


class CallRow(msgspec.Struct):
    """One request to the model. `type` is `s` if the recorded response was streamed, and `n` otherwise."""

    t: float
    type: Literal["n", "s"]
    input_length: Annotated[int, msgspec.Meta()] = msgspec.field(name="in")
    output_length: Annotated[int, msgspec.Meta()] = msgspec.field(name="out")
    model: str = ""
    hash_ids: list[int] = []
    input_types: list[str] = []
    api_time: float | None = None
    think_time: float | None = None


class EntryRow(msgspec.Struct):
    """The type of an entry in the list `requests`. The type determines which class decodes the whole entry."""

    type: Literal["n", "s", "subagent"]


class SubAgentRow(msgspec.Struct):
    """A sub-agent of a conversation, with the requests that it made."""

    t: float
    agent_id: Annotated[str, msgspec.Meta(min_length=1)]
    requests: list[CallRow]
    status: str = ""


class TraceRow(msgspec.Struct):
    """A recorded conversation. A file has one conversation per line, or consists of a single conversation."""

    id: str
    requests: list[msgspec.Raw]
    block_size: int = 64
    hash_id_scope: Literal["local", "global"] = "local"


ENTRY = msgspec.json.Decoder(EntryRow)
CALL = msgspec.json.Decoder(CallRow)
SUB_AGENT = msgspec.json.Decoder(SubAgentRow)


def sessions(path: Path, options: Options) -> Iterator[TraceSession]:
    """Yield one session for each conversation in the file at `path`.

    The file does not say when conversations started, so all sessions start at 0. Raises WorkloadError for an invalid
    conversation.
    """
    names: set[str] = set()
    for number, (line, trace) in enumerate(rows(path, TraceRow)):
        if trace.id in names:
            raise WorkloadError(f"{path}, line {line}: the id {trace.id!r} occurs twice", "remove one of the lines")
        names.add(trace.id)
        namespace = number if trace.hash_id_scope == "local" else None
        block_tokens = options.block_tokens or trace.block_size
        if block_tokens < 1:
            raise WorkloadError(f"{path}, line {line}: block_size is {block_tokens}", "write 1 or more, usually 64")
        yield _Conversation(path, line, block_tokens, namespace, options.unit or "s").read(trace)


class _Conversation:
    """Converts one recorded conversation, with its sub-agents, to a session that is a graph of requests."""

    def __init__(self, path: Path, line: int, block_tokens: int, namespace: int | None, unit: str) -> None:
        self._path = path
        self._line = line
        self._block_tokens = block_tokens
        self._namespace = namespace
        self._per_second = NS_PER_S // UNITS_NS[unit]
        self._drafts: list[DraftNode] = []

    def read(self, trace: TraceRow) -> TraceSession:
        before: tuple[str, CallRow] | None = None
        awaited: list[str] = []
        """Last requests of the sub-agents for which the next request waits."""
        for index, raw in enumerate(trace.requests):
            where = f"{self._path}, line {self._line}, requests[{index}]"
            entry = self._decode(raw, ENTRY, where)
            if entry.type == "subagent":
                agent = self._decode(raw, SUB_AGENT, where)
                last = self._sub_agent(agent, before, where)
                awaited += [last] if last is not None and agent.status != ASYNC else []
                continue
            call = self._decode(raw, CALL, where)
            after = self._after(call, before, where)
            after += [(last, "end", 0) for last in awaited]
            awaited = []
            before = self._add(call, after, where), call
        if not self._drafts:
            raise WorkloadError(f"{self._path}, line {self._line}: {trace.id!r} has no requests", "remove the line")
        return graph_of(trace.id, 0, self._drafts, self._path)

    def _sub_agent(self, agent: SubAgentRow, parent: tuple[str, CallRow] | None, where: str) -> str | None:
        """Add the requests of the sub-agent `agent` to the drafts, and return the name of its last request.

        Return None if the sub-agent has no requests.

        - `parent` contains the name and the row of the request after which the sub-agent starts. It is None if there is
          no such request.
        - `where` is the location of the sub-agent in error messages.
        """
        before: tuple[str, CallRow] | None = None
        for index, call in enumerate(agent.requests):
            inner = f"{where}.requests[{index}]"
            if before is None:
                after: list[tuple[str, After, int]] = []
                if parent is not None:
                    name, call_before = parent
                    gap_s = max(0.0, agent.t - call_before.t - (call_before.api_time or 0.0))
                    after = [(name, "end", nanoseconds(gap_s, self._per_second, "t", inner))]
            else:
                after = self._after(call, before, inner)
            before = self._add(call, after, inner, agent.agent_id), call
        return None if before is None else before[0]

    def _after(self, call: CallRow, before: tuple[str, CallRow] | None, where: str) -> list[tuple[str, After, int]]:
        if before is None:
            return []
        name, call_before = before
        if call.t < call_before.t:
            raise WorkloadError(f"{where}: its time is before the time of the request above", "sort requests by t")
        if call.think_time is not None:
            return [(name, "end", nanoseconds(call.think_time, self._per_second, "think_time", where))]
        return [(name, "start", nanoseconds(call.t - call_before.t, self._per_second, "t", where)), (name, "end", 0)]

    def _add(self, call: CallRow, after: list[tuple[str, After, int]], where: str, agent: str = "") -> str:
        """Add a request, and return its name. `agent` is the name of its sub-agent, or empty for the main agent."""
        name = f"{len(self._drafts)}"
        input_tokens = tokens(call.input_length, "in", where)
        runs_tool = "tool_result" in call.input_types and call.think_time is not None
        self._drafts.append(
            DraftNode(
                id=name,
                after=after,
                line=self._line,
                offset_ns=nanoseconds(call.t, self._per_second, "t", where),
                input_tokens=input_tokens,
                output_tokens=max(1, tokens(call.output_length, "out", where, low=0)),
                spans=block_spans(
                    call.hash_ids, input_tokens, self._block_tokens, where, self._namespace, only_full=True
                ),
                role=SUB_AGENT_ROLE if agent else ROOT_ROLE,
                agent=agent,
                tool_ns=nanoseconds(call.think_time or 0.0, self._per_second, "think_time", where) if runs_tool else 0,
            )
        )
        return name

    def _decode(self, raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any], where: str) -> Any:
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise WorkloadError(
                f"{where}: {str(error).replace('$.', '')[:300]}", "correct or remove the request"
            ) from None
