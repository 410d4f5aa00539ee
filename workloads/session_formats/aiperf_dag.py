"""Reads AIPerf's `dag_jsonl` files. Each line is a conversation, and a turn can start other conversations of the file.

The format is documented in ai-dynamo/aiperf, docs/benchmark-modes/dag.md:

    {"session_id": "root", "turns": [{"messages": [...], "max_tokens": 128, "spawns": ["search"]}, {"messages": [...]}]}
    {"session_id": "search", "turns": [{"messages": [...], "delay": 250}]}

A turn is sent when the previous turn of its conversation has ended, and `delay` ms have passed. A conversation that no
other conversation starts is a session.

A conversation can start others in three ways:

- `forks` of a turn: these conversations start when the turn ends, and inherit the history up to the end of this turn.
- `spawns` of a turn: these conversations start when the turn ends, with an empty history. The next turn waits until
  they have ended. With `join_at`, a later turn waits instead.
- `pre_session_spawns` of a conversation: these conversations start together with its first turn.

A file with an orchestrator (`orchestrator`) is refused, because an orchestrator sends no requests itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from loadgen.workloads.session_formats.rows import Options, RowStore, decode_row, file_lines, nanoseconds, row_store
from loadgen.workloads.session_graph import (
    NODES_LIMIT,
    ROOT_ROLE,
    SUB_AGENT_ROLE,
    After,
    DraftNode,
    HistoryMode,
    TraceSession,
    graph_of,
)
from loadgen.workloads.spec_syntax import WorkloadError

DEPTH_LIMIT = 64
"""Maximum number of conversations that start one another."""
ISOLATED = "message_array_with_responses"
"""Context mode in which each turn contains its complete messages."""
Name = Annotated[str, msgspec.Meta(min_length=1)]


class Fork(msgspec.Struct, forbid_unknown_fields=True):
    """A conversation that starts after a turn of its parent, and inherits the parent's history up to this turn."""

    child: Name
    background: bool = False


class Spawn(msgspec.Struct, forbid_unknown_fields=True):
    """Conversations that start after a turn of their parent, with an empty history.

    `join_at` is the index of the parent's turn that waits until these conversations have ended.
    """

    children: Annotated[list[Name], msgspec.Meta(min_length=1)]
    join_at: int | None = None


class TurnRow(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a conversation."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None
    forks: list[str | Fork] = []
    spawns: list[str | Spawn] = []
    delay: float = 0.0


class ConversationRow(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file: a conversation with its turns."""

    session_id: Name
    turns: Annotated[list[TurnRow], msgspec.Meta(min_length=1)]
    pre_session_spawns: list[str] = []
    context_mode: str | None = None


ROW = msgspec.json.Decoder(ConversationRow)


def sessions(path: Path, _options: Options) -> Iterator[TraceSession]:
    """Yield one session for each conversation that no other conversation starts. All sessions start at 0.

    Raises WorkloadError for an invalid line, for a missing conversation, and for a cycle of conversations that start
    one another.
    """
    with row_store() as store, row_store() as children, row_store() as reached:
        for line, text in file_lines(path):
            row = decode_row(text, ROW, path, line)
            if not store.add(line, row.session_id, row.session_id, text):
                raise WorkloadError(f"{path}, line {line}: session_id {row.session_id!r} occurs twice", "rename one")
            for name in _children(row):
                children.add(line, name, name, "")
        for name, ((line, text),) in store.sessions():
            if children.row(name) is None:
                yield _Tree(path, store, reached).read(name, line, text)
        for name, line in store.names():
            if reached.row(name) is None:
                raise WorkloadError(
                    f"{path}, line {line}: only conversations that {name!r} starts start it, so it waits for itself",
                    "remove one of the references of the cycle",
                )


def _children(row: ConversationRow) -> Iterator[str]:
    yield from row.pre_session_spawns
    for turn in row.turns:
        for fork in turn.forks:
            yield fork if isinstance(fork, str) else fork.child
        for spawn in turn.spawns:
            yield from (spawn,) if isinstance(spawn, str) else spawn.children


class _Tree:
    """Converts a conversation to a graph. The graph also contains all conversations that this conversation starts."""

    def __init__(self, path: Path, store: RowStore, reached: RowStore) -> None:
        self._path = path
        self._store = store
        self._reached = reached
        self._drafts: list[DraftNode] = []

    def read(self, name: str, line: int, text: str) -> TraceSession:
        row = decode_row(text, ROW, self._path, line)
        self._add(row, line, [], "fresh", ROOT_ROLE, (name,))
        return graph_of(name, 0, self._drafts, self._path)

    def _add(
        self,
        row: ConversationRow,
        line: int,
        after: list[tuple[str, After, int]],
        history: HistoryMode,
        role: str,
        names: tuple[str, ...],
    ) -> str:
        """Add the turns of a conversation, and those of its child conversations. Return the name of the last turn.

        - `row` is the conversation, and `line` is its line in the file.
        - `after` contains the conditions for the first turn: the name of a parent turn, the event `end` or `start` of
          the parent turn, and a delay in ns after this event.
        - `history` says whether the first turn inherits the history of its parent turn.
        - `role` is the role of the requests, such as that of a sub-agent.
        - `names` contains the names of the conversations from the root to this one.
        """
        self._reached.add(line, row.session_id, row.session_id, "")
        prefix = "/".join(names)
        where = f"{self._path}, line {line}"
        joins: dict[int, list[str]] = {}
        """Names of the nodes for whose end each turn waits, by the index of the turn."""
        last = ""
        for index, turn in enumerate(row.turns):
            last = f"{prefix}:{index}"
            delay_ns = nanoseconds(turn.delay, 1000, "delay", f"{where}, turns[{index}]")
            edges = [(parent, on, wait_ns + delay_ns) for parent, on, wait_ns in after]
            edges += [(name, "end", 0) for name in joins.pop(index, [])]
            self._draft(row, turn, last, edges, line, history, role)
            if not index:
                for child in row.pre_session_spawns:
                    self._child(child, [(last, "start", 0)], "fresh", names, line)
            self._forks(turn, last, names, line, index == len(row.turns) - 1)
            self._spawns(turn, index, last, names, line, joins, len(row.turns))
            after = [(last, "end", 0)]
            history = "fresh" if row.context_mode == ISOLATED else "inherited"
        return last

    def _forks(self, turn: TurnRow, last: str, names: tuple[str, ...], line: int, is_final: bool) -> None:
        for fork in turn.forks:
            child, background = (fork, False) if isinstance(fork, str) else (fork.child, fork.background)
            if not (background or is_final):
                raise WorkloadError(
                    f"{self._path}, line {line}: the fork {child!r} is not in the last turn of its conversation",
                    'write {"child": ..., "background": true} if the conversation goes on',
                )
            self._child(child, [(last, "end", 0)], "forked", names, line)

    def _spawns(
        self,
        turn: TurnRow,
        index: int,
        last: str,
        names: tuple[str, ...],
        line: int,
        joins: dict[int, list[str]],
        turns: int,
    ) -> None:
        for spawn in turn.spawns:
            spawned = Spawn([spawn]) if isinstance(spawn, str) else spawn
            join_at = index + 1 if spawned.join_at is None else spawned.join_at
            if spawned.join_at is not None and not index < join_at < turns:
                raise WorkloadError(
                    f"{self._path}, line {line}: turns[{index}] is joined at turn {join_at}",
                    f"write the index of a later turn, at most {turns - 1}",
                )
            for child in spawned.children:
                joins.setdefault(join_at, []).append(self._child(child, [(last, "end", 0)], "fresh", names, line))

    def _child(
        self, name: str, after: list[tuple[str, After, int]], history: HistoryMode, names: tuple[str, ...], line: int
    ) -> str:
        result = self._store.row(name)
        if result is None:
            raise WorkloadError(
                f"{self._path}, line {line}: starts {name!r}, which the file does not have",
                "add the conversation, or remove the reference",
            )
        if name in names or len(names) >= DEPTH_LIMIT:
            raise WorkloadError(
                f"{self._path}, line {line}: {name!r} starts itself: {' -> '.join((*names, name))}"[:400],
                "remove one of the references of the cycle",
            )
        row = decode_row(result[1], ROW, self._path, result[0])
        number = sum(draft.id.startswith(f"{'/'.join((*names, name))}") for draft in self._drafts)
        unique = (*names, f"{name}#{number}") if number else (*names, name)
        return self._add(row, result[0], after, history, SUB_AGENT_ROLE, unique)

    def _draft(
        self,
        row: ConversationRow,
        turn: TurnRow,
        name: str,
        edges: list[tuple[str, After, int]],
        line: int,
        history: HistoryMode,
        role: str,
    ) -> None:
        if len(self._drafts) >= NODES_LIMIT:
            raise WorkloadError(
                f"{self._path}, line {line}: its session has more than {NODES_LIMIT:,} turns", "split it"
            )
        if not all(isinstance(message.get("role"), str) for message in turn.messages):
            raise WorkloadError(
                f"{self._path}, line {line}: {name!r} has a message without a role",
                'write {"role": "user", "content": ...}',
            )
        body = dict(turn.extra or {}) | ({"tools": turn.tools} if turn.tools is not None else {})
        self._drafts.append(
            DraftNode(
                id=name,
                after=edges,
                line=line,
                history=history if row.context_mode != ISOLATED else "fresh",
                output_tokens=turn.max_tokens,
                messages=tuple(turn.messages),
                body=body,
                model=turn.model or "",
                role=role,
                agent="" if role == ROOT_ROLE else name.rpartition(":")[0],
            )
        )
