"""Defines the data that is stored for each request with a canary.

A canary is a test prompt. loadgen sends it with and without load, and compares the two answers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.analysis.run.record import Integer, State, Tokens

Moment = Literal["before", "during", "after"]
"""When a canary is asked: alone before the run, together with the load, or alone after the run."""


class Canary(msgspec.Struct, tag_field="type", tag="canary", kw_only=True):
    """One request with a canary, which is a test prompt of --verify. No figure of the load includes this request.

    `sent_ns` and `end_ns` have the same meaning as in the class Record.
    """

    number: int
    """Number of the canary, from 0. The same canary is asked several times."""
    code: str
    """Code word in the prompt of the canary."""
    moment: Moment
    sent_ns: Integer | None = None
    end_ns: Integer | None = None
    state: State
    error_kind: str = ""
    error_detail: str = ""
    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    text: str = ""
    """The answer, shortened to MAX_TEXT characters."""


MAX_TEXT = 4_096
"""Maximum number of characters of an answer that is stored."""
