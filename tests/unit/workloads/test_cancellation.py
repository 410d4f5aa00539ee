"""`--cancel`: how its text is read, and which requests it chooses."""

import pytest

from loadgen.workloads.cancellation import parse
from loadgen.workloads.spec_syntax import WorkloadError


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("5% after 2s", "5% after 2s"),
        (" 0.5 %  after  500ms ", "0.5% after 0.5s"),
        ("100% after 20 tokens", "100% after 20 tokens"),
        ("5% after 1 token", "5% after 1 token"),
    ],
)
def test_the_text_is_read_and_printed_back(text: str, canonical: str) -> None:
    """A share, and a time or a number of tokens."""
    assert str(parse(text)) == canonical
    assert str(parse(canonical)) == canonical


MISTAKES = ("5%", "5 after 2s", "5% after", "0% after 2s", "101% after 2s", "5% after 0 tokens", "5% after -1s")


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_gets_a_message(text: str) -> None:
    """The message says what is wrong with the share or the moment."""
    with pytest.raises(WorkloadError):
        parse(text)


def test_the_choice_depends_on_the_seed_and_the_number_alone() -> None:
    """The share is met, the same seed chooses the same requests, and another seed chooses others."""
    cancellation = parse("20% after 2s")
    chosen = [[number for number in range(5_000) if cancellation.chooses(seed, number)] for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert 900 < len(chosen[0]) < 1_100
