"""Tracks a running session whose requests form a graph: which requests are due, and which can no longer be sent.

The caller reports when each request started and ended. In return, it receives the requests that became due, with their
due times. The module has no clock, because both real runs and simulations in virtual time use it.
"""

from __future__ import annotations

from typing import NamedTuple

from loadgen.workloads.request import Request
from loadgen.workloads.session_graph import Edge, SessionGraph, Transcript


class DueNode(NamedTuple):
    """A request of a session graph that has become due: its node index, and its due time in ns from the run's start."""

    node: int
    due_ns: int


class SessionProgress:
    """The state of one running session. Nodes are identified by their indices in the session's graph.

    An edge makes a node wait for the start or the end of another node (its parent), plus a delay. A node becomes due
    when all of its edges are satisfied. If the request of a node fails, those of its children that are not due yet are
    never sent. The same applies to the children of these nodes, and so on.
    """

    def __init__(self, graph: SessionGraph) -> None:
        self.graph = graph
        self.unfinished = len(graph.nodes)
        """Number of nodes that have neither ended nor been dropped. The session is over when it is 0."""
        self._missing = [len(node.edges) for node in graph.nodes]
        """Number of each node's edges that are not met yet. -1: the node became due or was dropped."""
        self._due_ns = [0] * len(graph.nodes)
        self._children: dict[int, list[tuple[int, Edge]]] = {}
        self._heirs = [0] * len(graph.nodes)
        """Number of nodes that continue the history of each node and have not been sent yet."""
        self._histories: dict[int, Transcript] = {}
        """Conversations that a later node continues. An entry is removed when its last heir has been sent."""
        for index, node in enumerate(graph.nodes):
            for edge in node.edges:
                self._children.setdefault(edge.parent, []).append((index, edge))
            if node.context is not None:
                self._heirs[node.context] += 1
        self._missing[0] = -1

    def request(self, index: int) -> Request:
        """Build the request of the node `index`, which must be due. Call this method once for each node."""
        context = self.graph.nodes[index].context
        history = None if context is None else self._histories.get(context)
        request, added = self.graph.request(index, history)
        if context is not None:
            self._forget_heir(context)
        if self._heirs[index]:
            self._histories[index] = Transcript(history, added)
        return request

    def starts_others(self, index: int) -> bool:
        """Return True if at least one other node waits until the node `index` has started."""
        return any(edge.after == "start" for _, edge in self._children.get(index, ()))

    def independent_children(self, index: int) -> list[int]:
        """Return the children of the node `index` whose prompts contain no responses and can be built early."""
        children = dict.fromkeys(child for child, _ in self._children.get(index, ()))
        return [child for child in children if self.graph.nodes[child].context is None and self.waits(child)]

    def waits(self, index: int) -> bool:
        """Return True if the node `index` still waits for the start or the end of another node."""
        return self._missing[index] > 0

    def keeps_answer(self, index: int) -> bool:
        """Return True if the response of the node `index` is needed later, because the prompt of another node contains
        it.
        """
        return self._heirs[index] > 0

    def started(self, index: int, sent_ns: int) -> list[DueNode]:
        """Return the nodes that become due because the request of the node `index` was sent at `sent_ns`."""
        return self._meet(index, "start", sent_ns)

    def ended(self, index: int, end_ns: int, answer: str) -> list[DueNode]:
        """Return the nodes that become due because the response of the node `index` is complete.

        `end_ns` is the time at which the response ended, and `answer` is its text.
        """
        self.unfinished -= 1
        history = self._histories.get(index)
        if history is not None:
            self._histories[index] = Transcript(history.before, history.messages, answer)
        return self._meet(index, "end", end_ns)

    def failed(self, index: int) -> list[Request]:
        """Return the requests that can never be sent, because the request of the node `index` failed or was not sent.

        The returned requests have no prompts.
        """
        self.unfinished -= 1
        self._histories.pop(index, None)
        lost = [index]
        requests: list[Request] = []
        while lost:
            for child, _ in self._children.get(lost.pop(), ()):
                if self._missing[child] <= 0:
                    continue
                self._missing[child] = -1
                context = self.graph.nodes[child].context
                if context is not None:
                    self._forget_heir(context)
                requests.append(self.graph.unsent_request(child))
                lost.append(child)
        self.unfinished -= len(requests)
        return sorted(requests, key=lambda request: request.id)

    def _forget_heir(self, context: int) -> None:
        self._heirs[context] -= 1
        if not self._heirs[context]:
            self._histories.pop(context, None)

    def _meet(self, index: int, after: str, at_ns: int) -> list[DueNode]:
        due: list[DueNode] = []
        for child, edge in self._children.get(index, ()):
            if edge.after != after or self._missing[child] <= 0:
                continue
            self._due_ns[child] = max(self._due_ns[child], at_ns + edge.delay_ns)
            self._missing[child] -= 1
            if not self._missing[child]:
                self._missing[child] = -1
                due.append(DueNode(child, self._due_ns[child]))
        return due
