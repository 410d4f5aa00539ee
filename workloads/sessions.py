"""Multi-turn sessions. Each request contains the conversation so far and is sent after the previous response.

A `Conversation` is the immutable state of one session. Its method `request()` returns the request of the current turn.
After the response, `after(answer)` returns the conversation at the next turn, or None at the end. The load driver calls
both methods and waits between the turns.

    turn 0: question                     --> answer
    turn 1: question answer question     --> answer     (sent think_ns after the end of the first answer)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
"""Maximum number of characters of a conversation. A session ends when it exceeds this limit."""


class Session(Protocol):
    """The immutable state of a session, with the methods that the load driver needs.

    The current turn is the turn whose request is sent next.
    """

    @property
    def turns(self) -> Sequence[object]:
        """All turns of the session."""

    def request(self) -> Request:
        """Return the request of the current turn."""

    def remaining_requests(self) -> Iterator[Request]:
        """Yield the requests of the turns after the current turn, with ids and output lengths."""

    def shifted(self, ids: int) -> Session:
        """Return a copy of the session in which the number `ids` is added to every request id."""

    def after(self, answer: str, /) -> Session | None:
        """Return the session at its next turn, or None if the session is over.

        `answer` is the response of the current turn.
        """

    def due_after(self, ended_ns: int) -> int:
        """Return the due time of the current turn, given that the previous response ended at `ended_ns`.

        Both times are in ns from the start of the run."""


class Turn(msgspec.Struct, frozen=True):
    """One turn of a session: the user's question and the requested length of the response."""

    question: str
    input_tokens: int
    """Tokens of the question alone, as the server counts them. 0 if the number is not needed."""
    output_tokens: int


class Conversation(msgspec.Struct, frozen=True):
    """The state of a session: its turns, and the responses received so far."""

    first_id: int
    """Request id of turn 0. The ids of later turns follow it."""
    turns: tuple[Turn, ...]
    think_ns: int
    """Time in ns from the end of a response to the next turn."""
    chat: bool = False  # The conversation is sent as messages instead of one text
    answers: tuple[str, ...] = ()
    """Responses received so far. The current turn is the first one without a response."""
    request_fields: Mapping[str, Any] = {}
    """Additional fields of each Request."""

    def request(self) -> Request:
        """Return the request of the current turn.

        From the second turn on, `input_tokens` of the request is 0 (unknown), because these prompts contain responses.
        Counting their tokens would disturb the run. The server reports the number of prompt tokens in its response."""
        number = len(self.answers)
        turn = self.turns[number]
        past = list(zip(self.turns, self.answers, strict=False))
        if self.chat:
            messages: list[tuple[str, str]] = []
            for earlier, answer in past:
                messages += [("user", earlier.question), ("assistant", answer)]
            messages.append(("user", turn.question))
            return self._request(number, turn.question, tuple(messages))
        transcript = "".join(f"{earlier.question}{answer}\n" for earlier, answer in past)
        return self._request(number, transcript + turn.question)

    def remaining_requests(self) -> Iterator[Request]:
        """Yield the requests of the turns after the current turn, with ids and output lengths.

        Their prompts are empty, because these prompts will contain responses that have not been received yet."""
        return (self._request(number, "") for number in range(len(self.answers) + 1, len(self.turns)))

    def shifted(self, ids: int) -> Conversation:
        """Return a copy of the conversation whose request ids are higher by `ids`."""
        return replace(self, first_id=self.first_id + ids)

    def after(self, answer: str) -> Conversation | None:
        """Return the conversation at its next turn, given the response (`answer`) of the current turn.

        Return None after the last turn, or if the conversation is longer than TRANSCRIPT_LIMIT. The next prompt starts
        with the current prompt and response, both unchanged, so that the server's prefix cache can reuse them."""
        answers = (*self.answers, answer)
        questions = self.turns[: len(answers)]
        characters = sum(map(len, answers)) + sum(len(turn.question) for turn in questions)
        if len(answers) == len(self.turns) or characters > TRANSCRIPT_LIMIT:
            return None
        return replace(self, answers=answers)

    def due_after(self, ended_ns: int) -> int:
        """Return the due time of the current turn, given that the previous response ended at `ended_ns`.

        Both times are in ns from the start of the run."""
        return ended_ns + self.think_ns

    def _request(self, number: int, prompt: str, messages: tuple[tuple[str, str], ...] = ()) -> Request:
        """Return the request of turn `number`, with the text `prompt` or the chat messages `messages`.

        The input length of the request is known only for turn 0, because later prompts contain responses.
        """
        turn = self.turns[number]
        return Request(
            self.first_id + number,
            prompt,
            0 if number else turn.input_tokens,
            turn.output_tokens,
            messages,
            session=self.first_id,
            turn=number,
            **self.request_fields,
        )


class MultiTurn(msgspec.Struct, frozen=True):
    """A workload of multi-turn sessions.

    - If `path` is None, the sessions are synthetic. Each session has `turns` turns, and the number of sessions is not
      limited.
    - Otherwise, each dialogue in the file `path` is one session.

    `think_ns` is the time from the end of a response to the next turn.
    """

    turns: int | None
    path: Path | None
    think_ns: int = 0

    def samples(self) -> Iterator[tuple[datasets.Sample, ...]] | None:
        """Return an iterator over the dialogues of the file in order, or None if the sessions are synthetic."""
        return None if self.path is None else datasets.sharegpt(self.path)

    def conversations(self, prompts: Prompts) -> Iterator[Conversation]:
        """Yield one Conversation per session. It contains no responses yet, so its current turn is turn 0.

        `prompts` contains the settings of the run, and builds the questions of synthetic sessions.

        The turns of a session have consecutive request ids, and the next session continues with the following id. For
        example, if the first session has the ids 0, 1 and 2, the second session begins with id 3.

        Raises WorkloadError if the file with the dialogues is malformed.
        """
        first_id = 0
        for turns in self._synthetic(prompts) if self.path is None else self._recorded(self.path, prompts):
            yield Conversation(first_id, turns, self.think_ns, prompts.chat, request_fields=prompts.spec.request_fields)
            first_id += len(turns)

    def _synthetic(self, prompts: Prompts) -> Iterator[tuple[Turn, ...]]:
        """Yield the turns of each synthetic session. The question of each turn has the requested input length.

        From the second turn on, the prompt is longer than the question, because it also contains the conversation so
        far.
        """

        def turn(number: int, input_tokens: int, output_tokens: int) -> Turn:
            question = prompts.prompt(number, input_tokens)
            assert isinstance(question, str)  # responses are text, so questions cannot be ids
            return Turn(question, input_tokens, output_tokens)

        return zip(*[starmap(turn, prompts.lengths())] * (self.turns or 1), strict=False)

    def _recorded(self, path: Path, prompts: Prompts) -> Iterator[tuple[Turn, ...]]:
        answer_tokens = datasets.answer_tokens(prompts)
        dialogues = partial(datasets.sharegpt, path)
        for dialogue in datasets.repeated(dialogues, repeat=prompts.spec.repeat_file):
            yield tuple(
                Turn(sample.prompt, 0 if index else prompts.count_if_known(sample.prompt), answer_tokens(sample))
                for index, sample in enumerate(dialogue)
            )

    def __str__(self) -> str:
        source = f"turns={self.turns}" if self.path is None else str(self.path)
        return f"multi-turn:{source}" + (f",think={format_duration(self.think_ns)}" if self.think_ns else "")


def multi_turn(rest: str) -> MultiTurn:
    """Parse the text after `multi-turn:` in a workload, such as `turns=4,think=2s` or a file name.

    Raises WorkloadError if the text is invalid."""
    if rest.startswith("turns="):
        result = parse_options(rest.split(","), ("turns", "think"))
        path = None
    else:
        name, result = parse_path_and_options(rest, ("think",))
        path = Path(name)
    turns = parse_integer(result["turns"], "turns", 1, TURNS_LIMIT) if "turns" in result else None
    return MultiTurn(turns, path, parse_duration_ns(result.get("think", "0s"), "think", zero=True))
