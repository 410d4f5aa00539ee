"""Reads prompts and dialogues from files, one entry at a time, so that a file may be larger than memory.

    sharegpt   JSON array of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}
    alpaca     JSON array of {"instruction": ..., "input": ..., "output": ...}
    jsonl      one {"prompt": ..., "output_tokens": N, "body": {...}, "image": ...} per line. Only the prompt is
               required, and other keys are ignored. `body` holds fields for this request, like --extra-body for all
               requests. `image` or `images` are URLs, or paths of files relative to the dataset's folder.

An element that fits its format but has no question (no human turn with an answer, an empty instruction) is skipped, as
other users of these files do. Any other deviation from the format is an error that names its place.
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
"""Maximum characters of an array element or line. The longest ShareGPT conversation has about a million."""
USER_ROLES = ("human", "user")
ASSISTANT_ROLES = ("gpt", "chatgpt", "bing", "bard", "assistant", "model")
FORMAT_HINT = "check that the file has the format that --workload names"
LINE_HINT = "correct or remove the line"
TEMPLATE_FIELDS = {"chat_template", "chat_template_kwargs", "documents", "query", "tools"}
"""Fields of a body that change the number of tokens of the prompt."""

Item = TypeVar("Item")

RESERVED_FIELDS = {
    **dict.fromkeys(("prompt", "messages", "inputs", "input"), "--workload sets the prompts"),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_new_tokens"), "--output-tokens sets the length of responses"
    ),
    "model": "use --model",
    "ignore_eos": "use --no-ignore-eos",
    "stream": "responses are measured as streams",
    "n": "a request has one response",
}
"""Fields that a user cannot set in a body, with the reason."""


class Sample(msgspec.Struct, frozen=True):
    """One question, and the known facts about its answer."""

    prompt: str
    answer: str = ""
    """The recorded answer. Its length is the output length unless the user requests another one."""
    output_tokens: int | None = None  # As stated in the file
    body: Mapping[str, Any] = {}  # Fields of the user for the request
    images: tuple[str, ...] = ()  # URLs


def sharegpt(path: Path) -> Iterator[tuple[Sample, ...]]:
    """Yield the dialogues of a ShareGPT-format file: the questions of the user with their answers.

    System turns and turns before the first question are left out, and empty dialogues are skipped. Raises WorkloadError
    if the file is unreadable or not in the format."""
    return _elements(path, _dialogue)


def alpaca(path: Path) -> Iterator[Sample]:
    """Yield the instructions of an Alpaca-format file with their inputs. Raises WorkloadError as `sharegpt` does."""
    return _elements(path, _instruction)


def jsonl(path: Path) -> Iterator[Sample]:
    """Yield the prompts of a JSON Lines file. Raises WorkloadError as `sharegpt` does."""
    with open_text(path, "the dataset") as file:
        for line, text in lines(file, ELEMENT_LIMIT):
            with error_location(f"{path}, line {line}", FORMAT_HINT):
                check_file_text(text)
                sample = _prompt(json.loads(text), path.parent)
            yield sample


@contextmanager
def error_location(location: str, hint: str) -> Iterator[None]:
    """Turn the errors of a reader in the `with` block into WorkloadErrors that name the location."""
    try:
        yield
    except WorkloadError as error:
        raise WorkloadError(f"{location}: {error}", error.hint or hint) from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)[:200]
        if isinstance(error, json.JSONDecodeError):
            reason = f"is not JSON: {error.msg}"
            hint = LINE_HINT
        raise WorkloadError(f"{location}: {reason}", hint) from None


def lines(file: TextIO, limit: int) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank with their numbers. A line of more than `limit` characters is split."""
    return ((line, text) for line, text in enumerate(iter(lambda: file.readline(limit), ""), 1) if text.strip())


def _elements(path: Path, convert: Callable[[Any], Item | None]) -> Iterator[Item]:
    """Yield the converted elements of a JSON array, decoded while the file is read. None is skipped."""
    decoder = json.JSONDecoder()
    with open_text(path, "the dataset") as file:
        buffer = _skip_blanks(file, "")
        with error_location(f"{path}", FORMAT_HINT):
            check_file_text(buffer[:1])
        if not buffer.startswith("["):
            raise WorkloadError(f"{path}: is not a JSON array", FORMAT_HINT)
        buffer = _skip_blanks(file, buffer[1:])
        for position in count(1):
            if buffer.startswith("]"):
                return
            location = f"{path}, element {position}"
            element, raw, buffer = _next_element(decoder, file, buffer, location)
            with error_location(location, FORMAT_HINT):
                check_file_text(raw)
                item = convert(element)
            if item is not None:
                yield item


def _next_element(decoder: json.JSONDecoder, file: TextIO, buffer: str, location: str) -> tuple[Any, str, str]:
    """Return the element at the start of the buffer, its text, and the text after the element and its comma.

    If the element is incomplete, more of the file is read."""
    read_characters = READ_CHARACTERS
    while True:
        try:
            element, end = decoder.raw_decode(buffer)
            problem = "is not followed by a comma or the array's end"
        except (json.JSONDecodeError, RecursionError) as error:
            end = len(buffer)
            problem = f"is not JSON: {error}"[:200]
        rest = _skip_blanks(file, buffer[end:]) if end < len(buffer) else ""
        if rest.startswith("]"):
            return element, buffer[:end], rest
        if rest.startswith(","):
            return element, buffer[:end], _skip_blanks(file, rest[1:])
        more = "" if end < len(buffer) else file.read(read_characters)
        if not more:
            raise WorkloadError(f"{location}: {problem}", "the file is damaged or incomplete")
        if len(buffer) > ELEMENT_LIMIT:
            raise WorkloadError(f"{location}: is longer than {ELEMENT_LIMIT} characters, or {problem}")
        buffer += more
        read_characters *= 2  # a long element is then decoded only a few times


def _skip_blanks(file: TextIO, buffer: str) -> str:
    """Return the buffer without leading white space. If nothing remains, more of the file is read."""
    buffer = buffer.lstrip()
    while not buffer:
        more = file.read(READ_CHARACTERS)
        if not more:
            break
        buffer = more.lstrip()
    return buffer


def _dialogue(item: Any) -> tuple[Sample, ...] | None:
    """Return the questions of the user that have an answer directly after them; None if there is none."""
    messages = item["conversations"]
    if not isinstance(messages, list):
        raise TypeError("its conversations are not a list")
    turns = [
        (message["from"], _text(message["value"], f"conversations[{index}].value"))
        for index, message in enumerate(messages)
    ]
    turns = [(role, text) for role, text in turns if role in (*USER_ROLES, *ASSISTANT_ROLES)]
    samples = (
        Sample(question, answer)
        for (first_role, question), (second_role, answer) in pairwise(turns)
        if first_role in USER_ROLES and second_role in ASSISTANT_ROLES and question and answer
    )
    return tuple(samples) or None


def _instruction(item: Any) -> Sample | None:
    instruction = _text(item["instruction"], "instruction")
    context = _text(item.get("input", ""), "input")
    answer = _text(item["output"], "output")
    if not (instruction and answer):
        return None
    return Sample(f"{instruction}\n\n{context}" if context else instruction, answer)


def _prompt(item: Any, folder: Path) -> Sample:
    prompt = _text(item["prompt"], "prompt")
    output_tokens = item.get("output_tokens")
    if not prompt:
        raise ValueError("its prompt is empty")
    if output_tokens is not None and (type(output_tokens) is not int or not 1 <= output_tokens <= TOKENS_LIMIT):
        raise ValueError(f"output_tokens {output_tokens!r} is not a whole number of at least 1")
    urls = item.get("images", [item["image"]] if "image" in item else [])
    images = tuple(image_url(_text(url, "image"), folder) for url in urls)
    return Sample(prompt, output_tokens=output_tokens, body=_body(item.get("body")), images=images)


def _body(fields: Any) -> Mapping[str, Any]:
    if not isinstance(fields, Mapping | None):
        raise TypeError(f"has a body that is not an object: {fields!r}"[:120])
    return user_fields(fields or {}, "body")


def _text(value: Any, name: str) -> str:
    """Return the text of the field called `name`, without white space around it. Raises TypeError and WorkloadError."""
    if not isinstance(value, str):
        raise TypeError(f"has {value!r} where text belongs"[:120])
    check_text(value, name)
    return value.strip()


def user_fields(fields: Mapping[str, Any], name: str = "") -> Mapping[str, Any]:
    """Return the body fields of a user unchanged. `name` is the object's name in errors.

    Raises ValueError for a field that another option sets, and WorkloadError for a value that JSON cannot hold."""
    check_value(fields, name)
    parameters = fields.get("parameters", {})  # of TGI and LightLLM
    if not isinstance(parameters, Mapping):
        raise ValueError("'parameters' must be an object")
    for field in (*fields, *parameters):
        if field in RESERVED_FIELDS:
            raise ValueError(f"{field!r} cannot be set here: {RESERVED_FIELDS[field]}")
    return fields


class Dataset(msgspec.Struct, frozen=True):
    """The questions of a file, each once, in its order. `kind` is a key of SAMPLES.

    Responses have the lengths of the recorded answers unless the user requests other lengths."""

    kind: str
    path: Path

    @classmethod
    def of(cls, kind: str) -> Callable[[str], Self]:
        """Return the parser of the text after the colon for this kind."""
        return lambda rest: cls(kind, Path(parse_path_and_options(rest, ())[0]))

    def samples(self) -> Iterator[Sample]:
        """Yield the questions of the file in order. Raises WorkloadError for a malformed file."""
        return SAMPLES[self.kind](self.path)

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """Yield the Requests in order of id. Raises WorkloadError for a malformed file."""
        output_tokens = answer_tokens(prompts)
        for number, sample in enumerate(self.samples()):
            uncountable = sample.images or TEMPLATE_FIELDS.intersection(sample.body)
            input_tokens = 0 if uncountable else prompts.count_if_known(sample.prompt)
            yield Request(
                number, sample.prompt, input_tokens, output_tokens(sample), body=sample.body, images=sample.images
            )

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}"


def answer_tokens(prompts: Prompts) -> Callable[[Sample], int]:
    """Return a function from the next sample to its output length: the requested one, or that of its answer."""
    requested = None if prompts.spec.output is None else prompts.spec.output.tokens(prompts.spec.seed, "output")

    def tokens(sample: Sample) -> int:
        if requested is not None:
            return next(requested)
        if sample.output_tokens is not None:
            return sample.output_tokens
        return max(1, prompts.count(sample.answer)) if sample.answer else DEFAULT_OUTPUT_TOKENS

    return tokens


SAMPLES: dict[str, Callable[[Path], Iterator[Sample]]] = {
    "sharegpt": lambda path: (dialogue[0] for dialogue in sharegpt(path)),
    "alpaca": alpaca,
    "jsonl": jsonl,
}
