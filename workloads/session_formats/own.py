"""Reads session files in loadgen's own format: JSON Lines with one session per line.

In this example, one session takes several lines:

    {"session": "chat-17", "at_s": 2.5, "nodes": [
        {"id": "plan", "input_tokens": 900, "output_tokens": 80},
        {"id": "search", "after": ["plan"], "role": "sub-agent", "input_tokens": 300, "output_tokens": 40},
        {"id": "answer", "after": ["plan", {"node": "search", "delay_s": 1.5}], "history": "inherited",
         "input_tokens": 120, "output_tokens": 200, "tool_s": 0.4}]}

`docs/reference/session-files.md` documents every field. A field with an unknown name is an error, because the name may
be misspelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from loadgen.workloads.session_formats.rows import Options, block_spans, nanoseconds, rows, tokens
from loadgen.workloads.session_graph import NODES_LIMIT, ROOT_ROLE, After, DraftNode, TraceSession, graph_of
from loadgen.workloads.spec_syntax import WorkloadError

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class AfterFields(msgspec.Struct, forbid_unknown_fields=True):
    """A condition for the start of a node. A node is a request of a session.

    The node starts at least `delay_s` seconds after the start or the end of another node.
    """

    node: Name
    on: Literal["end", "start"] = "end"
    delay_s: float = 0.0


class NodeFields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of one node, which is a request of a session in a file of loadgen's format."""

    id: Name
    after: list[str | AfterFields] = []
    at_s: float = 0.0
    """For a node without `after`: its time after the start of the session."""
    history: Literal["inherited", "forked", "fresh"] | None = None
    continues: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    body: dict[str, Any] = {}
    blocks: list[int] = []
    model: str = ""
    role: Name = ROOT_ROLE
    agent: str = ""
    tool_s: float = 0.0


class SessionFields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of one session, which is one line of a session file in loadgen's format."""

    session: Name
    nodes: Annotated[list[NodeFields], msgspec.Meta(min_length=1, max_length=NODES_LIMIT)]
    at_s: float = 0.0
    block_tokens: int | None = None
    local_blocks: bool = False
    """True if equal block ids in different sessions stand for different tokens."""


def sessions(path: Path, options: Options) -> Iterator[TraceSession]:
    """Yield the sessions of the file `path` in order. Raises WorkloadError for an invalid line."""
    last_ns = 0
    for number, (line, fields) in enumerate(rows(path, SessionFields)):
        where = f"{path}, line {line}"
        start_ns = nanoseconds(fields.at_s, 1, "at_s", where)
        if start_ns < last_ns:
            raise WorkloadError(
                f"{where}: session {fields.session!r} starts before the one above", "sort the lines by at_s"
            )
        last_ns = start_ns
        block_tokens = options.block_tokens or fields.block_tokens
        namespace = number if fields.local_blocks else None
        drafts = [_draft(node, line, f"{where}, node {node.id!r}", block_tokens, namespace) for node in fields.nodes]
        yield graph_of(fields.session, start_ns, drafts, path)


def _draft(node: NodeFields, line: int, where: str, block_tokens: int | None, namespace: int | None) -> DraftNode:
    history = node.history or ("inherited" if node.after and not node.blocks else "fresh")
    if (node.messages is None) == (node.input_tokens is None):
        raise WorkloadError(f"{where}: needs either messages or input_tokens", "write one of them")
    if node.messages is not None and not all(isinstance(message.get("role"), str) for message in node.messages):
        raise WorkloadError(f"{where}: has a message without a role", 'write {"role": "user", "content": ...}')
    if node.blocks and (block_tokens is None or history != "fresh" or node.messages is not None):
        raise WorkloadError(
            f"{where}: blocks need block_tokens and a complete prompt",
            'state "block_tokens" in the line, and write "history": "fresh" and "input_tokens"',
        )
    input_tokens = tokens(node.input_tokens, "input_tokens", where) if node.input_tokens is not None else 0
    output_tokens = tokens(node.output_tokens, "output_tokens", where) if node.output_tokens is not None else None
    tool_ns = nanoseconds(node.tool_s, 1, "tool_s", where)
    after: list[tuple[str, After, int]] = []
    for condition in node.after:
        edge = AfterFields(condition) if isinstance(condition, str) else condition
        wait_ns = tool_ns if edge.on == "end" else 0  # tools run once the response that calls them has ended
        after.append((edge.node, edge.on, nanoseconds(edge.delay_s, 1, "delay_s", where) + wait_ns))
    return DraftNode(
        id=node.id,
        after=after,
        line=line,
        offset_ns=nanoseconds(node.at_s, 1, "at_s", where),
        history=history,
        context=node.continues,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        spans=block_spans(node.blocks, input_tokens, block_tokens or 1, where, namespace),
        messages=tuple(node.messages or ()),
        body=node.body | ({"tools": node.tools} if node.tools is not None else {}),
        model=node.model,
        role=node.role,
        agent=node.agent,
        tool_ns=tool_ns,
    )
