"""The ring's stamps held against the socket's, in every run: an instrument that checks itself."""

from __future__ import annotations

from collections.abc import Sequence


def off(arrivals: Sequence[int], stamps: Sequence[int], closed_ns: int) -> list[int]:
    """By how many ns, as bit lengths, arrivals that are known differ from another's stamps of them. A FIN, which came
    at `closed_ns`, lends its stamp to the last bytes when it is read with them."""
    both = zip(arrivals, stamps, strict=True)
    return [min(abs(ours - stamp), abs(closed_ns - stamp)).bit_length() for ours, stamp in both if ours >= 0]
