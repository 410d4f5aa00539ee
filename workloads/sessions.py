"""Multi-turn sessions: each turn asks on top of all that was said, so it can only be sent when the last one ended.

A Conversation is a value. `request` says what to send, `after(answer)` gives the Conversation with the next turn, or
None when it is over. The driver calls them; nothing here waits or reads a clock.

    turn 0: question            --> answer
    turn 1: question answer question           (think_ns later)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from loadgen.workloads import datasets
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import (
    format_duration,
    parse_duration_ns,
    parse_integer,
    parse_options,
    parse_path_and_options,
)

if TYPE_CHECKING:
    from loadgen.workloads.workload import Prompts

TURNS_LIMIT = 1_000
TRANSCRIPT_LIMIT = 16 * 1024 * 1024
"""Characters; a conversation that has grown past it ends instead of asking on."""


class Turn(msgspec.Struct, frozen=True):
    """What the human says, and how long the answer shall be."""

    question: str
    input_tokens: int
    """Tokens of the question when it is sent alone, as the server counts them; 0 where that is never needed."""
    output_tokens: int


class Conversation(msgspec.Struct, frozen=True):
    """A session at one of its turns."""

    first_id: int
    """Request id of turn 0; the others follow it."""
    turns: tuple[Turn, ...]
    think_ns: int
    """From the end of an answer to the sending of the next turn."""
    chat: bool = False  # what was said goes along as messages, not as one text
    answers: tuple[str, ...] = ()
    """As they came; the next turn is the first one without."""
    request_fields: Mapping[str, Any] = {}
    """What each of its Requests has besides."""

    def request(self) -> Request:
        """What to send in this turn. The length of a later turn is 0, not known: it holds answers that nobody has
        counted, and counting them now would disturb the run. The server reports it."""
        number = len(self.answers)
        prompt, past = self.turns[number].question, list(zip(self.turns, self.answers, strict=False))
        messages: tuple[tuple[str, str], ...] = ()
        if self.chat:
            said = [each for turn, answer in past for each in (("user", turn.question), ("assistant", answer))]
            messages = (*said, ("user", prompt))
        else:
            prompt = "".join([*(f"{turn.question}{answer}\n" for turn, answer in past), prompt])
        input_tokens = 0 if number else self.turns[0].input_tokens
        return replace(self._bare(number), prompt=prompt, input_tokens=input_tokens, messages=messages)

    def remaining_requests(self) -> Iterator[Request]:
        """The turns after this one, by id and length asked for; their prompts are not known and empty."""
        return map(self._bare, range(len(self.answers) + 1, len(self.turns)))

    def after(self, answer: str) -> Conversation | None:
        """The conversation after the server's answer to this turn; None when there is no further turn. What was sent
        and the answer stand unchanged at the start of the next prompt, so a prefix cache can help."""
        answers = (*self.answers, answer)
        said = sum(map(len, answers)) + sum(len(turn.question) for turn in self.turns[: len(answers)])
        if len(answers) == len(self.turns) or said > TRANSCRIPT_LIMIT:
            return None
        return replace(self, answers=answers)

    def _bare(self, number: int) -> Request:
        turn = self.turns[number]
        return Request(
            self.first_id + number, "", 0, turn.output_tokens, session=self.first_id, turn=number, **self.request_fields
        )


class MultiTurn(msgspec.Struct, frozen=True):
    """Sessions of several turns: `turns` synthetic ones, without end, or those of the file at `path`, once."""

    turns: int | None
    path: Path | None
    think_ns: int = 0

    def samples(self) -> Iterator[tuple[datasets.Sample, ...]] | None:
        """Return the dialogues of the file, in their order; None for synthetic sessions."""
        return None if self.path is None else datasets.sharegpt(self.path)

    def conversations(self, prompts: Prompts) -> Iterator[Conversation]:
        """The sessions, each at its first turn; request ids run on from one to the next. Raises as Dataset does."""
        first_id = 0
        for turns in self._synthetic(prompts) if self.path is None else self._recorded(self.path, prompts):
            yield Conversation(first_id, turns, self.think_ns, prompts.chat, request_fields=prompts.spec.request_fields)
            first_id += len(turns)

    def _synthetic(self, prompts: Prompts) -> Iterator[tuple[Turn, ...]]:
        """Questions of the lengths asked for; a turn's whole prompt is longer by all that was said before."""

        def turn(number: int, input_tokens: int, output_tokens: int) -> Turn:
            question = prompts.prompt(number, input_tokens)
            assert isinstance(question, str)  # an answer comes as text, so that ids would not do
            return Turn(question, input_tokens, output_tokens)

        return zip(*[starmap(turn, prompts.lengths())] * (self.turns or 1), strict=False)

    def _recorded(self, path: Path, prompts: Prompts) -> Iterator[tuple[Turn, ...]]:
        answer_tokens = datasets.answer_tokens(prompts)
        for dialogue in datasets.sharegpt(path):
            yield tuple(
                Turn(sample.prompt, 0 if index else prompts.known(sample.prompt), answer_tokens(sample))
                for index, sample in enumerate(dialogue)
            )

    def __str__(self) -> str:
        which = f"turns={self.turns}" if self.path is None else str(self.path)
        return f"multi-turn:{which}" + (f",think={format_duration(self.think_ns)}" if self.think_ns else "")


def multi_turn(rest: str) -> MultiTurn:
    """What follows `multi-turn:` in a workload. Raises WorkloadError."""
    if rest.startswith("turns="):
        result, path = parse_options(rest.split(","), ("turns", "think")), None
    else:
        name, result = parse_path_and_options(rest, ("think",))
        path = Path(name)
    turns = parse_integer(result["turns"], "turns", 1, TURNS_LIMIT) if "turns" in result else None
    return MultiTurn(turns, path, parse_duration_ns(result.get("think", "0s"), "think", zero=True))
