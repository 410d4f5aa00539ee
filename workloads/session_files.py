"""The workload `sessions:FILE`: sessions with several requests, read from a trace of agents or chats.

The formats of the file are in loadgen.workloads.session_formats. This module applies the options: which sessions are
replayed, how fast, and how often.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec.structs import replace

from loadgen.workloads.arrival_facts import Arrivals, LoadFacts
from loadgen.workloads.lengths import DEFAULT_OUTPUT_TOKENS
from loadgen.workloads.session_formats import FORMATS, recognise
from loadgen.workloads.session_formats.rows import Options
from loadgen.workloads.session_graph import Edge, SessionGraph, TraceSession
from loadgen.workloads.spec_syntax import (
    NS_PER_S,
    WorkloadError,
    format_duration,
    format_number,
    parse_duration_ns,
    parse_integer,
    parse_number,
    parse_path_and_options,
    round_ratio,
)
from loadgen.workloads.traces import UNITS_NS

if TYPE_CHECKING:
    from loadgen.workloads.workload import Prompts

OPTIONS = ("format", "block_tokens", "unit", "speed", "limit", "idle_cap", "sample", "salt", "loop", "orphans")
BLOCK_TOKENS_MAX = 1 << 20
DAY_NS = 86_400 * NS_PER_S
SPAN_LIMIT_NS = 400 * DAY_NS
"""Maximum time between the starts of the first and the last session. A longer time is probably in another unit."""
SHORT_SPAN_NS, SHORT_SPAN_SESSIONS = 1_000_000, 10
"""If this many sessions start within this time, and not at once, their times are probably in another unit."""
DEFAULT_UNITS = {"mooncake": "ms", "bailian": "s", "weka": "s"}
"""Units of the formats for which the option `unit` states another unit."""
SPEED_LIMIT = 1_000_000
SALT_LENGTH = 64
SYNTAX = (
    "sessions:FILE[,format=F][,block_tokens=N][,unit=U][,speed=X][,limit=N][,idle_cap=T][,sample=P%][,salt=TEXT][,loop=yes]"
    "[,orphans=yes]"
)


class SessionFile(msgspec.Struct, frozen=True):
    """A workload whose sessions are read from a file. Each session is a graph of requests."""

    path: Path
    format: str | None = None
    """Name of the file's format, a key of FORMATS. None: recognised by the first line."""
    block_tokens: int | None = None
    """Number of tokens per block id. None: the number that the format or the file states."""
    unit: str | None = None
    """Unit of the timestamps and delays of the file. None: the unit that the format defines."""
    speed: Fraction = Fraction(1)
    """Factor by which start times and delays are shorter than recorded."""
    limit: int | None = None
    """Maximum number of sessions."""
    idle_cap_ns: int | None = None
    """Maximum of each delay, and of the time between the starts of two sessions. Applied before `speed`."""
    sample: Fraction | None = None
    """Share of the sessions that are replayed, chosen by the seed."""
    salt: str = ""
    """Text that makes the generated prompts differ from those of runs with another salt."""
    loop: bool = False
    """True if the file starts again after its last session."""
    orphans: bool = False
    """True if a request whose parent is not in the file starts a session."""

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Parse the text after `sessions:` in a workload. Raises WorkloadError if it is invalid."""
        name, result = parse_path_and_options(rest, OPTIONS)
        format_name = result.get("format")
        if format_name is not None and format_name not in FORMATS:
            raise WorkloadError(f"format {format_name!r} is not one of {', '.join(FORMATS)}")
        unit = result.get("unit")
        if unit is not None and unit not in UNITS_NS:
            raise WorkloadError(f"unit {unit!r} is not one of {', '.join(UNITS_NS)}")
        salt = result.get("salt", "")
        if len(salt) > SALT_LENGTH:
            raise WorkloadError(f"the salt has {len(salt)} characters, more than {SALT_LENGTH}")
        sample = result.get("sample")
        return cls(
            Path(name),
            format_name,
            parse_integer(result["block_tokens"], "block_tokens", 1, BLOCK_TOKENS_MAX)
            if "block_tokens" in result
            else None,
            unit,
            parse_number(result.get("speed", "1"), "speed", Fraction(1, SPEED_LIMIT), SPEED_LIMIT),
            parse_integer(result["limit"], "limit", 1, 10**9) if "limit" in result else None,
            parse_duration_ns(result["idle_cap"], "idle_cap", zero=True) if "idle_cap" in result else None,
            None if sample is None else _parse_share(sample),
            salt,
            _parse_flag(result, "loop"),
            _parse_flag(result, "orphans"),
        )

    @property
    def format_name(self) -> str:
        """The name of the file's format. Raises WorkloadError if the format cannot be recognised."""
        return self.format or recognise(self.path)

    @property
    def has_messages(self) -> bool:
        """True if the requests of the file may contain chat messages, or may continue a conversation with the server's
        answers.

        The prompts of such requests must be texts. Token ids are not enough.
        """
        return FORMATS[self.format_name].has_messages

    def sessions(self, seed: int) -> Iterator[TraceSession]:
        """Yield the sessions to replay, in order of their start times.

        Start times count from the start of the first session. `seed` chooses the sessions if only a sample of them is
        replayed. If `loop` is True, the file starts again after its last session, without end. Raises WorkloadError if
        the file is invalid, or if it contains no session to replay.
        """
        first = True
        offset_ns = 0
        while first or self.loop:
            last_ns = count = 0
            for session in self._once(seed):
                count += 1
                last_ns = session.start_ns
                yield replace(session, start_ns=session.start_ns + offset_ns)
            if not count:
                raise WorkloadError(f"{self.path}: no session to replay", "use another file, or a larger sample")
            first = False
            offset_ns += last_ns + last_ns // max(1, count - 1)  # one more mean gap, before the file starts again

    def samples(self) -> Iterator[TraceSession]:
        """Yield each session of the file once, even with the option `loop`. Callers use this to count and check the
        sessions.
        """
        return replace(self, loop=False).sessions(0)

    def _once(self, seed: int) -> Iterator[TraceSession]:
        loader = FORMATS[self.format_name].sessions
        recorded = loader(self.path, Options(self.block_tokens, self.unit, self.orphans))
        chosen = (session for session in recorded if self._is_chosen(session.name, seed))
        before_ns = start_ns = first_ns = None
        count = 0
        for session in islice(chosen, self.limit):
            count += 1
            if before_ns is None or start_ns is None or first_ns is None:
                start_ns = 0
                first_ns = session.start_ns
            elif session.start_ns < before_ns:
                raise WorkloadError(
                    f"{self.path}: session {session.name!r} starts before the one above", "sort the file"
                )
            else:
                start_ns += self._capped(session.start_ns - before_ns)
            before_ns = session.start_ns
            if before_ns - first_ns > SPAN_LIMIT_NS:
                days = (before_ns - first_ns) // DAY_NS
                raise self._implausible(f"session {session.name!r} starts {days:,} days after the first one")
            yield self._adapted(session, start_ns)
        span_ns = (before_ns or 0) - (first_ns or 0)
        if self.unit is None and count >= SHORT_SPAN_SESSIONS and 0 < span_ns <= SHORT_SPAN_NS:
            raise self._implausible(f"its {count:,} sessions start within {span_ns / 1e6:g} ms")

    def _implausible(self, message: str) -> WorkloadError:
        """Return the error for times that are probably in another unit."""
        name = self.format_name
        hint = "correct the times of the file"
        if name in DEFAULT_UNITS:
            used = self.unit or DEFAULT_UNITS[name]
            message += f" if its times are in {used}"
            hint = f"state the unit of its times: {' or '.join(f'unit={unit}' for unit in UNITS_NS if unit != used)}"
        return WorkloadError(f"{self.path}: {message}", hint)

    def _is_chosen(self, name: str, seed: int) -> bool:
        if self.sample is None:
            return True
        return Random(f"{seed}/sample/{name}").random() < self.sample  # noqa: S311 - load, not secrets

    def _capped(self, wait_ns: int) -> int:
        return wait_ns if self.idle_cap_ns is None else min(wait_ns, self.idle_cap_ns)

    def _scaled(self, wait_ns: int) -> int:
        return round_ratio(wait_ns * self.speed.denominator, self.speed.numerator)

    def _adapted(self, session: TraceSession, start_ns: int) -> TraceSession:
        """Return the session with the options `idle_cap` and `speed` applied to its delays and its start time.

        `start_ns` is the start time before `speed` is applied.
        """
        if self.speed == 1 and self.idle_cap_ns is None:
            return replace(session, start_ns=start_ns)
        nodes = tuple(
            replace(
                node,
                edges=tuple(
                    Edge(edge.parent, edge.after, self._scaled(self._capped(edge.delay_ns))) for edge in node.edges
                ),
                tool_ns=self._scaled(self._capped(node.tool_ns)),
            )
            for node in session.nodes
        )
        return TraceSession(session.name, self._scaled(start_ns), nodes)

    def graphs(self, prompts: Prompts) -> Iterator[SessionGraph]:
        """Yield each session with everything that is needed to build its requests. Request ids are consecutive."""
        spec = prompts.spec
        requested = None if spec.output is None else spec.output.tokens(spec.seed, "output")
        first_id = 0
        for session in self.sessions(spec.seed):
            if not prompts.chat:
                self._check_text_only(session)
            if requested is None:
                recorded = (node.output_tokens for node in session.nodes)
                lengths = tuple(DEFAULT_OUTPUT_TOKENS if tokens is None else tokens for tokens in recorded)
            else:
                lengths = tuple(islice(requested, len(session.nodes)))
            yield SessionGraph(
                first_id, session.name, session.nodes, lengths, prompts.prompt, prompts.chat, spec.request_fields
            )
            first_id += len(session.nodes)

    def _check_text_only(self, session: TraceSession) -> None:
        if any(node.messages for node in session.nodes):
            raise WorkloadError(
                f"{self.path}: session {session.name!r} has chat messages, which only a chat endpoint accepts",
                "use --endpoint chat",
            )

    @property
    def description(self) -> str:
        """The name of the file's format, for messages."""
        return FORMATS[self.format_name].title

    @property
    def options(self) -> str:
        """The file name and all options that differ from their defaults, for example `chats.jsonl,speed=2,loop=yes`."""
        extra = [f"format={self.format}"] if self.format else []
        extra += [f"block_tokens={self.block_tokens}"] if self.block_tokens is not None else []
        extra += [f"unit={self.unit}"] if self.unit else []
        extra += [f"speed={format_number(self.speed)}"] if self.speed != 1 else []
        extra += [f"limit={self.limit}"] if self.limit is not None else []
        extra += [f"idle_cap={format_duration(self.idle_cap_ns)}"] if self.idle_cap_ns is not None else []
        extra += [f"sample={format_number(self.sample * 100)}%"] if self.sample is not None else []
        extra += [f"salt={self.salt}"] if self.salt else []
        extra += ["loop=yes"] if self.loop else []
        extra += ["orphans=yes"] if self.orphans else []
        return ",".join([str(self.path), *extra])

    def __str__(self) -> str:
        return f"sessions:{self.options}"


@lru_cache(8)
def count_requests(source: SessionFile, sessions: int, seed: int) -> int:
    """Return the number of requests in the first `sessions` sessions of a file. The file is read once."""
    return sum(len(session.nodes) for session in islice(source.sessions(seed), sessions))


class SessionStarts(Arrivals, frozen=True):
    """Arrivals of sessions at the start times that a session file contains.

    The workload `sessions:FILE` has these arrivals, unless the user states other arrivals.
    """

    source: SessionFile

    SYNTAX = "starts:FILE, the start times of the sessions in a file, with the options of sessions:FILE"

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(SessionFile.parse(rest))

    @property
    def path(self) -> Path:
        """The file with the sessions."""
        return self.source.path

    def due_ns(self, seed: int) -> Iterator[int]:
        """Yield the start time of each session, in ns after the start of the first one.

        Raises WorkloadError for an invalid file.
        """
        return (session.start_ns for session in self.source.sessions(seed))

    @property
    def facts(self) -> LoadFacts:
        return LoadFacts(text=f"as recorded in {self.path.name}", finite=not self.source.loop)

    def __str__(self) -> str:
        return f"starts:{self.source.options}"


def _parse_share(text: str) -> Fraction:
    if not text.endswith("%"):
        raise WorkloadError(f"sample {text!r} is not a share: write sample=10%")
    share = parse_number(text[:-1], "sample", 0, 100) / 100
    if not share:
        raise WorkloadError("a sample of 0% replays no session")
    return share


def _parse_flag(result: dict[str, str], name: str) -> bool:
    value = result.get(name, "no")
    if value not in ("yes", "no"):
        raise WorkloadError(f"{name}={value} is not {name}=yes")
    return value == "yes"
