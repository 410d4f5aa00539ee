"""Parses `--cancel`, such as `5% after 2s`, and chooses the requests that clients abandon."""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

from loadgen.workloads.random_streams import random_stream
from loadgen.workloads.spec_syntax import (
    TOKENS_LIMIT,
    WorkloadError,
    format_duration,
    format_number,
    parse_duration_ns,
    parse_integer,
    parse_number,
)

SYNTAX = "5% after 2s, or 5% after 20 tokens"
_TEXT = re.compile(r"([\d.]+) ?% +after +(?:(\d+) +tokens?|(\S+))")


class Cancellation(msgspec.Struct, frozen=True):
    """The share of requests that clients abandon, and when they do so. `str()` returns text such as `5% after 2s`.

    A client abandons a request by closing the connection: `after_ns` after the request was sent, or after the first
    `after_tokens` tokens have arrived. Only one of these two fields applies, and the other one is 0. A request that
    ends earlier is not abandoned.
    """

    percent: Fraction
    after_ns: int = 0
    after_tokens: int = 0

    def chooses(self, seed: int, number: int) -> bool:
        """Return True if request `number` is abandoned. The choice depends only on `seed` and `number`."""
        return random_stream(seed, f"cancel/{number}")() * 100 < self.percent

    @property
    def moment(self) -> str:
        """The moment of the disconnect, such as `after 2s` or `after 20 tokens`."""
        if self.after_tokens:
            return f"after {self.after_tokens} token{'' if self.after_tokens == 1 else 's'}"
        return f"after {format_duration(self.after_ns)}"

    @property
    def detail(self) -> str:
        """The error detail of a request that is abandoned."""
        return f"the client gave up on purpose, {self.moment}"

    def __str__(self) -> str:
        return f"{format_number(self.percent)}% {self.moment}"


def parse(text: str) -> Cancellation:
    """Parse the text of `--cancel`. Raises WorkloadError if the text is invalid."""
    result = _TEXT.fullmatch(text.strip())
    if not result:
        raise WorkloadError(f"{text!r} is not a share and a moment", f"write {SYNTAX}")
    share, tokens, duration = result.groups()
    percent = parse_number(share, "share", Fraction(1, 10**6), 100)
    if tokens:
        return Cancellation(percent, after_tokens=parse_integer(tokens, "number of tokens", 1, TOKENS_LIMIT))
    return Cancellation(percent, after_ns=parse_duration_ns(duration, "time"))
