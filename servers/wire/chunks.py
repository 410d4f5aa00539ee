"""The chunks of an HTTP/1.1 body, looked at all at once: nobody steps through thousands of them."""

from __future__ import annotations

import numpy as np

_CARRIAGE_RETURN, _LINE_FEED = b"\r\n"
_DIGITS = 4  # Of a chunk's size
_FIRST, _BEFORE, _WEIGHTS = np.array([_DIGITS]), np.arange(-_DIGITS, 0), 16 ** np.arange(_DIGITS)[::-1]
_VALUES = np.array([int(chr(byte), 16) if chr(byte) in "0123456789abcdefABCDEF" else -1 for byte in range(256)])


def usual(raw: bytes | bytearray, position: int) -> tuple[bytes, int]:
    """Of these chunks, up to the first that is not `SIZE CRLF DATA CRLF` with no carriage return in its data: where
    the data of each begins and ends, as 64-bit integers, if the first begins at `position`; and how many bytes they
    take."""
    seen = np.frombuffer(bytes(_DIGITS) + raw, np.uint8)
    returns = np.flatnonzero(seen[_DIGITS:-1] == _CARRIAGE_RETURN) + _DIGITS
    line_ends, data_ends = returns[: len(returns) // 2 * 2].reshape(-1, 2).T
    lengths = line_ends - np.concatenate((_FIRST, data_ends[:-1] + 2))
    digits = _VALUES[seen[line_ends[:, None] + _BEFORE]]
    digits *= lengths[:, None] >= -_BEFORE  # what is before the line counts nothing
    good = (digits @ _WEIGHTS == data_ends - line_ends - 2) & (digits.min(1, initial=0) >= 0)
    good &= (lengths > 0) & (lengths <= _DIGITS) & (data_ends > line_ends + 2)
    good &= (seen[line_ends + 1] == _LINE_FEED) & (seen[data_ends + 1] == _LINE_FEED)
    most = len(good) if good.all() else int(good.argmin())
    if not most:
        return b"", 0
    bounds = np.stack((line_ends[:most] + 2, data_ends[:most]), 1) + (position - _DIGITS)
    return bounds.tobytes(), int(data_ends[most - 1]) + 2 - _DIGITS
