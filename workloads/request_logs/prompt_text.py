"""Turns the body of a request into one text. Bodies with the same beginning become texts with the same beginning.

The chat template of a server combines the tools, the system prompt and the messages into one prompt, in this order. The
prompts of two requests are therefore equal up to the first difference in these parts. This module combines the parts in
the same order, so the texts of two requests are equal up to the same difference. The module does not need the chat
template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from loadgen.workloads.request_logs.logged import LogNotes, PromptContent
from loadgen.workloads.spec_syntax import WorkloadError

LEADING_FIELDS = ("tools", "system", "instructions")
PROMPT_FIELDS = ("messages", "prompt", "input", "inputs", "text")
ID_FIELDS = {"id", "tool_call_id", "call_id", "response_id", "status", "cache_control"}
"""Fields of messages that differ from one conversation to the next, and that are not part of a prompt."""
NO_TEXT = "images, audio and files: their tokens are unknown, each counts as one word"
DEPTH_LIMIT = 64


def prompt_of(body: Mapping[str, Any], notes: LogNotes) -> PromptContent | None:
    """Return the prompt of a request's body as text or token ids, or None if the body has none.

    Raises WorkloadError if the body has several prompts, or a prompt of a wrong type."""
    name = next((name for name in PROMPT_FIELDS if body.get(name)), None)
    if name is None:
        return None
    content = body[name]
    if name == "messages" and not (isinstance(content, list) and all(isinstance(item, Mapping) for item in content)):
        raise WorkloadError('"messages" is no list of messages', 'write [{"role": "user", "content": "..."}]')
    if not isinstance(content, str | list):
        raise WorkloadError(f'"{name}" is neither text nor a list', "correct or remove the line")
    if isinstance(content, list) and name in ("prompt", "inputs"):
        single = _single_prompt(content)
        if isinstance(single, tuple):
            return single
        content = single
    leading = [_text(body[field], notes) + "\n" for field in LEADING_FIELDS if body.get(field)]
    if isinstance(content, str):
        return "".join(leading) + content
    return "".join(leading) + "".join(_text(item, notes) + "\n" for item in content)


def output_of(response: Any, notes: LogNotes) -> str | None:
    """Return the text in a logged response of an OpenAI endpoint, or None if the response has no text."""
    if isinstance(response, str):
        return response or None
    if not isinstance(response, Mapping):
        return None
    choices = response.get("choices")
    if isinstance(choices, list):
        parts = [choice.get("message") or choice.get("text") or "" for choice in choices if isinstance(choice, Mapping)]
    else:
        output = response.get("output") or response.get("content") or []
        parts = output if isinstance(output, list) else [output]
    return "".join(_text(part, notes) for part in parts) or None


TOKEN_ID_LIMIT = 1 << 63
"""Token ids are stored in 64 bits. Vocabularies are much smaller."""


def token_ids(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return the token ids of a prompt. Raises WorkloadError for a number that cannot be a token id."""
    ids = tuple(numbers)
    if any(not 0 <= number < TOKEN_ID_LIMIT for number in ids):
        raise WorkloadError("its prompt has a number that is no token id", "correct or remove the line")
    return ids


def _single_prompt(content: Sequence[Any]) -> str | tuple[int, ...]:
    """Return the only prompt of a list. Raises WorkloadError if the list has several prompts."""
    if all(type(item) is int for item in content):
        return token_ids(content)
    if len(content) > 1:
        raise WorkloadError(
            f"has {len(content)} prompts in one body, but a request has one response", "write one line per prompt"
        )
    (item,) = content
    if isinstance(item, str):
        return item
    if isinstance(item, list) and all(type(token) is int for token in item):
        return token_ids(item)
    raise WorkloadError("its prompt is neither text nor token ids", "correct or remove the line")


def _text(value: Any, notes: LogNotes, depth: int = 0) -> str:
    """Return the text that represents a message, a part of a message, or any other JSON value in a prompt.

    An image or other media is represented by a hash of its content. `notes` counts such parts, and `depth` is the
    nesting depth of the value.
    """
    if isinstance(value, str | None):
        return value or ""
    if depth == DEPTH_LIMIT:
        raise WorkloadError(f"is nested more than {DEPTH_LIMIT} levels deep", "correct or remove the line")
    if isinstance(value, list):
        return "\n".join(_text(item, notes, depth + 1) for item in value)
    if not isinstance(value, Mapping):
        return msgspec.json.encode(value).decode()
    kind = value.get("type")
    if isinstance(kind, str) and "role" not in value and _is_media(kind):
        notes.remarks[NO_TEXT] += 1
        return f"{kind}{blake2b(msgspec.json.encode(value), digest_size=8).hexdigest()}"
    if set(value) <= {"type", "text"} and isinstance(value.get("text"), str):
        return str(value["text"])
    return "\n".join(
        part if name in ("role", "content") else f"{name}\n{part}"
        for name, item in value.items()
        if name not in ID_FIELDS and (part := _text(item, notes, depth + 1))
    )


def _is_media(kind: str) -> bool:
    return any(word in kind for word in ("image", "audio", "video", "file", "document", "media"))
