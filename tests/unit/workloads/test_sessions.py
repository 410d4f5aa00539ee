"""Sessions turn by turn, as text and as chats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from loadgen.workloads import lengths
from loadgen.workloads.prompts import SharedSpan
from loadgen.workloads.request import Request
from loadgen.workloads.sessions import Conversation, Turn
from loadgen.workloads.workload import MultiTurn, Prompts, WorkloadSpec
from tests.support.dialects import DIALECTS

DATA = Path(__file__).parents[2] / "data"
S = 1_000_000_000
TURNS = (Turn("one two", 2, 3), Turn("four", 0, 2))


def text(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str:
    """As many words."""
    assert not shared
    return " ".join([f"p{number}"] * input_tokens)


def count(words: str) -> int:
    """A word is a token."""
    return len(words.split())


def material(output: str | None = "4", *, chat: bool = False) -> Prompts:
    """Six tokens in."""
    answers = lengths.parse(output) if output else None
    spec = WorkloadSpec(MultiTurn(2, None), lengths.parse("6"), answers, seed=3, n=None)
    return Prompts(spec, text, count, chat=chat)


def after(conversation: Conversation, answer: str) -> Conversation:
    """The next turn, which there must be."""
    following = conversation.after(answer)
    assert following is not None
    return following


def test_each_turn_follows_the_answer_before_it() -> None:
    """The next prompt begins with the prompt sent and the answer that came, unchanged; ids run on."""
    conversation = Conversation(7, TURNS, think_ns=S)
    assert conversation.request() == Request(7, "one two", 2, 3, session=7)
    conversation = after(conversation, " three!")
    assert conversation.request() == Request(8, "one two three!\nfour", 0, 2, session=7, turn=1)
    assert conversation.after("five") is None


def test_a_chat_is_told_who_said_what() -> None:
    """On a chat endpoint every question and answer is a message of its own, the present question the last."""
    conversation = Conversation(7, TURNS, think_ns=S, chat=True)
    assert conversation.request() == Request(7, "one two", 2, 3, messages=(("user", "one two"),), session=7)
    said = (("user", "one two"), ("assistant", " three!"), ("user", "four"))
    assert after(conversation, " three!").request() == Request(8, "four", 0, 2, messages=said, session=7, turn=1)


@pytest.mark.parametrize("server", ["vllm", "tgi", "lightllm", "openai"])
def test_every_chat_dialect_sends_the_messages(server: str) -> None:
    """Messages go out in their order; a Request without any is the same body as one with its prompt as a message."""
    encode = DIALECTS[server, "chat"].encode
    request = after(Conversation(0, TURNS, 0, chat=True), "three").request()
    assert msgspec.json.decode(encode(request, "m"))["messages"] == [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    assert encode(Request(0, "four", 0, 2), "m") == encode(Request(0, "", 0, 2, messages=(("user", "four"),)), "m")


@pytest.mark.parametrize("chat", [False, True])
def test_a_conversation_is_a_value(chat: bool) -> None:
    """Asking for a turn's Request or going on from it changes nothing, so a turn can be asked again."""
    conversation = Conversation(0, TURNS, 0, chat)
    assert conversation.after("x") == conversation.after("x")
    assert conversation.after("x") != conversation.after("y")
    assert conversation.request() == conversation.request()


def test_a_conversation_that_outgrows_its_limit_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers without end does not fill the memory: the session is over instead."""
    monkeypatch.setattr("loadgen.workloads.sessions.TRANSCRIPT_LIMIT", 10)
    assert Conversation(0, TURNS, 0).after("x") is not None
    assert Conversation(0, TURNS, 0).after("x" * 20) is None


def test_synthetic_sessions_number_their_turns() -> None:
    """Each session takes the next K prompts and the next K ids; the questions all differ."""
    found = list(islice(MultiTurn(2, None, S).conversations(material(chat=True)), 3))
    assert [conversation.first_id for conversation in found] == [0, 2, 4]
    assert found[1].turns == (Turn(text(2, 6), 6, 4), Turn(text(3, 6), 6, 4))
    assert {(conversation.think_ns, conversation.chat) for conversation in found} == {(S, True)}


def test_recorded_sessions_ask_what_was_asked() -> None:
    """Each dialogue of a ShareGPT-format file is a session, each turn as long as its recorded answer."""
    recorded = MultiTurn(None, DATA / "datasets/sharegpt.json").conversations(material(output=None))
    first, second = recorded
    assert first.turns == (Turn('Name a river, "quoted" [and] {braced}.', 6, 2), Turn("And another one?", 0, 5))
    assert (second.first_id, second.turns) == (2, (Turn("At the sea.", 3, 2),))
