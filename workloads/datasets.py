"""Reads prompts and dialogues from files, one entry at a time, so that a file may be larger than memory.

    sharegpt   JSON array of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}.
    alpaca     JSON array of {"instruction": ..., "input": ..., "output": ...}.
    jsonl      one {"prompt": ..., "output_tokens": N, "body": {...}, "image": ...} per line. Only the prompt is
               required, and other keys are ignored. `body` holds fields for this request, like --extra-body for all
               requests. `image` or `images` are URLs, or paths of files relative to the dataset's folder.

Some entries fit the format but have no question: dialogues without a human turn that is followed by an answer, and
elements with an empty instruction. These entries are skipped, as other tools do. Any other deviation from the format is
an error that names the line or element.
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
"""Fields of a request body that change the number of prompt tokens."""

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
"""Fields that a user cannot set in a request body, with the reason."""


class Sample(msgspec.Struct, frozen=True):
    """One prompt of a dataset, with its recorded answer or output length and additional fields of its request."""

    prompt: str
    answer: str = ""
    """The recorded answer. Its length becomes the output length, unless the user or the file states another one."""
    output_tokens: int | None = None  # Output length that the file states
    body: Mapping[str, Any] = {}  # Fields that are added to the request body
    images: tuple[str, ...] = ()  # URLs

    @property
    def uncountable(self) -> bool:
        """True if the length of the prompt is not the number of tokens of its text."""
        return bool(self.images or TEMPLATE_FIELDS.intersection(self.body))


def sharegpt(path: Path) -> Iterator[tuple[Sample, ...]]:
    """Yield the dialogues of a ShareGPT-format file. A dialogue has one sample per question of the user.

    Only questions that are directly followed by an answer are used. System turns are ignored, and dialogues without
    such a question are skipped. Raises WorkloadError if the file is unreadable or has another format."""
    return _elements(path, _dialogue)


def alpaca(path: Path) -> Iterator[Sample]:
    """Yield one sample per element of an Alpaca-format file. The prompt is the instruction with its input.

    Elements with an empty instruction or output are skipped. Raises WorkloadError if the file is unreadable or has
    another format."""
    return _elements(path, _instruction)


def jsonl(path: Path) -> Iterator[Sample]:
    """Yield one sample per line of a JSON Lines file.

    Raises WorkloadError if the file is unreadable or has another format."""
    with open_text(path, "the dataset") as file:
        for line, text in lines(file, ELEMENT_LIMIT):
            with error_location(f"{path}, line {line}", FORMAT_HINT):
                check_file_text(text)
                sample = _prompt(json.loads(text), path.parent)
            yield sample


@contextmanager
def error_location(location: str, hint: str) -> Iterator[None]:
    """Convert errors that a reader raises in the `with` block to WorkloadError, with `location` in the message.

    `hint` is the hint for errors that have none."""
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
    """Yield the line number and text of each line that is not blank. Numbers start at 1.

    A line of more than `limit` characters is split, and each piece counts as a line."""
    return ((line, text) for line, text in enumerate(iter(lambda: file.readline(limit), ""), 1) if text.strip())


def _elements(path: Path, convert: Callable[[Any], Item | None]) -> Iterator[Item]:
    """Yield the elements of a JSON array, converted by `convert`. The file is read as elements are needed.

    Elements for which `convert` returns None are skipped."""
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
    """Return the next element of a JSON array: its value, its source text, and the rest of the buffer.

    The rest begins after the comma that follows the element, or at the end of the array. More of the file is read if
    the element is incomplete. Raises WorkloadError with `location` in its message if the element is malformed."""
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
    """Return the buffer without leading white space. If only white space remains, read more of the file."""
    buffer = buffer.lstrip()
    while not buffer:
        more = file.read(READ_CHARACTERS)
        if not more:
            break
        buffer = more.lstrip()
    return buffer


def _dialogue(item: Any) -> tuple[Sample, ...] | None:
    """Return a sample for each user message that is directly followed by an answer, or None if there are none."""
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
    """Return the text of a field without surrounding white space. `name` is the field's name in errors.

    Raises TypeError if the value is not text, and WorkloadError if it cannot be encoded in UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}"[:120])
    check_text(value, name)
    return value.strip()


def user_fields(fields: Mapping[str, Any], name: str = "") -> Mapping[str, Any]:
    """Check the fields that a user adds to request bodies, and return them unchanged.

    `name` is the path of the object in error messages. Raises ValueError for a field that another option sets, and
    WorkloadError for a value that JSON cannot represent."""
    check_value(fields, name)
    parameters = fields.get("parameters", {})  # of TGI and LightLLM
    if not isinstance(parameters, Mapping):
        raise ValueError("'parameters' must be an object")
    for field, value in (*fields.items(), *parameters.items()):
        if field == "ignore_eos" and value is True:
            continue  # needed for servers whose dialect does not set it, such as llama.cpp and SGLang
        if field in RESERVED_FIELDS:
            raise ValueError(f"{field!r} cannot be set here: {RESERVED_FIELDS[field]}")
    return fields


class Dataset(msgspec.Struct, frozen=True):
    """A workload that sends each prompt of a file once, in the order of the file. `kind` is a key of SAMPLES.

    Responses have the lengths of the recorded answers, unless the user requests other lengths."""

    kind: str
    path: Path

    @classmethod
    def of(cls, kind: str) -> Callable[[str], Self]:
        """Return a function that creates a dataset of this kind from the text after the colon, which is a file name."""
        return lambda rest: cls(kind, Path(parse_path_and_options(rest, ())[0]))

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of the file in order. Raises WorkloadError if the file is malformed."""
        return SAMPLES[self.kind](self.path)

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """Yield one `Request` per sample, with ids 0, 1, 2, ... Raises WorkloadError if the file is malformed."""
        output_tokens = answer_tokens(prompts)
        for number, sample in enumerate(self.samples()):
            input_tokens = 0 if sample.uncountable else prompts.count_if_known(sample.prompt)
            yield Request(
                number, sample.prompt, input_tokens, output_tokens(sample), body=sample.body, images=sample.images
            )

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}"


def answer_tokens(prompts: Prompts) -> Callable[[Sample], int]:
    """Return a function that returns the output length of a sample in tokens.

    The function uses the first of these lengths that is available:

    - the next length of the distribution that the user requests.
    - `output_tokens` of the sample.
    - the length of the recorded answer.
    - DEFAULT_OUTPUT_TOKENS."""
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
