"""Where stop strings end an answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from loadgen.servers.simulated.protocol import Completion
from loadgen.servers.simulated.vllm_answers import _withhold_characters

SAID = Completion(False, 4, 4, [300, 301, 302, 303], [b" the", b" cat", b" sat", b" down"], "length")


@pytest.mark.parametrize(
    ("stops", "anywhere", "tokens", "stop", "place"),
    [
        (["sat"], True, 3, "sat", 9),
        (["sat"], False, 3, "sat", 9),
        (["cat s"], True, 3, "cat s", 5),
        (["cat s"], False, 4, "", 17),
        (["dog", "ca"], True, 2, "ca", 5),
        (["t sat", " s", "sat"], True, 3, "t sat", 7),
        (["dog"], True, 4, "", 17),
        ([], True, 4, "", 17),
    ],
)
def test_an_answer_ends_with_the_token_that_completes_a_stop(
    stops: Sequence[str], anywhere: bool, tokens: int, stop: str, place: int
) -> None:
    """The earliest token, then the first stop of the list; TGI and LightLLM want the stop at the end of a token."""
    ended, found, begins = SAID.cut_at_stop(stops, "stop", anywhere=anywhere)
    assert (ended.output_tokens, found, begins) == (tokens, stop, place)
    assert ended.finish_reason == ("stop" if stop else "length")


@pytest.mark.parametrize(
    ("length", "back", "texts"),
    [
        (17, 0, [b" the", b" cat", b" sat", b" down"]),
        (17, 2, [b" t", b"he c", b"at s", b"at down"]),
        (9, 2, [b" t", b"he c", b"at ", b""]),
        (0, 5, [b"", b"", b"", b""]),
    ],
)
def test_text_that_a_stop_may_yet_cut_is_held_back(length: int, back: int, texts: list[bytes]) -> None:
    """So many characters wait for the next token, all are there at the end, and none past the stop."""
    assert _withhold_characters(SAID.texts, length, back) == texts
