"""Sessions as graphs: each node is a request, and each edge says that a request is due after another one.

A loader (loadgen.workloads.session_formats) reads a file and describes each session as a list of `DraftNode`. The
function `graph_of` checks the list and returns the nodes in an order in which every parent comes before its children.
`SessionGraph` adds what a run needs to build the requests. All of these objects are immutable. The progress of a
running session is stored in loadgen.engine.session_progress.

    plan ──end──> search ──end, 2 s──> answer       `answer` is due 2 s after the end of `search`, and not before the
      └──start, 1 s──> lookup ──end────┘            end of `lookup`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from loadgen.workloads.prompts import Prompt, SharedSpan
from loadgen.workloads.request import ParentEdge, Request, merged
from loadgen.workloads.spec_syntax import WorkloadError

After = Literal["end", "start"]
HistoryMode = Literal["inherited", "forked", "fresh"]
ROOT_ROLE, SUB_AGENT_ROLE = "root", "sub-agent"
Messages = tuple[Mapping[str, Any], ...]
"""Chat messages in the format of OpenAI's chat endpoint."""
NODES_LIMIT = 100_000
"""Maximum number of requests in one session."""


class Edge(msgspec.Struct, frozen=True):
    """A condition of a node: its request is due `delay_ns` after the end or the start of the parent's request."""

    parent: int
    """Index of the parent node in the session."""
    after: After = "end"
    """`end`: the end of the parent's response. `start`: the time at which the parent's request was sent."""
    delay_ns: int = 0


class Node(msgspec.Struct, frozen=True):
    """One request of a session: when it is due, what it contains and how long its response should be."""

    edges: tuple[Edge, ...] = ()
    """Conditions of the request. It is due when all of them are met. Only the first node of a session has none."""
    history: HistoryMode = "fresh"
    """`inherited`: the prompt continues the conversation of the parent `context`. `forked`: the prompt begins another
    conversation with a copy of that history. `fresh`: the prompt contains no earlier request or response."""
    context: int | None = None
    """Index of the parent whose history the prompt contains. None if `history` is `fresh`."""
    input_tokens: int = 0
    """Number of tokens to generate: of the whole prompt if `history` is `fresh`, otherwise of the new user message. 0
    if the node has messages."""
    output_tokens: int | None = None
    """Requested length of the response. None if the file states none."""
    spans: tuple[SharedSpan, ...] = ()
    """Spans at the beginning of the prompt that other prompts share, such as the blocks of a prefix cache."""
    messages: Messages = ()
    """Chat messages of the file. They are sent after the history."""
    body: Mapping[str, Any] = {}
    """Additional fields of the request's body, such as `tools`."""
    model: str = ""
    role: str = ROOT_ROLE
    """`root` or `sub-agent`, or another role that the file names."""
    agent: int = 0
    """Index of the first node of the agent that makes this request. 0: the main agent of the session."""
    parent_agent: int | None = None
    """For a request of a sub-agent: index of the first node of the agent that has started the sub-agent."""
    tool_ns: int = 0
    """Part of the delay during which tools run."""
    depth: int = 0
    """Number of edges on the longest path from the first node."""


class DraftNode(msgspec.Struct):
    """One request of a session, as a loader reads it from a file.

    A draft refers to other requests by their names. `graph_of` checks all drafts of a session and replaces the names by
    indices.
    """

    id: str
    after: list[tuple[str, After, int]]
    """Name of the parent, `end` or `start`, and the delay in ns."""
    line: int
    """Number of the line in the file, for error messages."""
    offset_ns: int = 0
    """For a node without parents: its due time in ns after the start of the session."""
    history: HistoryMode = "fresh"
    context: str | None = None
    """Name of the parent whose history is continued. None: the first parent that must have ended."""
    input_tokens: int = 0
    output_tokens: int | None = None
    spans: tuple[SharedSpan, ...] = ()
    messages: Messages = ()
    body: Mapping[str, Any] = {}
    model: str = ""
    role: str = ROOT_ROLE
    agent: str = ""
    """Name of the sub-agent that makes the request. Empty: the main agent if the role is `root`, otherwise the agent
    of a request with the same role that this one follows, or a new sub-agent."""
    tool_ns: int = 0


class TraceSession(msgspec.Struct, frozen=True):
    """One session of a file: its name, its start time and its nodes."""

    name: str
    start_ns: int
    """Start time in ns on the clock of the file."""
    nodes: tuple[Node, ...]


class Transcript(msgspec.Struct, frozen=True):
    """The messages of a request and its response, linked to the transcript of the conversation before them."""

    before: Transcript | None
    messages: Messages
    answer: str = ""

    def all_messages(self) -> list[Mapping[str, Any]]:
        """Return every message of the conversation so far, oldest first."""
        links: list[Transcript] = []
        link: Transcript | None = self
        while link is not None:
            links.append(link)
            link = link.before
        messages: list[Mapping[str, Any]] = []
        for entry in reversed(links):
            messages += entry.messages
            if entry.answer:
                messages.append({"role": "assistant", "content": entry.answer})
        return messages


class SessionGraph(msgspec.Struct, frozen=True):
    """A session of a run: its nodes, and everything that is needed to build their requests.

    Prompts are built when a request is needed. A session that waits takes no memory for prompts."""

    first_id: int
    """Request id of the first node. The other nodes have the following ids, in order."""
    name: str
    nodes: tuple[Node, ...]
    output_tokens: tuple[int, ...]
    """Requested length of each node's response."""
    prompt: Prompt
    chat: bool = False
    """True if requests contain chat messages instead of one text."""
    request_fields: Mapping[str, Any] = {}
    """Additional fields of each Request. The fields of a node's body replace those of the same name."""
    ids_from: int = 0
    """Number that is added to the ids of the requests. The numbers of their prompts do not change."""

    def shifted(self, ids: int) -> SessionGraph:
        """Return a copy of the session whose request ids are higher by `ids`."""
        return replace(self, first_id=self.first_id + ids, ids_from=self.ids_from + ids)

    def _prompt(self, index: int, node: Node) -> str | tuple[int, ...]:
        return self.prompt(self.first_id - self.ids_from + index, node.input_tokens, node.spans)

    def request(self, index: int, history: Transcript | None = None) -> tuple[Request, Messages]:
        """Return the request of the node `index`, and the messages that this node adds to the conversation.

        `history` contains the messages of the conversation that the node continues. It is None if the prompt is fresh.
        """
        node = self.nodes[index]
        if not node.messages and node.history == "fresh":
            prompt = self._prompt(index, node)
            return self._request(index, prompt, node.input_tokens), ({"role": "user", "content": prompt},)
        added: Messages = node.messages
        if not added:
            question = self._prompt(index, node)
            added = ({"role": "user", "content": question},)
        messages = [*(history.all_messages() if history else ()), *added]
        if self.chat:
            return self._request(index, "", 0, {"messages": messages}), added
        transcript = "\n".join(str(message.get("content", "")) for message in messages)
        return self._request(index, transcript, 0), added

    def prepare_prompts(self) -> None:
        """Call the prompt builder for each prompt that this session needs, and discard the prompts.

        This method is called before the run, with a prompt builder that only records the lengths. Nodes with recorded
        messages need no prompt.
        """
        for index, node in enumerate(self.nodes):
            if not node.messages:
                self._prompt(index, node)

    def unsent_request(self, index: int) -> Request:
        """Return the request of the node `index` without a prompt. Use it for a request that will never be sent.

        The run still records such a request, for example when an earlier request of the session has failed.
        """
        node = self.nodes[index]
        return self._request(index, "", node.input_tokens if node.history == "fresh" else 0)

    def outline(self) -> Iterator[Request]:
        """Yield the requests of all nodes in order of id.

        Only the first request has a prompt. Other prompts are built later, when their requests are sent.
        """
        yield self.request(0)[0]
        yield from (self.unsent_request(index) for index in range(1, len(self.nodes)))

    def _request(
        self, index: int, prompt: str | tuple[int, ...], input_tokens: int, body: Mapping[str, Any] | None = None
    ) -> Request:
        node = self.nodes[index]
        fields = dict(self.request_fields)
        fields["body"] = merged(merged(fields.get("body", {}), node.body), body or {})
        output_tokens = fields.pop("output_tokens", self.output_tokens[index])
        return Request(
            self.first_id + index,
            prompt,
            input_tokens,
            output_tokens,
            session=self.first_id,
            turn=node.depth,
            model=node.model,
            role=node.role,
            agent=self.first_id + node.agent,
            parent_agent=None if node.parent_agent is None else self.first_id + node.parent_agent,
            parents=tuple(ParentEdge(self.first_id + edge.parent, edge.after, edge.delay_ns) for edge in node.edges),
            tool_ns=node.tool_ns,
            **fields,
        )


def graph_of(name: str, start_ns: int, drafts: Sequence[DraftNode], path: object) -> TraceSession:
    """Check the requests of a session, and return the session as a graph whose nodes are the requests.

    - `name` and `start_ns`: the name and the start time of the session.
    - `drafts`: the requests in the order of the file. A request may wait for other requests, its parents.
    - `path`: the file, for error messages.

    The first node is the earliest request without parents. The other nodes keep the order of the file, except that each
    node comes after its parents. If another request has no parents either, it is due at its recorded time after the
    start of the first node.

    Raises WorkloadError for a duplicate name, a missing parent, a cycle, a negative delay, a request before the start
    of the session, and a history that does not exist.
    """
    indices: dict[str, int] = {}
    for position, draft in enumerate(drafts):
        if draft.id in indices:
            raise _invalid(path, draft, f"the name {draft.id!r} occurs twice in session {name!r}", "give each a name")
        indices[draft.id] = position
    for draft in drafts:
        for parent, _, delay_ns in draft.after:
            if parent not in indices:
                raise _invalid(
                    path,
                    draft,
                    f"{draft.id!r} follows {parent!r}, which session {name!r} does not have",
                    "add the missing request, or remove the reference",
                )
            if delay_ns < 0:
                raise _invalid(path, draft, f"{draft.id!r} has a negative delay", "write a delay of 0 or more")
        if draft.offset_ns < 0:
            raise _invalid(path, draft, f"{draft.id!r} is before the start of its session", "sort the file by time")
    order = _sorted_by_parents(name, drafts, indices, path)
    numbers = {drafts[position].id: number for number, position in enumerate(order)}
    root = drafts[order[0]]
    nodes: list[Node] = []
    agents: dict[str, int] = {}
    for position in order:
        draft = drafts[position]
        edges = tuple(Edge(numbers[parent], after, delay_ns) for parent, after, delay_ns in draft.after)
        if not edges and draft is not root:
            edges = (Edge(0, "start", draft.offset_ns - root.offset_ns),)
        depth = max((nodes[edge.parent].depth + 1 for edge in edges), default=0)
        context = _context_of(draft, edges, numbers, path)
        names = ("history", "input_tokens", "output_tokens", "spans", "messages", "body", "model", "role", "tool_ns")
        fields = {field: getattr(draft, field) for field in names}
        agent, parent_agent = _agent_of(draft, edges, nodes, agents)
        nodes.append(Node(edges, context=context, depth=depth, agent=agent, parent_agent=parent_agent, **fields))
    return TraceSession(name, start_ns + root.offset_ns, tuple(nodes))


def _sorted_by_parents(name: str, drafts: Sequence[DraftNode], indices: Mapping[str, int], path: object) -> list[int]:
    """Return the positions of a session's requests, in an order in which every request comes after its parents.

    The parents of a request are the requests that it waits for. The first request of the result is the request without
    parents that was recorded earliest. Apart from that, the requests keep the order of the file as far as possible.

    `indices` maps the name of each request to its position in `drafts`. `name` is the name of the session, and `path`
    is the file. Both appear in error messages. Raises WorkloadError if requests wait for each other in a cycle.
    """
    missing = [len({parent for parent, _, _ in draft.after}) for draft in drafts]
    children: list[list[int]] = [[] for _ in drafts]
    for position, draft in enumerate(drafts):
        for parent in {parent for parent, _, _ in draft.after}:
            children[indices[parent]].append(position)
    ready = [(draft.offset_ns, position) for position, draft in enumerate(drafts) if not draft.after]
    heapify(ready)
    if len(ready) > 1:  # the earliest root is the first node, and the others keep their places in the file
        first = ready[0][1]
        ready = [(-1 if position == first else 0, position) for _, position in ready]
        heapify(ready)
    order: list[int] = []
    while ready:
        _, position = heappop(ready)
        order.append(position)
        for child in children[position]:
            missing[child] -= 1
            if not missing[child]:
                heappush(ready, (0, child))
    if len(order) < len(drafts):
        listed = set(order)
        draft = next(draft for position, draft in enumerate(drafts) if position not in listed)
        raise _invalid(
            path,
            draft,
            f"{draft.id!r} of session {name!r} waits for itself",
            "remove one of the references of the cycle",
        )
    return order


def _agent_of(
    draft: DraftNode, edges: Sequence[Edge], nodes: Sequence[Node], agents: dict[str, int]
) -> tuple[int, int | None]:
    """Return the agent that makes the request `draft`, and the agent that started that agent.

    Both values are node indices: an agent is identified by the index of its first node. The second value is None if the
    agent that makes the request was not started by another agent.

    - `edges` lead to the requests that `draft` waits for.
    - `nodes` contains the nodes of all requests before `draft`.
    - `agents` maps the name of each agent to the index of its first node. If `draft` names a new agent, this agent is
      added.

    If `draft` names no agent, its role determines the agent (see `DraftNode.agent`).
    """
    before = [nodes[edge.parent] for edge in edges]
    number = len(nodes)
    if draft.agent:
        agent = agents.setdefault(draft.agent, number)
    elif draft.role == ROOT_ROLE or not number:
        return 0, None
    else:
        agent = next((node.agent for node in before if node.agent and node.role == draft.role), number)
    if agent != number:
        return agent, nodes[agent].parent_agent
    return agent, next((node.agent for node in before), 0) if number else None


def _context_of(draft: DraftNode, edges: Sequence[Edge], numbers: Mapping[str, int], path: object) -> int | None:
    """Return the index of the request whose conversation `draft` continues, or None if `draft` begins a new one.

    The conversation is that of the request that `draft` names in its field `context`. If this field is empty, it is
    that of the first request in `edges` whose end `draft` waits for.

    - `edges` lists the requests that `draft` waits for.
    - `numbers` maps the names of requests to their indices.
    - `path` is the file, for error messages.

    Raises WorkloadError if `draft` does not wait for the end of the request whose conversation it continues.
    """
    if draft.history == "fresh":
        return None
    ended = [edge.parent for edge in edges if edge.after == "end"]
    context = ended[0] if ended and draft.context is None else numbers.get(draft.context or "")
    if context is None or context not in ended:
        raise _invalid(
            path,
            draft,
            f"{draft.id!r} continues a conversation, but follows the end of no request with that conversation",
            'name the request in "after", or write "history": "fresh"',
        )
    return context


def _invalid(path: object, draft: DraftNode, message: str, hint: str) -> WorkloadError:
    return WorkloadError(f"{path}, line {draft.line}: {message}", hint)
