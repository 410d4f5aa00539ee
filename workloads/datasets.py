"""Reads prompts and dialogues from files, one entry at a time, so that a file may be larger than memory.

    sharegpt   JSON array of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}
    alpaca     JSON array of {"instruction": ..., "input": ..., "output": ...}
    jsonl      one {"prompt": ..., "output_tokens": N, "body": {...}, "image": ...} per line; all but the prompt may be
               missing, other keys are ignored. `body` holds fields for this request, as --extra-body does for all;
               `image` or `images` are URLs, or files by their path from the dataset's folder

An element that fits its format but holds nothing to ask (no human turn with an answer, an empty instruction) is passed
over, as the files' own users do. Whatever else does not fit its format is an error with its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeVar

import msgspec

from loadgen.workloads.images import image_url
from loadgen.workloads.json_values import check_file_text, check_text, check_value
from loadgen.workloads.lengths import DEFAULT_OUTPUT_TOKENS
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import TOKENS_LIMIT, WorkloadError, open_text, parse_path_and_options

if TYPE_CHECKING:
    from loadgen.workloads.workload import Prompts

READ_CHARACTERS = 1 << 20
ELEMENT_LIMIT = 1 << 26
"""Characters of one array element or line of a dataset; the longest ShareGPT conversation has about a million."""
ASKING = ("human", "user")
ANSWERING = ("gpt", "chatgpt", "bing", "bard", "assistant", "model")
FORMAT_HINT = "is this the format you named?"
LINE_HINT = "mend or remove the line"
RESHAPING = {"chat_template", "chat_template_kwargs", "documents", "query", "tools"}
"""Fields of a body that change how many tokens its prompt has."""

Made = TypeVar("Made")

DECIDED = {
    **dict.fromkeys(("prompt", "messages", "inputs", "input"), "--workload says what is asked"),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_new_tokens"), "--output-tokens says how long answers are"
    ),
    "model": "use --model",
    "ignore_eos": "use --no-ignore-eos",
    "stream": "answers are timed as streams",
    "n": "each request has one answer",
}
"""Fields of a body that are not for the user to set there, and why."""


class Sample(msgspec.Struct, frozen=True):
    """One question, and what is known about its answer."""

    prompt: str
    answer: str = ""
    """The recorded answer; its length is the output length unless something else was asked for."""
    output_tokens: int | None = None  # as the file says
    body: Mapping[str, Any] = {}  # fields for the request, of the user's
    images: tuple[str, ...] = ()  # URLs


def sharegpt(path: Path) -> Iterator[tuple[Sample, ...]]:
    """What a human asked, turn after turn, with the answers: the dialogues of a ShareGPT-format file, none empty.
    System turns and what precedes the first human turn are left out. Raises WorkloadError when the file cannot be read
    or is not in the format."""
    return _fitting(path, _dialogue)


def alpaca(path: Path) -> Iterator[Sample]:
    """Instructions of an Alpaca-format file, each with its input below it. Raises WorkloadError as `sharegpt` does."""
    return _fitting(path, _instruction)


def jsonl(path: Path) -> Iterator[Sample]:
    """Prompts of a JSON Lines file. Raises WorkloadError as `sharegpt` does."""
    with open_text(path, "the dataset") as file:
        for line, text in lines(file, ELEMENT_LIMIT):
            with placed(f"{path}, line {line}", FORMAT_HINT):
                check_file_text(text)
                sample = _prompt(json.loads(text), path.parent)
            yield sample


@contextmanager
def placed(place: str, hint: str) -> Iterator[None]:
    """Raise what a reader finds wrong in the block as a WorkloadError that names the place."""
    try:
        yield
    except WorkloadError as error:
        raise WorkloadError(f"{place}: {error}", error.hint or hint) from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)[:200]
        if isinstance(error, json.JSONDecodeError):
            reason, hint = f"is not JSON: {error.msg}", LINE_HINT
        raise WorkloadError(f"{place}: {reason}", hint) from None


def lines(file: TextIO, limit: int) -> Iterator[tuple[int, str]]:
    """Return the lines that are not blank with their numbers, reading at most `limit` characters at a time."""
    return ((line, text) for line, text in enumerate(iter(lambda: file.readline(limit), ""), 1) if text.strip())


def _fitting(path: Path, make: Callable[[Any], Made | None]) -> Iterator[Made]:
    """What `make` makes of the elements of a JSON array, decoded as the file is read; None is passed over."""
    decoder = json.JSONDecoder()
    with open_text(path, "the dataset") as file:
        ahead = _not_blank(file, "")
        with placed(f"{path}", FORMAT_HINT):
            check_file_text(ahead[:1])
        if not ahead.startswith("["):
            raise WorkloadError(f"{path}: is not a JSON array", FORMAT_HINT)
        ahead = _not_blank(file, ahead[1:])
        for position in count(1):
            if ahead.startswith("]"):
                return
            index = f"{path}, element {position}"
            element, raw, ahead = _next_element(decoder, file, ahead, index)
            with placed(index, FORMAT_HINT):
                check_file_text(raw)
                made = make(element)
            if made is not None:
                yield made


def _next_element(decoder: json.JSONDecoder, file: TextIO, ahead: str, place: str) -> tuple[Any, str, str]:
    """Return the element that `ahead` begins with, its text in the file, and what follows it and its comma. More of the
    file is read where the element is cut off."""
    size = READ_CHARACTERS
    while True:
        try:
            element, end = decoder.raw_decode(ahead)
            problem = "is not followed by a comma or the array's end"
        except (json.JSONDecodeError, RecursionError) as error:
            end, problem = len(ahead), f"is not JSON: {error}"[:200]
        rest = _not_blank(file, ahead[end:]) if end < len(ahead) else ""
        if rest.startswith("]"):
            return element, ahead[:end], rest
        if rest.startswith(","):
            return element, ahead[:end], _not_blank(file, rest[1:])
        more = "" if end < len(ahead) else file.read(size)
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


def _dialogue(item: Any) -> tuple[Sample, ...] | None:
    """Pairs of a human's message and the answer right after it."""
    messages = item["conversations"]
    if not isinstance(messages, list):
        raise TypeError("its conversations are not a list")
    spoken = [
        (message["from"], _text(message["value"], f"conversations[{index}].value"))
        for index, message in enumerate(messages)
    ]
    spoken = [(who, text) for who, text in spoken if who in (*ASKING, *ANSWERING)]
    turns = (
        Sample(question, answer)
        for (asker, question), (answerer, answer) in pairwise(spoken)
        if asker in ASKING and answerer in ANSWERING and question and answer
    )
    return tuple(turns) or None


def _instruction(item: Any) -> Sample | None:
    instruction = _text(item["instruction"], "instruction")
    context, answer = _text(item.get("input", ""), "input"), _text(item["output"], "output")
    if not (instruction and answer):
        return None
    return Sample(f"{instruction}\n\n{context}" if context else instruction, answer)


def _prompt(item: Any, folder: Path) -> Sample:
    prompt, output_tokens = _text(item["prompt"], "prompt"), item.get("output_tokens")
    if not prompt:
        raise ValueError("its prompt is empty")
    if output_tokens is not None and (type(output_tokens) is not int or not 1 <= output_tokens <= TOKENS_LIMIT):
        raise ValueError(f"output_tokens {output_tokens!r} is not a whole number from 1 on")
    several = item.get("images", [item["image"]] if "image" in item else [])
    images = tuple(image_url(_text(url, "image"), folder) for url in several)
    return Sample(prompt, output_tokens=output_tokens, body=_body(item.get("body")), images=images)


def _body(fields: Any) -> Mapping[str, Any]:
    if not isinstance(fields, Mapping | None):
        raise TypeError(f"has a body that is no object: {fields!r}"[:120])
    return user_fields(fields or {}, "body")


def _text(value: Any, name: str) -> str:
    """Return the text of the field called `name`, without white space around it. Raises TypeError and WorkloadError."""
    if not isinstance(value, str):
        raise TypeError(f"has {value!r} where text belongs"[:120])
    check_text(value, name)
    return value.strip()


def user_fields(fields: Mapping[str, Any], name: str = "") -> Mapping[str, Any]:
    """Return these body fields of a user. `name` is what errors call the object. Raises ValueError for a field that
    another option sets, and WorkloadError for a value that JSON cannot hold."""
    check_value(fields, name)
    parameters = fields.get("parameters", {})  # of TGI and LightLLM
    if not isinstance(parameters, Mapping):
        raise ValueError("'parameters' must be an object")
    for field in (*fields, *parameters):
        if field in DECIDED:
            raise ValueError(f"{field!r} cannot be set here: {DECIDED[field]}")
    return fields


class Dataset(msgspec.Struct, frozen=True):
    """Questions from a file, in its order, once, and answers as long as its own unless named. `kind` is a key of
    SAMPLES."""

    kind: str
    path: Path

    @classmethod
    def of(cls, kind: str) -> Callable[[str], Self]:
        """What reads, for this kind, what follows the colon."""
        return lambda rest: cls(kind, Path(parse_path_and_options(rest, ())[0]))

    def samples(self) -> Iterator[Sample]:
        """Return the questions of the file, in their order. Raises WorkloadError on damage."""
        return SAMPLES[self.kind](self.path)

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """The Requests, in order of id. Raises WorkloadError on damage."""
        tokens_of = answer_tokens(prompts)
        for number, sample in enumerate(self.samples()):
            more = sample.images or RESHAPING.intersection(sample.body)
            tokens = 0 if more else prompts.count_if_known(sample.prompt)
            requested = number, sample.prompt, tokens, tokens_of(sample)
            yield Request(*requested, body=sample.body, images=sample.images)

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}"


def answer_tokens(prompts: Prompts) -> Callable[[Sample], int]:
    """How long the answer to the next question of a dataset shall be: as named, or as the recorded one."""
    named = None if prompts.spec.output is None else prompts.spec.output.tokens(prompts.spec.seed, "output")

    def tokens(sample: Sample) -> int:
        if named is not None:
            return next(named)
        if sample.output_tokens is not None:
            return sample.output_tokens
        return max(1, prompts.count(sample.answer)) if sample.answer else DEFAULT_OUTPUT_TOKENS

    return tokens


SAMPLES: dict[str, Callable[[Path], Iterator[Sample]]] = {
    "sharegpt": lambda path: (dialogue[0] for dialogue in sharegpt(path)),
    "alpaca": alpaca,
    "jsonl": jsonl,
}
