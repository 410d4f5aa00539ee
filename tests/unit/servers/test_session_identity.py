"""Headers that identify sessions, and headers and cookies that are sent back."""

import pytest

from loadgen.servers.session_identity import (
    ROUTERS,
    SessionIdentity,
    check_captures,
    check_session_headers,
)
from loadgen.workloads.request import Request

HEAD = (
    b"HTTP/1.1 200 OK\r\nx-session-TOKEN: abc\r\nSet-Cookie: llm-d-session=cG9k; Path=/; HttpOnly\r\n"
    b"set-cookie: other=1\r\nContent-Length: 2"
)


def turn(number: int, session: int | None = 4) -> Request:
    return Request((session or 0) + number, "", 0, 1, session=session, turn=number)


def test_every_turn_of_a_session_has_the_same_value() -> None:
    """Sessions of one run and of two runs have different values. A single request is a session of its own."""
    identity = SessionIdentity(("X-Session-ID", "sglang"))
    first, second = (identity.headers(turn(number), "run") for number in (0, 1))
    assert first == second == {"X-Session-ID": "run-s4", "X-SMG-Routing-Key": "run-s4"}
    assert identity.headers(turn(0, 7), "run")["X-Session-ID"] == "run-s7"
    assert identity.headers(turn(0), "another")["X-Session-ID"] == "another-s4"
    assert identity.headers(Request(3, "", 0, 1), "run")["X-Session-ID"] == "run-s3"


def test_sub_agents_have_their_own_value_or_that_of_their_parent() -> None:
    """The main agent keeps the session's value, and a header of the parent is sent by sub-agents alone."""
    main = Request(4, "", 0, 1, session=4, agent=4)
    child = Request(6, "", 0, 1, session=4, agent=6, parent_agent=4)
    grandchild = Request(9, "", 0, 1, session=4, agent=8, parent_agent=6)
    identity = SessionIdentity(("dynamo", "A", "B=parent", "C=own", "sglang=own"))
    own, parent = "X-Dynamo-Session-ID", "X-Dynamo-Parent-Session-ID"
    fixed = {"A": "r-s4", "B": "r-s4"}
    for request, value, above in (
        (main, "r-s4", {}),
        (child, "r-s4-a6", {parent: "r-s4"}),
        (grandchild, "r-s4-a8", {parent: "r-s4-a6"}),
    ):
        assert identity.headers(request, "r") == fixed | above | {own: value, "C": value, "X-SMG-Routing-Key": value}


@pytest.mark.parametrize(
    ("capture", "sent_back"),
    [
        ("X-Session-Token", {"X-Session-Token": "abc"}),
        ("cookie:llm-d-session", {"Cookie": "llm-d-session=cG9k"}),
        ("Set-Cookie", {"Cookie": "llm-d-session=cG9k; other=1"}),
        ("cookie:absent", {}),
    ],
)
def test_what_the_first_response_gives_is_sent_back(capture: str, sent_back: dict[str, str]) -> None:
    """Only in the same session, in any spelling of the header, and until the last turn has ended."""
    identity = SessionIdentity((), (capture,))
    assert identity.headers(turn(0), "run") == {}
    identity.capture(turn(0), HEAD, last=False)
    assert identity.headers(turn(1), "run") == sent_back
    identity.capture(turn(1), b"HTTP/1.1 200 OK", last=False)
    assert identity.headers(turn(2), "run") == sent_back
    assert identity.headers(turn(0, 9), "run") == {}
    identity.capture(turn(2), HEAD, last=True)
    assert identity.headers(turn(3), "run") == {}


def test_a_later_cookie_replaces_the_first() -> None:
    """A router may move a session to another server."""
    identity = SessionIdentity(("llm-d",))
    for value in (b"one", b"two"):
        identity.capture(turn(0), b"HTTP/1.1 200 OK\r\nSet-Cookie: llm-d-session=" + value, last=False)
    assert identity.headers(turn(1), "run") == {"Cookie": "llm-d-session=two"}


def test_names_are_checked() -> None:
    """Names of routers and headers pass, and text that no header can have is refused."""
    assert check_session_headers((*ROUTERS, "X-A")) == (*ROUTERS, "X-A")
    assert check_captures(("X-A", "cookie:a")) == ("X-A", "cookie:a")
    for check in (check_session_headers, check_captures):
        for name in ("", "X A", "X-A: b"):
            with pytest.raises(ValueError, match="must be the name"):
                check((name,))
