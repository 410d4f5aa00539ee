"""Framing must not depend on how TCP cut the bytes, nor be fooled by what a body holds."""

from hypothesis import given
from hypothesis import strategies as st

from loadgen.servers.wire.http1 import ProtocolError, ResponseFraming, join_pieces

PIECES = st.lists(
    st.binary(min_size=1, max_size=40) | st.sampled_from([b"\r\n0\r\n\r\n", b"0\r\n\r\n", b"\r\n\r\n", 300 * b"a"])
)


class OneByOne(ResponseFraming):
    """Looks at each chunk by itself."""

    __slots__ = ()

    def _scan_usual(self, raw: bytes | bytearray, offset: int) -> None:
        pass


def chunked(pieces: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@given(PIECES, st.lists(st.integers(1, 200), min_size=1))
def test_any_cut_gives_the_same_body_and_the_same_end(pieces: list[bytes], steps: list[int]) -> None:
    """However the bytes arrive, the body is the same, and the end is seen exactly with the last byte."""
    raw = chunked(pieces)
    framing, position, turn = ResponseFraming(), 0, 0
    while position < len(raw):
        position = min(len(raw), position + steps[turn % len(steps)])
        turn += 1
        assert framing.scan(raw[:position]) == (position == len(raw))
    assert join_pieces(raw, framing.body_bounds(raw)) == b"".join(pieces)


@given(PIECES, st.lists(st.tuples(st.integers(0), st.binary(max_size=2)), max_size=3), st.integers(0))
def test_chunks_looked_at_all_at_once_are_those_of_the_exact_way(
    pieces: list[bytes], faults: list[tuple[int, bytes]], cut: int
) -> None:
    """Also where the bytes are not what they should be."""
    raw = bytearray(chunked(pieces))
    for place, fault in faults:
        at = place % len(raw)
        raw[at : at + 1] = fault
    del raw[len(raw) - cut % len(raw) :]
    found: list[tuple[object, ...]] = []
    for kind in (ResponseFraming, OneByOne):
        framing = kind()
        try:
            found.append((framing.scan(raw), framing.bounds, framing.body_bounds(raw)))
        except ProtocolError as error:
            found.append((str(error), framing.status, None))
    assert found[0] == found[1]


@given(PIECES, st.data())
def test_the_cheap_check_before_a_scan_never_misses_an_end(pieces: list[bytes], data: st.DataObject) -> None:
    """Every read that completes a chunked body ends in an empty line or is shorter than five bytes."""
    raw = chunked(pieces)
    last_read = raw[data.draw(st.integers(0, len(raw) - 1)) :]
    assert last_read[-4:] == b"\r\n\r\n" or len(last_read) < 5
