"""A session that a Locust user runs: each of its requests is sent when it is due.

A chat has one request in flight at a time. A session that is a graph may have several requests in flight. Each of these
requests has its own greenlet and connection. If Locust kills the user, the requests that were not sent yet are recorded
as cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import NamedTuple, Protocol

import gevent
from gevent import GreenletExit
from gevent.pool import Group
from msgspec.structs import replace

from loadgen.analysis.run.record import ErrorKind, Record
from loadgen.engine.session_progress import DueNode, SessionProgress
from loadgen.workloads.request import Request
from loadgen.workloads.session_graph import SessionGraph
from loadgen.workloads.sessions import Session

STOPPED = "not sent, its user was stopped"


class SentRequest(NamedTuple):
    """A request that has ended: its Record, the text of its response, and the end in ns (CLOCK_MONOTONIC)."""

    record: Record
    answer: str
    end_ns: int


class SessionUser(Protocol):
    """Interface of a Locust user that runs a session."""

    def send_in_session(self, request: Request, due_ns: int, on_sent: Callable[[int], object]) -> SentRequest:
        """Send a request and wait for the end of its response. `on_sent` is called with the time of sending."""

    def record_unsent(self, request: Request, kind: ErrorKind, detail: str) -> None:
        """Record a request that is not sent."""


def first_id_of(session: SessionGraph | Session) -> int:
    """Return the id of a session's first request."""
    return session.first_id if isinstance(session, SessionGraph) else session.request().id


def wait_until(due_ns: int) -> None:
    """Wait until a time in ns (CLOCK_MONOTONIC)."""
    gevent.sleep(max(0.0, (due_ns - monotonic_ns()) / 1e9))


def run_chat(user: SessionUser, session: Session) -> None:
    """Send the requests of a session one after the other as one user, until the session ends or the user is stopped.

    Each request is due after the response to the previous request. If the user is stopped, the remaining requests are
    recorded as cancelled.
    """
    state = session
    due_ns = monotonic_ns()
    sent = False
    try:
        while True:
            wait_until(due_ns)
            sent = True
            result = user.send_in_session(state.request(), due_ns, lambda _: None)
            following = state.after(result.answer) if result.record.state == "complete" else None
            if following is None:
                break
            state, sent = following, False
            due_ns = state.due_after(result.end_ns)
    except GreenletExit:  # the user is killed
        unsent = [] if sent else [state.request()]
        _drop(user, [*unsent, *state.remaining_requests()], "cancelled", STOPPED)
        raise
    detail = f"not sent, turn {result.record.turn} of its session was {result.record.state}"
    _drop(user, [*state.remaining_requests()], "session_ended", detail)


def run_graph(user: SessionUser, graph: SessionGraph) -> None:
    """Run a session that is a graph: send each request when it is due, and wait until the session has ended."""
    progress = SessionProgress(graph)
    unsent = set(range(len(graph.nodes)))
    group = Group()

    def start(nodes: list[DueNode]) -> None:
        for node, due_ns in nodes:
            group.spawn(run_node, node, due_ns)

    def run_node(node: int, due_ns: int) -> None:
        wait_until(due_ns)
        unsent.discard(node)
        request = progress.request(node)
        result = user.send_in_session(request, due_ns, lambda sent_ns: start(progress.started(node, sent_ns)))
        if result.record.state == "complete":
            start(progress.ended(node, result.end_ns, result.answer))
            return
        lost = progress.failed(node)
        unsent.difference_update(request.id - graph.first_id for request in lost)
        kind: ErrorKind = "cancelled" if result.record.error_kind == "cancelled" else "session_ended"
        _drop(user, lost, kind, f"not sent, request {request.id} of its session was {result.record.state}")

    try:
        start([DueNode(0, monotonic_ns())])
        group.join()
    finally:  # also when the user is killed
        group.kill()
        _drop(user, [graph.unsent_request(node) for node in sorted(unsent)], "cancelled", STOPPED)


def _drop(user: SessionUser, requests: list[Request], kind: ErrorKind, detail: str) -> None:
    for request in requests:
        user.record_unsent(replace(request, prompt=""), kind, detail)
