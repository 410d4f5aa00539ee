"""Prompts and dialogues from files of others, in file order, one at a time.

    sharegpt   JSON array of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}
    alpaca     JSON array of {"instruction": ..., "input": ..., "output": ...}
    jsonl      one {"prompt": ..., "output_tokens": N} per line; `output_tokens` may be missing, other keys are ignored

Arrays are decoded element by element, so a file may be larger than memory. What does not fit its format is an error
with its place; an element that fits but holds nothing to ask (no human turn with an answer, an empty instruction) is
passed over, as the files' own users do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO, TypeVar

from workloads.syntax import TOKENS_LIMIT, WorkloadError, opened, reason

READ_CHARACTERS = 1 << 20
ELEMENT_LIMIT = 1 << 26
"""Characters of one array element or line; the longest ShareGPT conversation has about a million."""
ASKING = ("human", "user")
ANSWERING = ("gpt", "chatgpt", "bing", "bard", "assistant", "model")

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Sample:
    """One question, and what is known about its answer."""

    prompt: str
    answer: str = ""
    """The recorded answer; its length is the output length unless something else was asked for."""
    output_tokens: int | None = None
    """As the file says."""


Dialogue = tuple[Sample, ...]
"""What a human asked, turn after turn, with the recorded answers; never empty."""


def sharegpt(path: Path) -> Iterator[Dialogue]:
    """Dialogues of a ShareGPT-format file. System turns and what precedes the first human turn are left out.

    Raises WorkloadError when the file cannot be read or is not in the format.
    """
    return _fitting(path, lambda item: _dialogue(item["conversations"]))


def alpaca(path: Path) -> Iterator[Sample]:
    """Instructions of an Alpaca-format file, each with its input below it. Raises WorkloadError as `sharegpt` does."""
    return _fitting(path, _instruction)


def jsonl(path: Path) -> Iterator[Sample]:
    """Prompts of a JSON Lines file. Raises WorkloadError as `sharegpt` does."""
    with opened(path, "the dataset") as file:
        for line, text in enumerate(iter(lambda: file.readline(ELEMENT_LIMIT), ""), 1):
            if text.strip():
                yield _made(path, f"line {line}", _prompt, text)


def _fitting(path: Path, make: Callable[[Any], Made | None]) -> Iterator[Made]:
    for position, element in enumerate(_elements(path), 1):
        made = _made(path, f"element {position}", make, element)
        if made is not None:
            yield made


def _made(path: Path, place: str, make: Callable[[Any], Made], item: Any) -> Made:
    try:
        return make(item)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        damaged = isinstance(error, json.JSONDecodeError)
        hint = "mend or remove it" if damaged else "is this the format you named?"
        raise WorkloadError(f"{path}, {place}: {reason(error)}", hint) from None


def _dialogue(messages: Any) -> Dialogue | None:
    """Pairs of a human's message and the answer right after it."""
    if not isinstance(messages, list):
        raise TypeError("its conversations are not a list")
    spoken = [(message["from"], _text(message["value"])) for message in messages]
    spoken = [(who, text) for who, text in spoken if who in (*ASKING, *ANSWERING)]
    turns = (
        Sample(question, answer)
        for (asker, question), (answerer, answer) in pairwise(spoken)
        if asker in ASKING and answerer in ANSWERING and question and answer
    )
    return tuple(turns) or None


def _instruction(item: Any) -> Sample | None:
    instruction, context, answer = _text(item["instruction"]), _text(item.get("input", "")), _text(item["output"])
    if not (instruction and answer):
        return None
    return Sample(f"{instruction}\n\n{context}" if context else instruction, answer)


def _prompt(line: str) -> Sample:
    item = json.loads(line)
    prompt, output_tokens = _text(item["prompt"]), item.get("output_tokens")
    if not prompt:
        raise ValueError("its prompt is empty")
    if output_tokens is not None and (type(output_tokens) is not int or not 1 <= output_tokens <= TOKENS_LIMIT):
        raise ValueError(f"output_tokens {output_tokens!r} is not a whole number from 1 on")
    return Sample(prompt, output_tokens=output_tokens)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"has {value!r} where text belongs"[:120])
    return value.strip()


def _elements(path: Path) -> Iterator[Any]:
    """The elements of a JSON array, decoded as the file is read."""
    decoder = json.JSONDecoder()
    with opened(path, "the dataset") as file:
        ahead = _not_blank(file, "")
        if not ahead.startswith("["):
            raise WorkloadError(f"{path}: is not a JSON array", "is this the format you named?")
        position, ahead = 0, _not_blank(file, ahead[1:])
        while not ahead.startswith("]"):
            position += 1
            element, ahead = _next_element(decoder, file, ahead, f"{path}, element {position}")
            yield element


def _next_element(decoder: json.JSONDecoder, file: TextIO, ahead: str, place: str) -> tuple[Any, str]:
    """The element that `ahead` begins with, and what follows it and its comma; reads more where it is cut off."""
    size = READ_CHARACTERS
    while True:
        try:
            element, end = decoder.raw_decode(ahead)
        except (json.JSONDecodeError, RecursionError) as error:
            end, problem = len(ahead), f"is not JSON: {error}"[:200]
        else:
            problem = "is not followed by a comma or the array's end"
        if end < len(ahead):
            rest = _not_blank(file, ahead[end:])
            if rest.startswith("]"):
                return element, rest
            if rest.startswith(","):
                return element, _not_blank(file, rest[1:])
            raise WorkloadError(f"{place}: {problem}", "the file is damaged or was cut off")
        more = file.read(size)
        if not more:
            raise WorkloadError(f"{place}: {problem}", "the file is damaged or was cut off")
        if len(ahead) > ELEMENT_LIMIT:
            raise WorkloadError(f"{place}: is longer than {ELEMENT_LIMIT} characters, or {problem}")
        ahead, size = ahead + more, 2 * size  # doubling, so that a long element is not decoded over and over


def _not_blank(file: TextIO, ahead: str) -> str:
    """`ahead` from its first character that is not blank on, reading more while there is none."""
    while not (ahead := ahead.lstrip()) and (more := file.read(READ_CHARACTERS)):
        ahead = more
    return ahead
