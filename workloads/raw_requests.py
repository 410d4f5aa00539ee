"""Reads requests that are sent as they are: `requests:FILE`, JSON Lines with the body of one request per line.

    {"body": {"messages": [...]}, "url": "/v1/chat/completions", "headers": {"X-Tenant": "a"}, "at": 1.25,
     "session": "s1"}

Only `body` is required. Its bytes are sent exactly as the file has them, with the same order of keys and the same white
space. The server's dialect adds a field only if a response could not be measured without the field
(loadgen.servers.backends.raw_bodies).

- `url` is the path of the request. Without `url`, `messages` in the body means `/v1/chat/completions`, and `prompt`
  means `/v1/completions`. Any other body goes to the endpoint of the run.
- `at` is the time in seconds at which the request is due. The first line of the file counts as the start.
- `session` is the name of a session. The requests of a session are sent one after the other: each when the response to
  the previous one has ended, but not before its own `at`.

Lines for OpenAI's batch API (`custom_id`, `method`, `url`, `body`) have the same form. The first line of the file
decides whether all lines have `at`, and whether the file has sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from loadgen.workloads.datasets import ELEMENT_LIMIT, LINE_HINT, error_location, lines, repeated
from loadgen.workloads.http_headers import check_header
from loadgen.workloads.json_values import check_file_text
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import (
    NS_PER_S,
    TOKENS_LIMIT,
    WorkloadError,
    open_text,
    parse_path_and_options,
)

if TYPE_CHECKING:
    from loadgen.workloads.workload import Prompts

AT_LIMIT_S = 400 * 86_400.0
"""Maximum of `at` in seconds, which is more than a year."""
SESSION_CHARACTERS = 200
PATHS_BY_FIELD = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""Paths of lines without `url`, by a field of the body."""


class LineFields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of one line of the file. A line with any other field is refused."""

    body: msgspec.Raw
    url: str = ""
    headers: dict[str, str] = {}
    at: float | None = None
    session: str | int | None = None
    custom_id: str = ""
    expect: str = ""
    method: Literal["POST"] = "POST"


class BodyFields(msgspec.Struct):
    """The fields of a request body that loadgen reads. loadgen does not change them."""

    model: Any = None
    stream: Any = None
    messages: Any = None
    prompt: Any = None
    ignore_eos: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    max_new_tokens: Any = None
    parameters: Any = None
    sampling_params: Any = None
    n: Any = None
    echo: Any = None


class RawLine(NamedTuple):
    """One line of the file: its request, and the time (`at_ns`) and the session that the line states."""

    request: Request
    """The request with the id 0. Its `path` is empty if the line has no `url`."""
    implied_path: str
    """The path that the fields of the body imply, or "" if they imply none."""
    at_ns: int | None
    session: str | int | None
    line: int = 0


_LINES = msgspec.json.Decoder(LineFields)
_BODIES = msgspec.json.Decoder(BodyFields)


def read(path: Path) -> Iterator[RawLine]:
    """Yield the requests of a file in order.

    Raises WorkloadError for a malformed line. Its message names the file and the line, and its hint says what to do."""
    with open_text(path, "the requests") as file:
        first: RawLine | None = None
        last_ns = 0
        for line, text in lines(file, ELEMENT_LIMIT):
            with error_location(f"{path}, line {line}", LINE_HINT):
                check_file_text(text)
                entry = _line(text.strip().encode())._replace(line=line)
                first = first or entry
                _check_like_first(entry, first)
                if entry.at_ns is not None:
                    start_ns = first.at_ns or 0
                    entry = entry._replace(at_ns=entry.at_ns - start_ns)
                    if (entry.at_ns or 0) < last_ns:
                        raise WorkloadError('its "at" is before that of the line above', "sort the lines by time")
                    last_ns = entry.at_ns or 0
            yield entry


def first_line(path: Path) -> RawLine | None:
    """Return the first request of a file, or None if the file has no request or cannot be read."""
    try:
        return next(read(path), None)
    except WorkloadError:
        return None


def _line(text: bytes) -> RawLine:
    """Return the request of one line. Raises ValueError or WorkloadError for an invalid line."""
    try:
        fields = _LINES.decode(text)
        body = bytes(fields.body)
        if not body.startswith(b"{"):
            raise WorkloadError('"body" is not a JSON object', 'write the body of the request: "body": {...}')
        known = _BODIES.decode(body)
    except msgspec.ValidationError as error:
        raise WorkloadError(_problem(str(error)), 'write {"body": {...}, "url": "/v1/chat/completions"}') from None
    except msgspec.DecodeError as error:
        raise WorkloadError(f"is not JSON: {error}", LINE_HINT) from None
    _check_fields(fields)
    _check_one_choice(known)
    _check_no_echo(known)
    whole = known.stream is False
    request = Request(
        0,
        "",
        0,
        0 if whole else _output_tokens(known),
        model=known.model if isinstance(known.model, str) else "",
        path=fields.url,
        headers=fields.headers,
        raw=body,
        ignore_eos=known.ignore_eos is True,
        expect=fields.expect,
    )
    implied_path = next((path for name, path in PATHS_BY_FIELD.items() if getattr(known, name) is not None), "")
    at_ns = None if fields.at is None else round(fields.at * NS_PER_S)
    return RawLine(request, implied_path, at_ns, fields.session)


def _problem(message: str) -> str:
    """Return what is wrong with a line of the file, such as "has the unknown field `at_s`".

    `message` is the error message of msgspec. The result is worded so that it can follow the name of the file and the
    number of the line.
    """
    unknown = message.removeprefix("Object contains unknown field ")
    return f"has the unknown field {unknown}" if unknown != message else f"has a wrong field: {message}"


def _check_fields(fields: LineFields) -> None:
    """Raise WorkloadError if a field of a line has the right type, but a value that cannot be sent."""
    url = fields.url
    if url and not (url.startswith("/") and url.isascii() and url.isprintable() and " " not in url):
        raise WorkloadError(
            f'"url" {url[:80]!r} is not a path',
            "write the path alone, such as /v1/chat/completions; --url names the server",
        )
    for name, value in fields.headers.items():
        check_header(name, value)
    if fields.at is not None and not 0 <= fields.at <= AT_LIMIT_S:
        raise WorkloadError(
            f'"at" {fields.at} is not a time in seconds', "write the seconds since the start, from 0, and no date"
        )
    if isinstance(fields.session, str) and not 0 < len(fields.session) <= SESSION_CHARACTERS:
        raise WorkloadError(
            f'"session" has {len(fields.session)} characters', f"write a name of 1 to {SESSION_CHARACTERS} characters"
        )


def _check_one_choice(body: BodyFields) -> None:
    """Raise WorkloadError if a request asks for several choices (`n`). loadgen measures one response per request."""
    nested = [fields.get("n") for fields in (body.parameters, body.sampling_params) if isinstance(fields, Mapping)]
    for count in (body.n, *nested):
        if type(count) is int and count > 1:
            raise WorkloadError(
                f'"n" is {count}, but a request has one response',
                'remove "n", and write the line once for each response',
            )


def _check_no_echo(body: BodyFields) -> None:
    """Raise WorkloadError if the request sets `echo`.

    The response would begin with the prompt, and the first tokens of the prompt would be measured as generated tokens.
    """
    if body.echo is True:
        raise WorkloadError('"echo" makes the response begin with the prompt, so TTFT would be wrong', 'remove "echo"')


def _check_like_first(entry: RawLine, first: RawLine) -> None:
    """Raise WorkloadError if the optional fields of the line `entry` do not fit those of the file's first line.

    - `at`: must be in every line or in no line.
    - `session`: may be in a line only if it is in the first line too.
    """
    if (entry.at_ns is None) != (first.at_ns is None):
        states = ("has no", "has one") if entry.at_ns is None else ("has an", "has none")
        raise WorkloadError(
            f'{states[0]} "at", but the first line {states[1]}', 'write "at" into every line, or into no line'
        )
    if entry.session is not None and first.session is None:
        raise WorkloadError(
            'has a "session", but the first line has none', 'write "session" into the first line too, or into no line'
        )


def stated_output_tokens(raw: bytes) -> int:
    """Return the maximum length of the response that a body states, or 0 if it states none."""
    return _output_tokens(_BODIES.decode(raw))


def _output_tokens(body: BodyFields) -> int:
    """Return the maximum number of output tokens that a request body states. Return 0 if the body states no maximum."""
    nested = [fields for fields in (body.parameters, body.sampling_params) if isinstance(fields, Mapping)]
    limits = [body.max_completion_tokens, body.max_tokens, body.max_output_tokens, body.max_new_tokens]
    limits += [fields.get("max_new_tokens") for fields in nested]
    return next((limit for limit in limits if type(limit) is int and 0 < limit <= TOKENS_LIMIT), 0)


class RecordedSession(msgspec.Struct, frozen=True):
    """The state of a session whose requests are all known before the run. Responses do not change its requests.

    RecordedSession has the methods of loadgen.workloads.sessions.Conversation, which the load driver calls.
    """

    turns: tuple[Request, ...]
    due_ns: tuple[int, ...] = ()
    """Earliest time of each request in ns from the start of the run. Empty: each is due when the previous has ended."""
    position: int = 0
    """Index of the current request."""

    def request(self) -> Request:
        """Return the current request."""
        return self.turns[self.position]

    def remaining_requests(self) -> Iterator[Request]:
        """Yield the requests after the current one."""
        return iter(self.turns[self.position + 1 :])

    def shifted(self, ids: int) -> RecordedSession:
        """Return a copy of the session whose request ids are higher by `ids`."""
        turns = tuple(replace(turn, id=turn.id + ids, session=(turn.session or 0) + ids) for turn in self.turns)
        return replace(self, turns=turns)

    def after(self, _answer: str) -> RecordedSession | None:
        """Return the session at its next request, or None after the last request.

        The response `_answer` has no effect, because all requests of the session were recorded before the run.
        """
        following = self.position + 1
        return None if following == len(self.turns) else replace(self, position=following)

    def due_after(self, ended_ns: int) -> int:
        """Return the due time of the current request, given that the previous response ended at `ended_ns`.

        Both times are in ns from the start of the run."""
        return max(ended_ns, self.due_ns[self.position]) if self.due_ns else ended_ns


class RawRequests(msgspec.Struct, frozen=True):
    """A workload that sends the requests of a file as they are, in the order of the file.

    If `sessions` is True, requests with the same session name are sent one after the other. A line without a session
    name is a session of one request.
    """

    path: Path
    sessions: bool = False
    recorded_times: bool = False
    """True if later requests of a session wait until their recorded time (`at`)."""
    implied_paths: bool = True
    """True if the body of a line without `url` decides its path. False: it is sent to the endpoint of the run."""

    def entries(self) -> Iterator[RawLine]:
        """Yield the requests of the file in order. Raises WorkloadError if the file is malformed."""
        if not self.implied_paths:
            return read(self.path)
        return (
            entry if entry.request.path else entry._replace(request=replace(entry.request, path=entry.implied_path))
            for entry in read(self.path)
        )

    def samples(self) -> Iterator[object]:
        """Yield one object per request, or one per session if the workload has sessions."""
        return self.grouped() if self.sessions else self.entries()

    def grouped(self) -> Iterator[list[RawLine]]:
        """Yield the requests of each session, in the order in which the sessions begin.

        The requests of a session may be anywhere in the file, so the whole file is read into memory first."""
        groups: dict[object, list[RawLine]] = {}
        for number, entry in enumerate(self.entries()):
            key = ("line", number) if entry.session is None else entry.session
            groups.setdefault(key, []).append(entry)
        return iter(groups.values())

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """Yield the requests with the ids 0, 1, 2, ... Raises WorkloadError if the file is malformed."""
        for number, entry in enumerate(repeated(self.entries, repeat=prompts.spec.repeat_file)):
            yield replace(entry.request, id=number)

    def conversations(self, prompts: Prompts) -> Iterator[RecordedSession]:
        """Yield the sessions of the file in order. Request ids are consecutive over all sessions."""
        first_id = 0
        for group in repeated(self.grouped, repeat=prompts.spec.repeat_file):
            turns = tuple(
                replace(entry.request, id=first_id + turn, session=first_id, turn=turn)
                for turn, entry in enumerate(group)
            )
            due_ns = tuple(entry.at_ns or 0 for entry in group) if self.recorded_times else ()
            yield RecordedSession(turns, due_ns)
            first_id += len(turns)

    def __str__(self) -> str:
        return f"requests:{self.path}" + (",sessions=yes" if self.sessions else "")


def raw_requests(rest: str) -> RawRequests:
    """Parse the text after `requests:` in a workload, such as `log.jsonl` or `log.jsonl,sessions=yes`.

    Raises WorkloadError if the text is invalid."""
    name, options = parse_path_and_options(rest, ("sessions",))
    value = options.get("sessions", "no")
    if value not in ("yes", "no"):
        raise WorkloadError(f"sessions {value!r} is not yes or no")
    return RawRequests(Path(name), value == "yes")
