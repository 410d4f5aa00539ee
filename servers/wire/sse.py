"""Server-sent events as a pure function: a whole body in, event payloads and where each event ended out.

Follows the WHATWG HTML standard, section 9.2.6 "Interpreting an event stream", for the `data` field; `event`,
`id` and `retry` say nothing about an answer and are passed over. The one difference: an event that the body
cuts short is not dropped silently but handed back as `rest`.

        data: {"a":1}⏎⏎: keep-alive⏎⏎data: {"b":2}⏎⏎data: {"c
        └── event 0 ──┘└─ no event ─┘└── event 1 ──┘└─ rest ┘
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")


def split(body: bytes) -> tuple[list[bytes], list[int], bytes]:
    """The `data` payload of each event, the offset in `body` just past each event's blank line, and the unclosed tail.
    Any bytes are accepted. The usual body (LF, one `data` line per event, nothing else) is split without a loop in
    Python, at about 0.1 us per event; anything unusual anywhere sends the whole body the exact way, at about 1 us."""
    return _split_usual(body) or _split_exact(body)


def of_chunks(raw: bytes, bounds: Sequence[int]) -> list[bytes] | None:
    """The payloads where each chunk of `raw`, by the starts and ends of their data, is one event of one `data` line:
    each ends where its chunk does. Each begins with `data: `, and each but the last is known to end with an empty line.
    None where one is not."""
    if not bounds or not raw.startswith(b"\n\n", bounds[-1] - 2):
        return None
    payloads = [raw[start + 6 : end - 2] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    together = b"".join(payloads)  # in which one character is found at ten times the rate at which it is counted
    return None if b"\n" in together or b"\r" in together else payloads


def _split_usual(body: bytes) -> tuple[list[bytes], list[int], bytes] | None:
    """None unless the body is `data` lines and blank lines in turn, all with one space or all without."""
    prefix = b"data: " if body.startswith(b"data: ") else b"data:"
    closed = body.rfind(b"\n\n") + 2
    if closed < 2 or b"\r" in body or not body.startswith(prefix):
        return None
    between = b"\n\n" + prefix
    payloads = body[len(prefix) : closed - 2].split(between)
    # With two line ends for every event accounted for, no payload hides a comment, another field or a second line.
    if body.count(b"\n", 0, closed) != 2 * len(payloads):
        return None
    if len(prefix) == 5 and b"\n\ndata: " in body:
        return None
    step = len(between)
    ends = accumulate([step + len(payload) for payload in payloads])
    return payloads, [*ends], body[closed:]


def _split_exact(body: bytes) -> tuple[list[bytes], list[int], bytes]:
    payloads: list[bytes] = []
    ends: list[int] = []
    data: list[bytes] = []
    closed = start = len(_BYTE_ORDER_MARK) if body.startswith(_BYTE_ORDER_MARK) else 0
    for line_end in _LINE_END.finditer(body, start):
        line = body[start : line_end.start()]
        start = line_end.end()
        if line:
            field, _, value = line.partition(b":")
            if field == b"data":
                data.append(value.removeprefix(b" "))
            continue
        closed = start
        if data:
            payloads.append(b"\n".join(data))
            ends.append(closed)
            data = []
    return payloads, ends, body[closed:]
