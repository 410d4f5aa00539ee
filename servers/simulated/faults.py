"""Faults that a simulated server can be told to have, and which request gets which.

Written as `NAME`, `NAME@K`, and in a rule followed by which requests it is for:

    reset@12:3,17     requests number 3 and 17, counted from 0 in order of arrival
    stall=0.01        each request with probability 0.01, drawn from the server's seed and the request's number
    merged@4          every request

K counts tokens sent before the fault happens; half of the answer where it is left out. A client asks for a fault of its
own with the header `X-Simulated-Fault: NAME@K`, which wins over the rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from servers.simulated import ConfigError
from servers.simulated.stream import Ending, Stream

HEADER = "X-Simulated-Fault"

_WRITTEN = re.compile(r"(?P<name>[a-z0-9-]+)(@(?P<at>\d+))?(:(?P<requests>\d+(,\d+)*)|=(?P<probability>\d*\.?\d+))?")


@dataclass(frozen=True, slots=True)
class FaultRule:
    """A fault, and the requests it is for."""

    name: str
    at: int | None = None
    """K."""
    requests: frozenset[int] = frozenset()
    probability: float = 0.0


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a fault changes. All but one field are left as they are."""

    says: str
    """For the documentation."""
    status: int | None = None
    """Answer with this status and the server's own body."""
    refuses: bool = False
    slow_head: bool = False
    lying_length: bool = False
    role_first: bool = False
    stops_early: bool = False
    breaks_json: bool = False
    detour: Callable[..., tuple[list[bytes], int]] | None = None
    """K and the parameters of a Detour to what that gives."""


NONE = Behaviour("")
"""Of a request without a fault."""


def parse_rule(text: str) -> FaultRule:
    """A rule as the command line has it. Raises ConfigError."""
    match = _WRITTEN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a fault: write NAME, NAME@K, NAME:3,17 or NAME=0.01")
    requests = frozenset(map(int, match["requests"].split(","))) if match["requests"] else frozenset()
    probability = 0.0 if requests else float(match["probability"] or 1)
    rule = FaultRule(match["name"], int(match["at"]) if match["at"] else None, requests, probability)
    if problem := problem_of(rule):
        raise ConfigError(problem)
    return rule


def parse_fault(text: str) -> FaultRule:
    """A fault as the header has it, for the one request. Raises ConfigError."""
    if ":" in text or "=" in text:
        raise ConfigError(f"{text!r}: a request's own fault is NAME or NAME@K")
    return parse_rule(text)


def problem_of(rule: FaultRule) -> str | None:
    """What is wrong with a rule; None for nothing."""
    if rule.name not in FAULTS:
        return f"there is no fault {rule.name!r}; there are {', '.join(FAULTS)}"
    if not 0 <= rule.probability <= 1:
        return f"a probability is between 0 and 1, not {rule.probability}"
    return None


def fault_of(rules: Sequence[FaultRule], seed: int, index: int) -> FaultRule | None:
    """The fault of request number `index`: the first rule that is for it. The same seed gives the same faults."""
    random = Random(f"fault/{seed}/{index}") if rules else None  # noqa: S311 - not secret
    for rule in rules:
        if index in rule.requests or (random and random.random() < rule.probability):
            return rule
    return None


def _ends(ending: Ending, at: int, stream: Stream, first: int, tokens: int) -> tuple[list[bytes], int]:
    """Ends the stream after K tokens."""
    shown = max(0, min(tokens, at - first))
    if first + tokens >= at:
        stream.ending = ending
    events = stream.events(first, shown) if shown else []
    if stream.ending == "failed" and stream.completion.streamed:
        events += stream.encoding.failure
    return events, shown


def _malformed(at: int, stream: Stream, first: int, tokens: int) -> tuple[list[bytes], int]:
    """Breaks the event that holds token K (the first, where K is 0); its second half is missing."""
    events = stream.events(first, tokens)
    if events and first < max(1, at) <= first + tokens:
        place = 0 if first else len(stream.encoding.opening)
        events[place] = events[place][: len(events[place]) // 2] + b"\n\n"
    return events, tokens


def _held_back(merges: bool, at: int, stream: Stream, first: int, tokens: int) -> tuple[list[bytes], int]:
    """Holds tokens back until there are K, then sends them at once; with `merges` they share an event where the
    protocol can."""
    held = stream.held
    held.append((first, tokens))
    shown = sum(number for _, number in held)
    if shown < at and first + tokens < stream.total:
        return [], 0
    groups = [(held[0][0], shown)] if merges else held
    events = [event for group in groups for event in stream.events(*group)]
    held.clear()
    return events, shown


FAULTS: dict[str, Behaviour] = {
    "refuse": Behaviour("the connection is reset before a byte of an answer", refuses=True),
    "429": Behaviour("HTTP 429 with the server's own body", status=429),
    "500": Behaviour("HTTP 500 with the server's own body", status=500),
    "503": Behaviour("HTTP 503 with the server's own body", status=503),
    "slow-headers": Behaviour("the response head trickles in over K milliseconds (1000)", slow_head=True),
    "content-length": Behaviour("the head promises more bytes than come before the connection ends", lying_length=True),
    "reset": Behaviour("RST after K tokens", detour=partial(_ends, "reset")),
    "cut": Behaviour(
        "the connection is closed after K tokens, without the terminating chunk", detour=partial(_ends, "cut")
    ),
    "truncate": Behaviour(
        "the body ends after K tokens as HTTP wants it, without the end marker", detour=partial(_ends, "truncated")
    ),
    "stall": Behaviour(
        "nothing more is sent after K tokens; the connection stays open", detour=partial(_ends, "stall")
    ),
    "error": Behaviour(
        "the server's own error event after K tokens, under status 200", detour=partial(_ends, "failed")
    ),
    "malformed": Behaviour("the event with token K is half its JSON", breaks_json=True, detour=_malformed),
    "role-first": Behaviour("chat: the role-only event is sent at once, before any token", role_first=True),
    "merged": Behaviour(
        "K tokens per event where the protocol can, else K events in one send", detour=partial(_held_back, True)
    ),
    "coalesced": Behaviour("the events of K tokens in one send", detour=partial(_held_back, False)),
    "early-stop": Behaviour("the model ends its answer after K tokens", stops_early=True),
}
