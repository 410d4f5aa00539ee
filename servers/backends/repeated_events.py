"""Finds repeated events in the stream of a response, so that most events need not be decoded.

A repeated event differs from the event before it in two points only: its text, which is one token, and its running
totals, which are larger by one. Repeated events are removed before a response is decoded, and their tokens are added to
the result afterwards. Here is an event:

    {"choices":[{"text":"   tell   ","finish_reason":null}],"usage":{"total_tokens":   9   ,"completion_tokens":   5  }}
    └──── opening ─────┘└─ text ─┘└─────────────────── closing, for 5 tokens ───────────────────────────────────────┘

The next event is a repeated event if it is equal to this event, apart from its text and the totals 10 and 6.

Repeated events are found by comparing bytes. This is safe: if one string or number in a JSON text is replaced by
another string or number, the text stays valid, and its other content does not change.
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
    """An event that may report a running total of generated tokens, in `totals.completion_tokens`."""

    @property
    def totals(self) -> Any: ...


Event = TypeVar("Event", bound=Counted)

SHORT_RUN = 8
"""Minimum number of repeated events for which the search saves time. A run of fewer events is a short run."""
MAX_SHORT_RUNS = 4
"""After this many short runs the rest of a response is decoded event by event."""
MAX_TOTAL = 8_192
"""Largest running total for which the search works. The rest of a longer response is decoded event by event."""
_STRING = rb'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})+'
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content)": ?"(' + _STRING + rb')(?=")')
_TOTAL = re.compile(rb'("(?:total|completion)_tokens": ?)([1-9][0-9]{0,15})(?=[,}])')
_ONLY_STRING = re.compile(_STRING)
_NEEDS_ESCAPE = bytes([*range(0x20), *b'"\\'])
"""Bytes that a JSON string contains only in escaped form."""


def drop_repeats(
    payloads: Sequence[bytes], decoder: msgspec.json.Decoder[Event], is_plain_token: Callable[[Event], bool]
) -> tuple[Sequence[bytes], list[Event], list[int], str]:
    """Decode the payloads of a response, but skip each event that repeats the event before it.

    An event repeats another event if it differs only in its text and in its running totals. Events are skipped only
    after an event for which `is_plain_token` returns True. Such an event stands for exactly one token, and contains
    nothing about this token except its text. The result has four parts:

    - The retained payloads, which always include the first two.
    - The decoded events of these payloads. Their running totals do not include the tokens of skipped events.
    - The number of events that were skipped after each retained event.
    - A description of the first unreadable event ("" if there is none). Payloads after this event are retained, but not
      decoded.
    """
    retained: list[bytes] = []
    events: list[Event] = []
    runs: list[int] = []
    short_runs = 0
    broken = ""
    index = 0
    while not broken and index < len(payloads):
        search = short_runs < MAX_SHORT_RUNS and len(payloads) - index > SHORT_RUN
        batch = payloads[index : index + 1] if search else payloads[index:]
        decoded, broken = decode_events(batch, decoder, index)
        if broken and search:  # the description may need the server's error in a later payload
            decoded, broken = decode_events(payloads[index:], decoder, index)
        first_totals = decoded[0].totals if search and decoded else None
        stated_total = None if first_totals is None else first_totals.completion_tokens
        dropped = index - len(retained)
        if dropped:
            for totals in [event.totals for event in decoded]:
                if totals is not None and totals.completion_tokens is not None:
                    totals.completion_tokens -= dropped
        retained += payloads[index:] if broken else batch
        events += decoded
        runs += [0] * (len(retained) - len(runs))
        if search and index and not broken:
            run = count_repeats(payloads, index, stated_total) if is_plain_token(decoded[0]) else 0
            runs[-1] = run
            short_runs += run < SHORT_RUN
        index = len(retained) + sum(runs)
    return retained, events, runs, broken


def restore_repeats(answer: Answer, runs: Sequence[int]) -> Answer:
    """Return the answer with one token added for each event that `drop_repeats` dropped.

    `runs[i]` is the number of events that were dropped after the retained event i. The position of the end event is
    corrected too.
    """
    if not any(runs):
        return answer
    tokens = list[int]()
    for retained_tokens, run in zip(answer.tokens, runs, strict=True):
        tokens += [retained_tokens] + [1] * run
    answer.tokens = tokens
    if answer.end_event is not None:
        answer.end_event += sum(runs[: answer.end_event])
    return answer


def count_repeats(payloads: Sequence[bytes], first: int, total: int | None) -> int:
    """Return how many of the events directly after `payloads[first]` repeat this event.

    An event is a repeat if it differs from `payloads[first]` only in its text and in its running totals of tokens. The
    event `payloads[first]` must stand for one token. `total` is its running total, or None if the events have no
    running totals.

    The count ends at the first event that meets one of these conditions:

    - It differs from `payloads[first]` in anything else.
    - Its text is empty.
    - Its running total is not one more than that of the event before it.

    The result may be too small, but is never too large.
    """
    payload = payloads[first]
    following = payloads[first + 1 :]
    text = _TEXT.search(payload)
    if text is None:
        return 0
    opening = payload[: text.start(1)]
    constant, *totals = _TOTAL.split(payload[text.end(1) :].replace(b"%", b"%%"))
    keys = totals[::3]
    numbers = [*map(int, totals[1::3])]
    completion_totals = [number for key, number in zip(keys, numbers, strict=True) if key.startswith(b'"completion')]
    expected_totals = [] if total is None else [total]
    if _TOTAL.search(opening) or completion_totals != expected_totals or len(numbers) > 2 * len(completion_totals):
        return 0
    template = constant + b"".join([key + b"%d" + rest for key, rest in zip(keys, totals[2::3], strict=True)])
    begin = (total or 0) + 1
    end = min(begin + len(following), MAX_TOTAL)
    offsets = tuple([number + 1 - begin for number in numbers])
    closings = _closings(template, offsets, 1 << end.bit_length())[begin:end]
    following = following[: len(closings)]
    texts = [*map(bytes.removesuffix, map(bytes.removeprefix, following, repeat(opening)), closings)]
    # Fewer bytes are removed from an event that is no repetition. Comparing the sums therefore checks all events.
    removed_bytes = sum(map(len, following)) - sum(map(len, texts))
    if removed_bytes != sum(map(len, closings)) + len(following) * len(opening):
        removed = map(sub, map(len, following), map(len, texts))
        repeats = [*map(eq, removed, map(add, map(len, closings), repeat(len(opening))))]
        texts = texts[: repeats.index(False)]
    # Usually no text contains a byte that needs an escape, and all texts can be checked together: `translate` then
    # removes only the newlines between the texts.
    joined = b"\n".join(texts)
    newlines = max(0, len(texts) - 1)
    plain = all(texts) and len(joined.translate(None, _NEEDS_ESCAPE)) == len(joined) - newlines
    if plain and _is_utf8(joined):
        return len(texts)
    valid = (_ONLY_STRING.fullmatch(text) is not None and _is_utf8(text) for text in texts)
    return next((index for index, is_valid in enumerate(valid) if not is_valid), len(texts))


@lru_cache(8)
def _closings(template: bytes, offsets: tuple[int, ...], count: int) -> list[bytes]:
    """Return the bytes after the text in an event, for every number of generated tokens from 0 to `count` - 1.

    These bytes contain token counts that grow during the response, such as `"completion_tokens":5`. `template` contains
    a `%d` in place of each token count. The i-th `%d` is replaced by the number of generated tokens plus `offsets[i]`.

    The list is cached, because responses to prompts of equal length need the same list.
    """
    return [template % tuple([total + offset for offset in offsets]) for total in range(count)]


def _is_utf8(text: bytes) -> bool:
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False
