"""Sends canaries (--verify) before, during and after the load, and checks the texts of some responses.

A canary is a prompt with a known answer. The first worker of a run sends the canaries. If the classes of traffic have
different endpoints or models, the first worker of each such class sends its canaries. Canaries use separate
connections. Before and after the load, one canary is in flight at a time. During the load, a few clients send canary
after canary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, cycle
from typing import TYPE_CHECKING

import msgspec

from loadgen.analysis.run.canary import MAX_TEXT, Canary, Moment
from loadgen.analysis.run.record import Record
from loadgen.engine.closed_loop import ClosedLoop, answer_text
from loadgen.engine.request_queue import ScheduledRequest
from loadgen.servers.auth import hide_secrets
from loadgen.servers.backends.dialect import Dialect
from loadgen.workloads.canaries import CanaryPrompt, canary_request
from loadgen.workloads.request import Request

if TYPE_CHECKING:
    from loadgen.engine.driver import Driver
    from loadgen.servers.wire.transport import Exchange

SERIALS = 1_000_000
"""Number of request ids that are reserved for each canary, so that the ids of two workers differ."""
CLIENTS = 8
"""Maximum number of canaries that are in flight together, in addition to the load."""
THINK_NS = 500_000_000
"""Time in ns between an answer and the next canary of the same client."""
DELAY_NS = 20_000_000
"""Time in ns after the start of the load at which the first canaries are sent, so that they do not delay a burst."""
FIRST_CHECKED = 20
CHECKED_EVERY = 20
"""The texts of the first FIRST_CHECKED responses of a worker are checked, and those of every CHECKED_EVERY-th response.
It takes as long to check a text as to decode a response, so checking every text would double this work."""
_MAX_PERIOD = 100
"""Maximum number of characters that repeat in a loop."""
_MIN_REPEATS = 5
_MIN_LOOP = 100
"""Minimum number of characters that a loop fills."""


class CanaryTask(msgspec.Struct, frozen=True):
    """The canaries that one worker sends. A canary is a prompt with a known answer."""

    prompts: Sequence[CanaryPrompt]
    body: dict[str, object]
    """Fields that the user adds to each request."""


class CanaryLoop(ClosedLoop):
    """A closed loop of clients that send canaries (test prompts) during the load. It ends when `stop` is called."""

    stopped = False
    timed = True  # a server that is down is asked again until the load ends

    def stop(self) -> None:
        """Send no further canaries. Canaries in flight continue."""
        self.stopped = True

    def group(self) -> list[ScheduledRequest]:
        """Return the first canary (test prompt) of each client. Return an empty list if `group` or `stop` was called
        before.
        """
        return [] if self.stopped else super().group()

    def next_after_completion(self, ended_ns: int) -> ScheduledRequest | None:
        """Return the next canary for the client whose previous canary was answered at `ended_ns`.

        Return None if the loop has been stopped, or if no canary is left.
        """
        return None if self.stopped else super().next_after_completion(ended_ns)


class CanaryLog:
    """Collects the answers to canaries (prompts with a known answer).

    The answers are kept here until the start time of the run is known, because the run file states times relative to
    it.
    """

    def __init__(self, dialect: Dialect, first_serial: int = 0) -> None:
        """Create an empty log for responses in the format `dialect`.

        The ids of the log's requests follow from serial numbers that begin at `first_serial`. Each worker passes a
        different value, so that no two requests have the same id.
        """
        self.canaries: list[Canary] = []
        """The answers so far, with times of CLOCK_MONOTONIC."""
        self.moment: Moment = "before"
        self._dialect = dialect
        self._serial = count(first_serial)
        self._prompts: dict[int, CanaryPrompt] = {}
        """The canary of each request that has not been answered, by the id of the request."""

    def request(self, prompt: CanaryPrompt, body: Mapping[str, object]) -> Request:
        """Return a new request with the prompt of a canary. `body` holds the fields that the user adds to requests."""
        request = canary_request(prompt, next(self._serial), body)
        self._prompts[request.id] = prompt
        return request

    def number_of(self, request: Request) -> int:
        """Return the number of the canary (test prompt) in `request`, which must not have been answered yet."""
        return self._prompts[request.id].number

    def take(self, slot: ScheduledRequest, exchange: Exchange | None, record: Record) -> None:
        """Store the answer to a canary as a `Canary`.

        `record` is the Record of the request. `exchange` holds the response, or is None if nothing was sent.
        """
        prompt = self._prompts.pop(slot.request.id)
        text = ""
        if exchange is not None and record.state == "complete":
            text = hide_secrets(answer_text(exchange, self._dialect))[:MAX_TEXT]
        self.canaries.append(
            Canary(
                number=prompt.number,
                code=prompt.code,
                moment=self.moment,
                sent_ns=record.sent_ns,
                end_ns=record.end_ns,
                state=record.state,
                error_kind=record.error_kind,
                error_detail=record.error_detail,
                prompt_tokens=record.prompt_tokens,
                output_tokens=record.output_tokens,
                text=text,
            )
        )

    def shifted(self, offset_ns: int) -> Iterator[Canary]:
        """Yield the answers since the last call, with `offset_ns` added to their times."""
        for canary in self.canaries:
            for name in ("sent_ns", "end_ns"):
                instant = getattr(canary, name)
                if instant is not None:
                    setattr(canary, name, instant + offset_ns)
            yield canary
        self.canaries = []


class CanaryAsker:
    """Sends the canaries of a run before, during or after the load. A canary is a prompt with a known answer.

    - `task` contains the canaries.
    - `log` receives the Record of each canary.
    - `encode` takes a request and its due time, and returns the encoded request.
    - `build_driver` takes a CanaryLoop and a number of clients. It returns a Driver that sends the requests of the loop
      with this number of clients, and passes their Records to `log`.
    """

    def __init__(
        self,
        task: CanaryTask,
        log: CanaryLog,
        encode: Callable[[Request, int], ScheduledRequest],
        build_driver: Callable[[CanaryLoop, int], Driver],
    ) -> None:
        self._task = task
        self.log = log
        self._encode = encode
        self._build_driver = build_driver
        self._loop: CanaryLoop | None = None
        self._driver: Driver | None = None
        self._load_ended = False

    async def ask_alone(self, moment: Moment) -> None:
        """Send each canary once, one after the other. `moment` is `before` or `after`, relative to the load."""
        await self._run(moment, self._slots(self._task.prompts), clients=1)

    async def ask_during(self, start_ns: int) -> None:
        """Send canary after canary until `stop` is called. The load starts at `start_ns` (CLOCK_MONOTONIC)."""
        if self._load_ended:
            return
        clients = min(CLIENTS, len(self._task.prompts))
        await self._run("during", self._slots(cycle(self._task.prompts), start_ns + DELAY_NS), clients)

    def stop(self) -> None:
        """Send no more canaries, because the load has ended. `ask_during` returns when the canaries in flight are
        answered.

        If `ask_during` is still opening connections, or has not begun, it sends no canaries.
        """
        self._load_ended = True
        if self._loop is not None and self._driver is not None:
            self._loop.stop()
            self._driver.drop_thinking()

    def _slots(self, prompts: Iterable[CanaryPrompt], due_ns: int = 0) -> Iterator[ScheduledRequest]:
        for prompt in prompts:
            yield self._encode(self.log.request(prompt, self._task.body), due_ns)

    async def _run(self, moment: Moment, slots: Iterator[ScheduledRequest], clients: int) -> None:
        self.log.moment = moment
        self._loop = CanaryLoop(slots, clients, THINK_NS if moment == "during" else 0)
        self._driver = self._build_driver(self._loop, clients)
        await self._driver.open()
        await self._driver.run(0)  # times of the canaries are those of CLOCK_MONOTONIC until the run's start is known


def suspect_marks(text: str, finish_reason: str) -> dict[str, int]:
    """Return marks for a text that a working server rarely generates, or an empty dict for an ordinary text.

    `Record.marks` stores these marks:

    - `blank_text`: The text is empty or contains only white space. Such a text gets no other mark.
    - `looping_text`: The text ends with a string that is repeated many times (see `ends_in_loop`).
    - `replacement_text`: The text contains U+FFFD, which stands for bytes that are not UTF-8.
    - `cut_json`: The text begins like JSON but is not JSON, although the model itself ended the text. `finish_reason`
      is the reason why the text ended.
    """
    marks = {}
    if not text.strip():
        return {"blank_text": 1}
    if ends_in_loop(text):
        marks["looping_text"] = 1
    if "\ufffd" in text:
        marks["replacement_text"] = 1
    if text.lstrip()[0] in "{[" and finish_reason not in ("", "length", "max_tokens") and not _is_json(text):
        marks["cut_json"] = 1
    return marks


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def ends_in_loop(text: str) -> bool:
    """Return True if a text ends in a loop, as the text of a broken model often does.

    A text ends in a loop if the same string is repeated at its end, at least five times and over at least 100
    characters.
    """
    for period in range(1, min(_MAX_PERIOD, len(text) // _MIN_REPEATS) + 1):
        length = max(_MIN_REPEATS * period, _MIN_LOOP)
        if text[-1] != text[-1 - period] or length > len(text):  # most periods end here
            continue
        repeated = text[-period:] * (length // period + 1)
        if text.endswith(repeated[-length:]):
            return True
    return False


class TextChecker:
    """Checks the texts of some responses.

    The Record of each checked response gets the entry `checked_text` in its `marks`. If the text is suspect, further
    marks state why.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._complete = 0

    def take(self, _slot: ScheduledRequest, exchange: Exchange | None, record: Record) -> None:
        """Check the text of a response if the response is complete and selected for a check.

        The first FIRST_CHECKED complete responses are selected. After them, one in CHECKED_EVERY complete responses is
        selected.
        """
        if exchange is None or record.state != "complete":
            return
        dialect = exchange.dialect or self._dialect
        if not dialect.streams:  # such as embeddings, which have no text
            return
        self._complete += 1
        if self._complete > FIRST_CHECKED and self._complete % CHECKED_EVERY:
            return
        text = answer_text(exchange, dialect)
        if not text and record.finish_reason in ("tool_calls", "tool_use"):
            return
        record.marks = record.marks | {"checked_text": 1} | suspect_marks(text, record.finish_reason)
