"""Stop strings end an answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from loadgen.servers.simulated.protocol import Completion
from loadgen.servers.simulated.vllm_answers import _withhold_characters

COMPLETION = Completion(False, 4, 4, [300, 301, 302, 303], [b" the", b" cat", b" sat", b" down"], "length")


@pytest.mark.parametrize(
    ("stops", "anywhere", "tokens", "stop", "start"),
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
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    stops: Sequence[str], anywhere: bool, tokens: int, stop: str, start: int
) -> None:
    """The earliest token wins, then the first stop of the list. TGI and LightLLM need it at the end of a token."""
    cut, found_stop, stop_start = COMPLETION.cut_at_stop(stops, "stop", anywhere=anywhere)
    assert (cut.output_tokens, found_stop, stop_start) == (tokens, stop, start)
    assert cut.finish_reason == ("stop" if stop else "length")


@pytest.mark.parametrize(
    ("length", "withheld", "texts"),
    [
        (17, 0, [b" the", b" cat", b" sat", b" down"]),
        (17, 2, [b" t", b"he c", b"at s", b"at down"]),
        (9, 2, [b" t", b"he c", b"at ", b""]),
        (0, 5, [b"", b"", b"", b""]),
    ],
)
def test_text_that_a_stop_string_may_still_cut_is_withheld(length: int, withheld: int, texts: list[bytes]) -> None:
    """The last characters wait for the next token. The last token sends the rest, and nothing after the stop."""
    assert _withhold_characters(COMPLETION.texts, length, withheld) == texts
