"""A dialect in one version of its server: the variant that it speaks, and why some must not be measured.

Most differences need no version, because the answer itself shows them (servers/kinds/openai.py). Those here do not
show: whether an end marker that did not come was owed, and events that were sent for show.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from servers.kinds.base import Dialect
from servers.kinds.openai import always, decode

LIGHTLLM_WITHOUT_DONE = ("before 1.0", "1.0", "1.1.0")
"""Versions as servers.find concludes them."""


def variant(dialect: Dialect, version: str) -> Dialect:
    """The dialect as this version speaks it; `version` is as in ServerFacts, and the dialect as it is where it says
    nothing."""
    if dialect.server == "tgi" and dialect.endpoint != "generate" and _number(version) >= (2, 2, 0):
        # [DONE] always comes: an answer that breaks off after its finish reason is not whole.
        return replace(dialect, decode=partial(decode, empty_is_token=always, always_done=True))
    if dialect.server == "lightllm" and dialect.endpoint == "chat" and version in LIGHTLLM_WITHOUT_DONE:
        return replace(dialect, decode=partial(decode, empty_is_token=always, always_done=False))
    return dialect


def misleads(dialect: Dialect, version: str) -> str | None:
    """Why figures taken on this version through this dialect would not mean what they say; None where they do."""
    if (dialect.server, dialect.endpoint) == ("vllm", "chat") and not version:
        return (
            "it states no version, as vLLM before 0.6 does, whose chat streams open with an event that is sent before "
            "the engine has begun, and give no token counts"
        )
    if (dialect.server, dialect.endpoint) == ("lightllm", "chat") and version in LIGHTLLM_WITHOUT_DONE:
        return (
            f"this is LightLLM {version}, whose chat streams have no end marker and no token counts, so that one cut "
            "short cannot be told from a whole one"
        )
    return None


def _number(version: str) -> tuple[int, ...]:
    """The first X.Y.Z in a version, as numbers; empty, which is less than any, where there is none."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
