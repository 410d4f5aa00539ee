"""Prepares a run of `requests:FILE`, whose requests are sent exactly as they are in the file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from loadgen.errors import PlanError
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.dialect import JSON_TYPE
from loadgen.servers.backends.raw_bodies import STREAM, USAGE, complete_body, dialect_for_path
from loadgen.workloads.arrival_processes import RecordedTimes
from loadgen.workloads.raw_requests import RawLine, RawRequests

if TYPE_CHECKING:
    from loadgen.plan import Plan
    from loadgen.servers.backends.base import ServerFacts
    from loadgen.servers.backends.dialect import Dialect


class RawFacts(msgspec.Struct):
    """Facts about the requests of a `requests:FILE` workload.

    `dialects` contains the protocol of each URL path in the file. The other fields count all requests, the request
    bodies to which loadgen adds a field, and the requests whose responses are not streamed.
    """

    dialects: dict[str, Dialect] = {}
    """Dialects by path in the file. The path in the dialect may also have the query of the server's URL."""
    requests: int = 0
    added_stream: int = 0
    """Number of bodies to which `stream` is added."""
    added_usage: int = 0
    """Number of bodies to which `stream_options` is added."""
    not_streamed: int = 0
    """Number of bodies with `"stream": false`, and of requests to paths that generate a response in one piece."""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the file of requests, for the header of the run. Empty if the workload has no such file."""
        if not self.requests:
            return {}
        added = {"stream": self.added_stream, "stream_options": self.added_usage}
        return {"added_fields": added, "not_streamed": self.not_streamed}

    def lines(self, plan: Plan) -> Iterator[str]:
        """Yield lines of text for the user about the requests of a `requests:FILE` workload.

        The first line states which fields loadgen adds to the request bodies, and to how many bodies. If some responses
        are not streamed, a second line states their number. For other workloads, there are no lines.
        """
        if not self.requests:
            return
        counts = {"stream": self.added_stream, "stream_options.include_usage": self.added_usage}
        added = [f"`{name}` is added to {count:,} of {self.requests:,}" for name, count in counts.items() if count]
        yield f"the bodies of {plan.workload_file} are sent as they are; {', '.join(added) or 'no field is added'}"
        if self.not_streamed:
            share = f"{self.not_streamed:,} of {self.requests:,}"
            yield f"{share} responses are not streamed: only their end-to-end latency and their tokens are measured"


def raw_requests_of(plan: Plan) -> RawRequests | None:
    """Return the file of whole requests that a plan sends (`requests:FILE`), or None if the plan has another workload.

    The result also says how the plan uses the file:

    - `recorded_times` is True if the requests are sent at the times in the file.
    - `implied_paths` is True if the plan names neither a URL path nor an endpoint. In this case, the URL path of each
      request determines the format of the request and of its response. If a line of the file has no URL path, the body
      of the request determines the path.
    """
    source = plan.prompt_source
    if not isinstance(source, RawRequests):
        return None
    return replace(
        source,
        recorded_times=isinstance(plan.arrival_process, RecordedTimes),
        implied_paths=not plan.path and plan.endpoint is None,
    )


def first_path(source: RawRequests) -> str:
    """Return the path of the first request of the file `source`.

    The result is "" if the request names no path, or if the file has no request. Raises WorkloadError if the first line
    is malformed.
    """
    first = next(source.entries(), None)
    return "" if first is None else first.request.path


def survey(source: RawRequests, plan: Plan, count: int | None, dialect: Dialect, server: ServerFacts) -> RawFacts:
    """Read the requests of the workload `requests:FILE`, and return facts about them.

    `count` is the number of requests to read, or of sessions if the file has sessions. None means the whole file.
    `dialect` is the format of the requests that name no path. Raises PlanError if the format of a path is not known.
    """
    result = RawFacts()
    for entry in _entries(source, count):
        path = entry.request.path
        if path and path not in result.dialects:
            result.dialects[path] = dialect_of_path(path, source, plan, dialect, server)
        own_dialect = result.dialects[path] if path else dialect
        body, response_dialect = complete_body(entry.request.raw, own_dialect)
        added = body[len(entry.request.raw) - 1 :]
        result.requests += 1
        result.added_stream += STREAM in added
        result.added_usage += USAGE in added
        result.not_streamed += entry.request.output_tokens == 0 and response_dialect.generates_in_one_piece
    return result


def _entries(source: RawRequests, count: int | None) -> Iterator[RawLine]:
    """Return an iterator over the first requests of the file `source`.

    `count` is the maximum number of requests. If the file has sessions, it is the maximum number of sessions instead.
    None means the whole file.
    """
    if source.sessions:
        return chain.from_iterable(islice(source.grouped(), count))
    return islice(source.entries(), count)


def dialect_of_path(path: str, source: RawRequests, plan: Plan, dialect: Dialect, server: ServerFacts) -> Dialect:
    """Return the dialect for the requests to the URL path `path` in the file `source`, which contains whole requests.

    A dialect is the request and response format of an endpoint. If `path` belongs to an endpoint of the server, the
    result is the dialect of this endpoint. For any other path, the result is the dialect that the user has chosen: the
    argument `dialect`.

    Raises PlanError in two cases:

    - `path` belongs to no endpoint, and the user has chosen neither an endpoint nor a path. The format is then unknown.
    - The endpoint takes requests that are not JSON.
    """
    result = dialect_for_path(BACKENDS[plan.server].dialects, path)
    if result is None and source.implied_paths:
        raise PlanError(
            f"{source.path}: {path} is not the path of an endpoint of {plan.server}",
            "Say how its requests and responses look: for example --endpoint chat.",
        )
    if result is not None and result.content_type != JSON_TYPE:
        raise PlanError(
            f"{source.path}: requests to {path} are uploads, whose bodies are not JSON",
            "Use --workload audio:FOLDER, which uploads audio files.",
        )
    query = f"?{server.query}" if server.query and "?" not in path else ""
    return (dialect if result is None else result.variant(server.version)).at(path + query)
