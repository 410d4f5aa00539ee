"""Events that differ from the one before them in one token's text and in totals that are one larger: most of an answer.
What they say is known without decoding each of them. An answer is decoded without them, and they are added in the end.

    {"choices":[{"text":"   tell   ","finish_reason":null}],"usage":{"total_tokens":   9   ,"completion_tokens":   5  }}
    └──── opening ─────┘└─ text ─┘└────────────────────── closing, of 5 tokens ─────────────────────────────────────┘

JSON stays valid, and says the same otherwise, when a string in it takes the place of another, or a number of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from operator import add, eq, sub
from typing import Any, Protocol, TypeVar

import msgspec

from loadgen.servers.backends.dialect import Answer
from loadgen.servers.backends.stream_events import decode_events


class Counted(Protocol):
    """An event of a stream, as far as it matters here: `totals` may have a total of tokens, `completion_tokens`."""

    @property
    def totals(self) -> Any: ...


Event = TypeVar("Event", bound=Counted)

MAX_SHORT_RUNS, SHORT_RUN = 4, 8
"""After so many runs of fewer events that are alike, the rest of an answer is decoded one by one."""
_STRING = rb'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})+'
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content)": ?"(' + _STRING + rb')(?=")')
_TOTAL = re.compile(rb'("(?:total|completion)_tokens": ?)([1-9][0-9]{0,15})(?=[,}])')
_ONLY_STRING, _SPECIAL = re.compile(_STRING), bytes([*range(0x20), *b'"\\'])
_TOKENS_MOST = 8_192  # Of so long an answer the closings are made; of a longer one the rest is decoded one by one


def drop_repeats(
    payloads: Sequence[bytes], decoder: msgspec.json.Decoder[Event], one_token: Callable[[Event], bool]
) -> tuple[Sequence[bytes], list[Event], list[int], str]:
    """The payloads that are not like the one before them, the first two in any case; their events, whose totals leave
    out the others; how many others follow each; and what is wrong with the first that is no event, behind which
    nothing is looked at. `one_token` says whether an event holds just one, which its text alone shows."""
    retained, events, runs, short, broken = list[bytes](), list[Event](), list[int](), 0, ""
    while not broken and (at := len(retained) + sum(runs)) < len(payloads):
        one = short < MAX_SHORT_RUNS and len(payloads) - at > SHORT_RUN
        result, broken = decode_events(payloads[at : at + 1] if one else payloads[at:], decoder, at)
        first = result[0].totals if one and result else None
        total = None if first is None else first.completion_tokens
        for totals in [event.totals for event in result] if at > len(retained) else ():
            if totals is not None and totals.completion_tokens is not None:
                totals.completion_tokens -= at - len(retained)
        retained += payloads[at : at + 1] if one and not broken else payloads[at:]
        events += result
        runs += [0] * (len(retained) - len(runs))
        if one and at and not broken:
            runs[-1] = count_repeats(payloads, at, total) if one_token(result[0]) else 0
            short += runs[-1] < SHORT_RUN
    return retained, events, runs, broken


def restore_repeats(answer: Answer, runs: Sequence[int]) -> Answer:
    """The answer with a token for each of the events that were left out."""
    if not any(runs):
        return answer
    tokens = list[int]()
    for held, run in zip(answer.tokens, runs, strict=True):
        tokens += [held] + [1] * run
    answer.tokens = tokens
    if answer.end_event is not None:
        answer.end_event += sum(runs[: answer.end_event])
    return answer


def count_repeats(payloads: Sequence[bytes], first: int, total: int | None) -> int:
    """How many events right behind `first`, which holds one token, are like it but for a text that is not empty and,
    where it says the `total` of tokens so far, for totals that grow by one. At times fewer are found, never more."""
    payload, behind = payloads[first], payloads[first + 1 :]
    if (text := _TEXT.search(payload)) is None:
        return 0
    opening = payload[: text.start(1)]
    constant, *totals = _TOTAL.split(payload[text.end(1) :].replace(b"%", b"%%"))
    keys, numbers = totals[::3], [*map(int, totals[1::3])]
    told = [number for key, number in zip(keys, numbers, strict=True) if key.startswith(b'"completion')]
    if _TOTAL.search(opening) or told != ([] if total is None else [total]) or len(numbers) > 2 * len(told):
        return 0
    form = constant + b"".join([key + b"%d" + rest for key, rest in zip(keys, totals[2::3], strict=True)])
    begin = (total or 0) + 1
    end = min(begin + len(behind), _TOKENS_MOST)
    closings = _closings(form, tuple([number + 1 - begin for number in numbers]), 1 << end.bit_length())[begin:end]
    behind = behind[: len(closings)]
    texts = [*map(bytes.removesuffix, map(bytes.removeprefix, behind, repeat(opening)), closings)]
    # Of an event that is not alike less is cut off than of one that is, so one sum tells whether all are.
    cut_off = sum(map(len, behind)) - sum(map(len, texts))
    if cut_off != sum(map(len, closings)) + len(behind) * len(opening):
        cut = map(sub, map(len, behind), map(len, texts))
        same = [*map(eq, cut, map(add, map(len, closings), repeat(len(opening))))]
        texts = texts[: same.index(False)]
    together = b"\n".join(texts)
    usual = all(texts) and len(together.translate(None, _SPECIAL)) == len(together) - max(0, len(texts) - 1)
    if usual and _readable(together):
        return len(texts)
    fit = (_ONLY_STRING.fullmatch(text) is not None and _readable(text) for text in texts)
    return next((at for at, fits in enumerate(fit) if not fits), len(texts))


@lru_cache(8)
def _closings(form: bytes, more: tuple[int, ...], count: int) -> list[bytes]:
    """Of 0 to `count` tokens, where `form` has places for numbers that are larger than theirs by so many. Kept, as
    answers to prompts of one length share them."""
    return [form % tuple([at + each for each in more]) for at in range(count)]


def _readable(text: bytes) -> bool:
    """Whether it is UTF-8."""
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False
