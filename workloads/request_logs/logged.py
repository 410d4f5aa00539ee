"""Two classes for the readers of request logs: a request in a log, and a reader's notes on a log.

The notes count the requests that a reader leaves out, and the requests about which it makes an assumption.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from loadgen.workloads.session_graph import ROOT_ROLE, After

PromptContent = str | tuple[int, ...]
"""A prompt as text, or as token ids."""


class LoggedRequest(msgspec.Struct):
    """One request of a log, with its times, its prompt, its response, and the earlier requests that it followed."""

    name: str
    """A name that no other request of the log has."""
    where: str
    """File and line, for error messages."""
    session: str | None = None
    """The session of the request. None: the request is a session of its own."""
    start_ns: int | None = None
    """Time at which the request was sent, in ns on the clock of the log. None: the log has no times."""
    end_ns: int | None = None
    """Time at which the response ended. None: unknown."""
    prompt: PromptContent | None = None
    """None: the log has no text of the prompt."""
    input_tokens: int | None = None
    """Length of the prompt that the log states. None: it states none."""
    output: PromptContent | None = None
    output_tokens: int | None = None
    model: str = ""
    after: tuple[tuple[str, After, int], ...] | None = None
    """Name of a request that this one followed, `end` or `start`, and the delay in ns. None: to be found by times."""
    branch: str = ""
    """Part of the session, such as an agent, in which each prompt continues the one before."""
    role: str = ROOT_ROLE
    tool_ns: int = 0


class LogNotes:
    """Counts the requests of a log that are not replayed, and those that are replayed with an assumption.

    Each counter maps a text (the reason or the assumption) to the number of requests that it applies to.
    """

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        """Requests that are not replayed, by the reason."""
        self.remarks: Counter[str] = Counter()
        """Assumptions about requests that are replayed."""
