"""Headers that give each session an identity, so that a router can send all of its turns to the same server.

A router needs one of two things. Either the client names the session in a header (`--session-header`), or the router
names the server in its first response (`--session-capture`). In the second case, the client sends the header or cookie
with this name back in later requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from loadgen.workloads.request import Request


class RouterHeaders(msgspec.Struct, frozen=True):
    """The headers that a router uses for sticky sessions."""

    headers: tuple[str, ...] = ()
    """Request headers that name the session, with the value that sub-agents send, such as `X-Session-ID=own`."""
    captures: tuple[str, ...] = ()
    """Response headers or cookies that are sent back."""


ROUTERS = {
    "vllm-router": RouterHeaders(headers=("X-Session-ID",)),
    "dynamo": RouterHeaders(headers=("X-Dynamo-Session-ID=own", "X-Dynamo-Parent-Session-ID=parent-only")),
    "sglang": RouterHeaders(headers=("X-SMG-Routing-Key",)),
    "llm-d": RouterHeaders(captures=("cookie:llm-d-session",)),
}
"""Routers whose names `--session-header` accepts in place of a header.

- vLLM Router: its policy `consistent_hash` reads X-Session-ID first.
- NVIDIA Dynamo: its router reads X-Dynamo-Session-ID if session affinity is on (`--router-session-affinity-ttl-secs`).
  Each sub-agent is a separate session, which names its parent in X-Dynamo-Parent-Session-ID.
- SGLang Model Gateway: its policies `manual` and `consistent_hashing` read X-SMG-Routing-Key.
- llm-d: its session affinity scorer sets the cookie llm-d-session in the first response.
"""
COOKIE = "cookie:"
"""Beginning of a capture that names a cookie, such as `cookie:llm-d-session`."""
SUB_AGENT_VALUES = ("parent", "own", "parent-only")
"""Values that sub-agents send in a header of the session.

- `parent`: the value of the main agent, so that all requests of the session have one value. This is the default.
- `own`: a separate value for each sub-agent.
- `parent-only`: the `own` value of the agent that started the sub-agent. The main agent does not send the header.
"""
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")


def check_session_headers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names` unchanged. Raises ValueError if one of them is not valid.

    A valid name is that of a router, such as `vllm-router`, or of a header, such as `X-Session-ID`. It may be followed
    by `=` and one of SUB_AGENT_VALUES, as in `X-Session-ID=own`.
    """
    for name in names:
        header, equals, value = name.partition("=")
        if not _NAME.fullmatch(header):
            raise ValueError(f"must be the name of a header, such as X-Session-ID, or one of {', '.join(ROUTERS)}")
        if equals and value not in SUB_AGENT_VALUES:
            raise ValueError(f"{value!r} is no value of sub-agents: write {header}=own, =parent or =parent-only")
    return names


def check_captures(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names unchanged if each is the name of a header or of a cookie. Raises ValueError otherwise."""
    for name in names:
        if not _NAME.fullmatch(name.removeprefix(COOKIE)):
            raise ValueError("must be the name of a response header, or a cookie such as cookie:llm-d-session")
    return names


def check_header_name(name: str) -> str:
    """Return `name`, which must be empty or the name of a header. Raises ValueError for any other text."""
    if name and not _NAME.fullmatch(name):
        raise ValueError("must be the name of a response header, such as X-Served-By")
    return name


class SessionIdentity:
    """Provides the request headers that identify each session of a worker process.

    Some of these headers are fixed for a session. Others repeat what the server has sent in earlier responses.
    """

    def __init__(self, headers: Sequence[str] = (), captures: Sequence[str] = ()) -> None:
        """Create an object for the sessions of one worker process.

        - `headers` are the values of `--session-header`: names of request headers that identify the session, or names
          of routers (ROUTERS).
        - `captures` are the values of `--session-capture`: names of response headers or cookies that the client sends
          back."""
        routers = [_router(text) for text in headers]
        self._headers = dict(_header_and_value(text) for router in routers for text in router.headers)
        """For each header, the value that sub-agents send: one of SUB_AGENT_VALUES."""
        self._captures = tuple(dict.fromkeys([*captures, *(name for router in routers for name in router.captures)]))
        self._captured: dict[int, dict[str, str]] = {}
        """Headers that the server has given to each session, by session."""

    def headers(self, request: Request, id_prefix: str) -> dict[str, str]:
        """Return the headers that identify the session of a request.

        A request that belongs to no session gets headers as if it were a session with a single turn.
        """
        if not (self._headers or self._captures):
            return {}
        session = request.id if request.session is None else request.session
        result: dict[str, str] = {}
        for name, scope in self._headers.items():
            agent = {"own": request.agent, "parent-only": request.parent_agent}.get(scope)
            if scope != "parent-only" or agent is not None:
                result[name] = f"{id_prefix}-s{session}" + (f"-a{agent}" if agent not in (None, session) else "")
        return result | self._captured.get(session, {})

    def capture(self, request: Request, head: bytes, *, last: bool) -> None:
        """Store those headers and cookies of a response that the next request of the session must send back.

        `head` is the head of the response. A new value of a header or cookie replaces the old one. If `last` is True,
        this was the last turn of the session, and all values are forgotten.
        """
        if request.session is None or not self._captures:
            return
        if last:
            self.forget(request.session)
            return
        fields = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
        received = [(name.decode("latin-1").lower(), value.strip().decode("latin-1")) for name, _, value in fields]
        before = self._captured.get(request.session, {})
        changed = before | _headers_to_send(received, self._captures, before)
        if changed:
            self._captured[request.session] = changed

    def forget(self, session: int) -> None:
        """Forget the captured headers of a session that is over."""
        self._captured.pop(session, None)


def _router(text: str) -> RouterHeaders:
    """Return the headers for `text`, a value of `--session-header`.

    The value is the name of a router, such as `dynamo`, or of a header, such as `X-Session-ID`. An optional suffix says
    which value the requests of sub-agents have in this header: `=own`, `=parent` or `=parent-only` (see
    SUB_AGENT_VALUES).
    """
    name, equals, value = text.partition("=")
    known = ROUTERS.get(name)
    if known is None:
        return RouterHeaders(headers=(text,))
    if not equals:
        return known
    headers = tuple(f"{header.partition('=')[0]}={value}" for header in known.headers if "parent-only" not in header)
    return RouterHeaders(headers=headers, captures=known.captures)


def _header_and_value(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value or SUB_AGENT_VALUES[0]


def _headers_to_send(
    received: Iterable[tuple[str, str]], captures: Sequence[str], before: dict[str, str]
) -> dict[str, str]:
    """Return the headers of a response that the next request of the session must send back.

    - `received` contains the headers of the response.
    - `captures` names the headers and cookies to send back.
    - `before` contains the headers that earlier responses of the session have set.

    All cookies are combined in the header `Cookie`, including the cookies in `before` that `received` does not replace.
    Other headers in `before` are not part of the result.
    """
    result: dict[str, str] = {}
    wanted = {name.lower(): name for name in captures if not name.startswith(COOKIE)}
    cookies = dict(pair.split("=", 1) for pair in before.get("Cookie", "").split("; ") if pair)
    wanted_cookies = {name.removeprefix(COOKIE) for name in captures if name.startswith(COOKIE)}
    for name, value in received:
        if name == "set-cookie":
            cookie, equals, content = value.partition(";")[0].strip().partition("=")
            if equals and (cookie in wanted_cookies or "set-cookie" in wanted):
                cookies[cookie] = content
        elif name in wanted:
            result[wanted[name]] = value
    if cookies:
        result["Cookie"] = "; ".join(f"{name}={content}" for name, content in cookies.items())
    return result
