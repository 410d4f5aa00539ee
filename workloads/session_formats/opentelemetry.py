"""Reads OpenTelemetry spans of GenAI clients and agents, in the JSON encoding of OTLP.

Each line is an export request ({"resourceSpans": [...]}), as the collector's file exporter writes it. A span is a
recorded operation. Its attributes are those of the semantic conventions for generative AI
(open-telemetry/semantic-conventions-genai, docs/gen-ai):

    gen_ai.operation.name        `chat`, `text_completion` and `generate_content` are requests to a model.
                                 `execute_tool` is the run of a tool, and `invoke_agent` that of an agent.
    gen_ai.conversation.id       The session. Without this attribute, all spans of a trace are one session.
    gen_ai.usage.input_tokens    Length of the prompt.
    gen_ai.usage.output_tokens   Length of the response.
    gen_ai.request.model         The model.
    gen_ai.input.messages        The messages of the request. They are sent if they were recorded, together with
                                 the messages of `gen_ai.system_instructions` and the tools of
                                 `gen_ai.tool.definitions`.

In the replay, a request waits for the requests that had ended before it started in the recording. Only requests of the
same agent, of its ancestors and of its descendants in the tree of agents are considered. If some of these requests
followed one another, the request waits only for the last of them. The delay after the end of an earlier request is as
long as in the recording. The part of the delay in which tools ran counts as tool time.

If a request was recorded without messages, its prompt is generated. The prompt begins with the previous prompt of the
same agent, if that prompt was generated too and is shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from loadgen.workloads.session_formats.rows import (
    SPAN_BITS,
    Options,
    decode_row,
    file_lines,
    row_store,
    tokens,
)
from loadgen.workloads.session_graph import (
    ROOT_ROLE,
    SUB_AGENT_ROLE,
    After,
    DraftNode,
    TraceSession,
    graph_of,
)
from loadgen.workloads.spec_syntax import WorkloadError

Recorded = TypeVar("Recorded")
CALLS = {"chat", "text_completion", "generate_content"}
AGENT, TOOL = "invoke_agent", "execute_tool"


class AttributeRow(msgspec.Struct):
    """An attribute of a span: its name, and its value by type, such as {"intValue": "12"}."""

    key: str
    value: dict[str, Any]


class SpanRow(msgspec.Struct, rename="camel"):
    """One span. Times are in ns since 1970. OTLP's JSON encoding writes them as strings."""

    trace_id: str
    span_id: str
    start_time_unix_nano: str | int
    end_time_unix_nano: str | int
    parent_span_id: str = ""
    attributes: list[AttributeRow] = []


class ScopeRow(msgspec.Struct, rename="camel"):
    """The spans of one instrumentation scope of OpenTelemetry."""

    spans: list[SpanRow] = []


class ResourceRow(msgspec.Struct, rename="camel"):
    """The spans that one process recorded."""

    scope_spans: list[ScopeRow] = []


class ExportRow(msgspec.Struct, rename="camel"):
    """One line of the file: an export request of OpenTelemetry."""

    resource_spans: list[ResourceRow]


class Span(msgspec.Struct):
    """A span: one recorded operation of OpenTelemetry. Only the values that this module needs are stored."""

    id: str
    parent: str
    operation: str
    start_ns: int
    end_ns: int
    line: int
    agent: str = ""
    """Id of the innermost `invoke_agent` span around this span. Empty: there is none."""
    conversation: str = ""
    model: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    messages: str = ""
    system: str = ""
    tools: str = ""


EXPORT = msgspec.json.Decoder(ExportRow)
STORED = msgspec.json.Decoder(Span)


class RecordedCall(NamedTuple):
    """A recorded request to a model, as its span in the file (`span`) and as the request that loadgen will send
    (`draft`).
    """

    span: Span
    draft: DraftNode


def sessions(path: Path, _options: Options) -> Iterator[TraceSession]:
    """Yield the sessions in order of their start times. Raises WorkloadError for an invalid span."""
    start_ns = None
    for name, calls in recorded_sessions(path):
        first_ns = calls[0].span.start_ns
        start_ns = first_ns if start_ns is None else start_ns
        yield graph_of(name, first_ns - start_ns, [call.draft for call in calls], path)


def recorded_sessions(path: Path, others: Counter[str] | None = None) -> Iterator[tuple[str, list[RecordedCall]]]:
    """Yield each session in the file `path`: its name and its requests to models. The sessions are in order of start
    time.

    The file contains spans. A span is a recorded operation: a request to a model, the run of an agent, or a tool call,
    for example. Spans of other operations are ignored. The counter `others` counts the ignored spans by the name of
    their operation.

    Raises WorkloadError if a span is invalid or occurs twice.
    """
    with row_store() as traces:
        for line, text in file_lines(path):
            export = decode_row(text, EXPORT, path, line)
            spans = (
                span for resource in export.resource_spans for scope in resource.scope_spans for span in scope.spans
            )
            for row in spans:
                span = _span(row, line, path)
                if not traces.add(line, row.trace_id, row.span_id, msgspec.json.encode(span).decode()):
                    raise WorkloadError(
                        f"{path}, line {line}: the span {row.span_id} occurs twice", "remove one of them"
                    )
        with row_store() as by_session:
            for trace, found in traces.sessions():
                spans_of_trace = [STORED.decode(text) for _, text in found]
                _find_agents(spans_of_trace)
                named = next((span.conversation for span in spans_of_trace if span.conversation), "")
                for span in spans_of_trace:
                    if span.operation in (*CALLS, AGENT, TOOL):
                        name = span.conversation or named or trace
                        by_session.add(span.start_ns, name, span.id, msgspec.json.encode(span).decode())
                    elif others is not None:
                        others[span.operation] += 1
            for number, (name, found) in enumerate(by_session.sessions()):
                calls = _calls([STORED.decode(text) for _, text in found], number, path)
                if calls:
                    yield name, calls


def _span(row: SpanRow, line: int, path: Path) -> Span:
    where = f"{path}, line {line}, span {row.span_id}"
    attributes = {attribute.key: attribute.value for attribute in row.attributes}
    try:
        start_ns, end_ns = int(row.start_time_unix_nano), int(row.end_time_unix_nano)
    except ValueError:
        raise WorkloadError(f"{where}: its times are not numbers of ns", "export the spans as OTLP JSON") from None
    if not 0 <= start_ns <= end_ns < 1 << 63:
        raise WorkloadError(f"{where}: ends before it starts", "correct its times, or remove the span")
    return Span(
        row.span_id,
        row.parent_span_id,
        _text(attributes, "gen_ai.operation.name", where),
        start_ns,
        end_ns,
        line,
        conversation=_text(attributes, "gen_ai.conversation.id", where),
        model=_text(attributes, "gen_ai.request.model", where),
        input_tokens=_number(attributes, "gen_ai.usage.input_tokens", where),
        output_tokens=_number(attributes, "gen_ai.usage.output_tokens", where),
        messages=_text(attributes, "gen_ai.input.messages", where),
        system=_text(attributes, "gen_ai.system_instructions", where),
        tools=_text(attributes, "gen_ai.tool.definitions", where),
    )


def _text(attributes: Mapping[str, Mapping[str, Any]], name: str, where: str) -> str:
    value = attributes.get(name)
    if value is None:
        return ""
    text = value.get("stringValue")
    if not isinstance(text, str):
        raise WorkloadError(f"{where}: {name} is no text", 'write {"stringValue": "..."}')
    return text


def _number(attributes: Mapping[str, Mapping[str, Any]], name: str, where: str) -> int | None:
    value = attributes.get(name)
    if value is None:
        return None
    number = value.get("intValue")
    try:
        if isinstance(number, bool) or not isinstance(number, str | int):
            raise TypeError
        return tokens(int(number), name, where, low=0)
    except (TypeError, ValueError) as error:
        if isinstance(error, WorkloadError):
            raise
        raise WorkloadError(f"{where}: {name} is no whole number", 'write {"intValue": "12"}') from None


def _find_agents(spans: list[Span]) -> None:
    """Set, for each span of a trace, the agent that it belongs to: the nearest agent above it in the tree of spans."""
    by_id = {span.id: span for span in spans}
    for span in spans:
        above = by_id.get(span.parent)
        for _ in range(len(spans)):  # spans that are their own ancestors end the search
            if above is None or above.operation == AGENT:
                break
            above = by_id.get(above.parent)
        span.agent = above.id if above is not None and above.operation == AGENT else ""


def _calls(spans: list[Span], number: int, path: Path) -> list[RecordedCall]:
    """Return the requests of a session in order of their start times. `number` is the number of the session."""
    agents = {span.id: span for span in spans if span.operation == AGENT}
    calls = sorted((span for span in spans if span.operation in CALLS), key=lambda span: (span.start_ns, span.end_ns))
    tools = [span for span in spans if span.operation == TOOL]
    result: list[RecordedCall] = []
    prompts: dict[str, list[tuple[int, int]]] = {}
    """Spans of the last prompt of each agent."""
    for index, call in enumerate(calls):
        where = f"{path}, line {call.line}, span {call.id}"
        earlier = [other for other in calls[:index] if _related(other.agent, call.agent, agents)]
        parents = _last_ended(earlier, call)
        after: list[tuple[str, After, int]] = [(parent.id, "end", call.start_ns - parent.end_ns) for parent in parents]
        messages = _messages(call, where) if call.messages else ()
        definitions = _tools(call.tools, where) if call.messages and call.tools else []
        if not messages and not call.input_tokens:
            raise WorkloadError(
                f"{where}: has neither gen_ai.usage.input_tokens nor gen_ai.input.messages",
                "record one of them, or remove the span",
            )
        input_tokens = 0 if messages else call.input_tokens or 0
        spans_before = prompts.get(call.agent, [])
        if input_tokens <= sum(length for _, length in spans_before):
            spans_before = []
        own = input_tokens - sum(length for _, length in spans_before)
        base = ((number + 1) << SPAN_BITS) + index
        prompt = [*spans_before, (-1 - base, own)] if input_tokens else spans_before
        prompts[call.agent] = prompt
        waits_from_ns = max((parent.end_ns for parent in parents), default=call.start_ns)
        draft = DraftNode(
            id=call.id,
            after=after,
            line=call.line,
            offset_ns=call.start_ns - calls[0].start_ns,
            input_tokens=input_tokens,
            output_tokens=call.output_tokens or 1,
            spans=tuple(prompt) if input_tokens else (),
            messages=messages,
            body={"tools": definitions} if definitions else {},
            model=call.model,
            role=SUB_AGENT_ROLE if _depth(call.agent, agents) > 1 else ROOT_ROLE,
            agent=call.agent if _depth(call.agent, agents) > 1 else "",
            tool_ns=_covered_ns(tools, waits_from_ns, call.start_ns),
        )
        result.append(RecordedCall(call, draft))
    return result


def _last_ended(earlier: list[Span], call: Span) -> list[Span]:
    """Return the requests in `earlier` that `call` directly follows.

    These are the requests that had ended when `call` started, but only the last ones. A request is left out if another
    of them started after its end. For example, if A ended, then B started and ended, and then `call` started, only B is
    returned.
    """
    ended = [other for other in earlier if other.end_ns <= call.start_ns]
    latest_start_ns = max((other.start_ns for other in ended), default=0)
    return [other for other in ended if other.end_ns > latest_start_ns or other.start_ns == latest_start_ns]


def _ancestors(agent: str, agents: Mapping[str, Span]) -> Iterator[str]:
    for _ in range(len(agents) + 1):
        yield agent
        if agent not in agents:
            return
        agent = agents[agent].agent


def _related(one: str, other: str, agents: Mapping[str, Span]) -> bool:
    """Return True if the agents `one` and `other` are equal, or if one is an ancestor of the other."""
    return one in _ancestors(other, agents) or other in _ancestors(one, agents)


def _depth(agent: str, agents: Mapping[str, Span]) -> int:
    """Return the nesting depth of an agent: 1 for an agent that the session starts, 2 for its sub-agents, and so on.

    The depth of a request outside any agent, for which `agent` is empty, is 0."""
    return sum(1 for name in _ancestors(agent, agents) if name)


def _covered_ns(tools: list[Span], from_ns: int, until_ns: int) -> int:
    """Return the time in ns between `from_ns` and `until_ns` in which at least one tool was running."""
    covered = 0
    last_ns = from_ns
    for tool in sorted(tools, key=lambda span: span.start_ns):
        start_ns, end_ns = max(tool.start_ns, last_ns), min(tool.end_ns, until_ns)
        if end_ns > start_ns:
            covered += end_ns - start_ns
            last_ns = end_ns
    return covered


class _Part(msgspec.Struct):
    """A part of a message: text, a tool call, or the result of a tool call."""

    type: str
    content: str = ""
    id: str | None = None
    name: str = ""
    arguments: Any = None
    response: Any = None


class _Message(msgspec.Struct):
    role: str
    parts: list[_Part]


class _ToolDefinition(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: Any = None


_MESSAGES = msgspec.json.Decoder(list[_Message])
_SYSTEM = msgspec.json.Decoder(list[_Part])
_TOOLS = msgspec.json.Decoder(list[_ToolDefinition])


def _decoded(text: str, decoder: msgspec.json.Decoder[Recorded], name: str, where: str) -> Recorded:
    """Decode an attribute whose text is JSON. Raises WorkloadError if the JSON does not have the expected type."""
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise WorkloadError(f"{where}: {name}: {error}", "record it as JSON, or leave it out") from None


def _tools(text: str, where: str) -> list[dict[str, Any]]:
    """Return recorded definitions of tools in the format of OpenAI's chat endpoint."""
    result: list[dict[str, Any]] = []
    for tool in _decoded(text, _TOOLS, "gen_ai.tool.definitions", where):
        fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        function = {name: value for name, value in fields.items() if value is not None}
        result.append({"type": "function", "function": function})
    return result


def _messages(call: Span, where: str) -> tuple[dict[str, Any], ...]:
    """Return the recorded messages of the request `call` in the format of OpenAI's chat endpoint.

    Raises WorkloadError if a part of a message cannot be replayed.
    """
    recorded = _decoded(call.messages, _MESSAGES, "gen_ai.input.messages", where)
    if call.system:
        recorded = [_Message("system", _decoded(call.system, _SYSTEM, "gen_ai.system_instructions", where)), *recorded]
    messages: list[dict[str, Any]] = []
    for message in recorded:
        calls = [part for part in message.parts if part.type == "tool_call"]
        results = [part for part in message.parts if part.type == "tool_call_response"]
        texts = [part.content for part in message.parts if part.type == "text"]
        if len(calls) + len(results) + len(texts) < len(message.parts):
            kinds = ", ".join(
                sorted({part.type for part in message.parts} - {"text", "tool_call", "tool_call_response"})
            )
            raise WorkloadError(
                f"{where}: parts of the type {kinds} cannot be replayed", "remove gen_ai.input.messages"
            )
        for result in results:
            content = result.response if isinstance(result.response, str) else _json(result.response)
            messages.append({"role": "tool", "tool_call_id": result.id or "", "content": content})
        if texts or calls:
            entry: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
            if calls:
                entry["tool_calls"] = [
                    {
                        "id": call.id or "",
                        "type": "function",
                        "function": {
                            "name": call.name,
                            "arguments": call.arguments if isinstance(call.arguments, str) else _json(call.arguments),
                        },
                    }
                    for call in calls
                ]
            messages.append(entry)
    return tuple(messages)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
