"""Multi-turn sessions: each turn asks on top of all that was said, so it can only be sent when the last one ended.

A Conversation is a value. `request` says what to send, `after(answer)` gives the Conversation with the next turn, or
None when it is over. The driver calls them; nothing here waits or reads a clock.

    turn 0: question            --> answer
    turn 1: question answer question           (think_ns later)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from workloads.datasets import Dialogue
from workloads.request import Request

TRANSCRIPT_LIMIT = 16 * 1024 * 1024
"""Characters; a conversation that has grown past it ends instead of asking on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the human says, and how long the answer shall be."""

    question: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A session at one of its turns."""

    first_id: int
    """Request id of turn 0; the others follow it."""
    turns: tuple[Turn, ...]
    think_ns: int
    """From the end of an answer to the sending of the next turn."""
    turn: int = 0
    transcript: str = ""
    """All that was said before this turn, questions and answers as they came."""

    def request(self, count: Callable[[str], int]) -> Request:
        """What to send in this turn; `count` gives a prompt's tokens as the server counts them."""
        turn = self.turns[self.turn]
        prompt = self.transcript + turn.question
        return Request(self.first_id + self.turn, prompt, count(prompt), turn.output_tokens)

    def after(self, answer: str) -> Conversation | None:
        """The conversation after the server's answer to this turn; None when there is no further turn.

        The prompt sent and the answer stand unchanged at the start of the next prompt, so a prefix cache can help.
        """
        transcript = f"{self.transcript}{self.turns[self.turn].question}{answer}\n"
        if self.turn + 1 == len(self.turns) or len(transcript) > TRANSCRIPT_LIMIT:
            return None
        return replace(self, turn=self.turn + 1, transcript=transcript)


def conversations(sessions: Iterable[tuple[Turn, ...]], think_ns: int) -> Iterator[Conversation]:
    """One Conversation per session, with request ids that run on from one to the next."""
    first_id = 0
    for turns in sessions:
        yield Conversation(first_id, turns, think_ns)
        first_id += len(turns)


def recorded(dialogues: Iterable[Dialogue], count: Callable[[str], int]) -> Iterator[tuple[Turn, ...]]:
    """Sessions that ask what a dataset's humans asked, each for as many tokens as the recorded answer has."""
    for dialogue in dialogues:
        yield tuple(Turn(sample.prompt, max(1, count(sample.answer))) for sample in dialogue.turns)
