"""The shared token: what proves it, what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from loadgen.distributed import TokenError
from loadgen.distributed.protocol import MASTER, WORKER, Handshake, token_of

TOKEN = "a token of the tests"


def handshake(**changes: object) -> Handshake:
    values: dict[str, object] = {
        "token": TOKEN,
        "node": "bench_1",
        "worker_nonce": b"w" * 16,
        "master_nonce": b"m" * 16,
    }
    return Handshake(**(values | changes))  # type: ignore[arg-type]


def test_both_sides_prove_the_same_token() -> None:
    """The proof that one side makes is the one that the other expects of it."""
    assert handshake().is_proof(WORKER, handshake().proof(WORKER))
    assert handshake().is_proof(MASTER, handshake().proof(MASTER))


@pytest.mark.parametrize(
    "changes",
    [
        {"token": "another token entirely"},
        {"node": "bench_2"},
        {"worker_nonce": b"x" * 16},
        {"master_nonce": b"w" * 16},
    ],
)
def test_a_proof_is_of_one_token_and_one_handshake(changes: dict[str, object]) -> None:
    """Another token, another machine's name or a handshake of before proves nothing."""
    assert not handshake().is_proof(WORKER, handshake(**changes).proof(WORKER))


@pytest.mark.parametrize("said", [None, "text", b"", b"\0" * 32, 7])
def test_what_is_no_proof_proves_nothing(said: object) -> None:
    """Whatever a stranger sends in its place, nothing breaks."""
    assert not handshake().is_proof(WORKER, said)


def test_one_side_cannot_answer_with_what_it_heard() -> None:
    """The worker's proof is not the master's: sent back, it proves nothing."""
    assert not handshake().is_proof(MASTER, handshake().proof(WORKER))


def test_sealed_messages_open_on_the_other_side_once() -> None:
    """In their order, each once; a message cannot be sent back to who sealed it."""
    ours, theirs = handshake().channel(WORKER), handshake().channel(MASTER)
    first, second = ours.seal(b"one"), ours.seal(b"two")
    assert (theirs.open(first), theirs.open(second)) == (b"one", b"two")
    for again in (first, second):
        with pytest.raises(TokenError):
            theirs.open(again)
    with pytest.raises(TokenError):
        handshake().channel(WORKER).open(first)


@pytest.mark.parametrize(
    "changed", [{"body": b"other"}, {"number": 2}, {"code": b"\0" * 32}, {"code": None}, {"number": "1"}, {"body": 1}]
)
def test_a_changed_message_does_not_open(changed: Mapping[str, object]) -> None:
    """Body, number and code belong together."""
    sealed = handshake().channel(WORKER).seal(b"one")
    with pytest.raises(TokenError):
        handshake().channel(MASTER).open({**sealed, **changed})


def test_a_short_token_is_none() -> None:
    """It could be guessed from a handshake that somebody heard; without one there is none."""
    assert token_of({}) == ""
    assert token_of({"LOADGEN_TOKEN": TOKEN}) == TOKEN
    with pytest.raises(TokenError, match="16 or more") as raised:
        token_of({"LOADGEN_TOKEN": "secret"})
    assert "openssl rand" in raised.value.hint
    assert "secret" not in str(raised.value)
