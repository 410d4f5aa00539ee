"""Reads prompts and dialogues from files, one entry at a time, so that a file may be larger than memory.

    sharegpt   JSON array of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]},
               or JSON Lines with one such object per line.
    alpaca     JSON array of {"instruction": ..., "input": ..., "output": ...}, or JSON Lines.
    jsonl      one {"prompt": ..., "output_tokens": N, "body": {...}, "image": ...} per line. Only `prompt` is
               required, and unknown keys are ignored. `body` contains additional fields for the body of the request.
               `image` is the URL of an image, or the path of an image file relative to the folder of the dataset.
               `images` is a list of these.
               A line may have OpenAI chat messages instead of a prompt: {"messages": [{"role": ..., "content": ...}]}.
               If the last message is from the assistant, it is the recorded answer. If a message has more than a role
               and text, such as a tool call, all messages of the line are sent unchanged. `tools`, `model`, `headers`
               and `max_tokens` of the line apply to its request. A line may also have the form of OpenAI's batch API,
               with the messages in its `body`.

Some entries contain no question with an answer. Examples are a dialogue in which no question is directly followed by an
answer, and an Alpaca element with an empty instruction or output. These entries are skipped, as in other load testers.
Any other deviation from the format is an error, whose message names the line or the element.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeVar

import msgspec

from loadgen.workloads.http_headers import check_header
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
FORMAT_CHOICE = 'write one {"prompt": "..."} or {"messages": [...]} per line, or an array in ShareGPT or Alpaca format'
LINE_HINT = "correct or remove the line"
TEMPLATE_FIELDS = {"chat_template", "chat_template_kwargs", "documents", "query", "tools"}
"""Fields of a request body that change the number of prompt tokens."""

BATCH_FIELDS = ("messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n")
"""Fields of a body for OpenAI's batch API that are not sent, because the run decides them."""
FORMATS = {
    "conversations": ("sharegpt", "ShareGPT conversations"),
    "instruction": ("alpaca", "Alpaca instructions"),
    "messages": ("jsonl", "OpenAI chat messages"),
    "prompt": ("jsonl", "prompts"),
}
"""Name of the field that identifies a format, to the `kind` of the dataset and the description of the format."""

Item = TypeVar("Item")

SAMPLING_FIELDS = ("parameters", "sampling_params")
"""Fields of a request that contain sampling parameters: of TGI and LightLLM, and of SGLang."""
RESERVED_FIELDS = {
    **dict.fromkeys(("prompt", "messages", "inputs", "input", "text", "input_ids"), "--workload sets the prompts"),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_new_tokens"), "--output-tokens sets the length of responses"
    ),
    "model": "use --model",
    "ignore_eos": "use --no-ignore-eos",
    "stream": "responses are measured as streams",
    "n": "a request has one response",
    "echo": "the prompt would count as the first tokens of the response",
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
    messages: tuple[tuple[str, str], ...] = ()
    """Role and content of each chat message. The last message is the prompt. Empty: the prompt is the only message, or
    the body contains the messages as the file has them."""
    model: str = ""  # Model that the file states
    headers: Mapping[str, str] = {}  # Headers that the file states
    expect: str = ""  # Text that the response must contain

    @property
    def has_messages(self) -> bool:
        """True if the sample has a list of chat messages."""
        return bool(self.messages or "messages" in self.body)

    @property
    def uncountable(self) -> bool:
        """True if the prompt has tokens in addition to those of its text, for example because it contains images."""
        has_history = len(self.messages) > 1 or any(role not in USER_ROLES for role, _ in self.messages)
        return bool(self.images or has_history or {"messages", *TEMPLATE_FIELDS}.intersection(self.body))

    def check_endpoint(self, *, chat: bool) -> None:
        """Raise WorkloadError if the sample needs a chat endpoint but `chat` is False."""
        if (self.images or self.has_messages) and not chat:
            name = "images" if self.images else "a list of messages"
            raise WorkloadError(f"only chat requests can contain {name}", "use --endpoint chat")


def sharegpt(path: Path) -> Iterator[tuple[Sample, ...]]:
    """Yield each dialogue of a file in ShareGPT format, as one sample per question of the user.

    Only questions that are directly followed by an answer are used. A dialogue without such a question is skipped.
    Messages of other roles, such as the system, are ignored. Raises WorkloadError if the file is unreadable or not in
    ShareGPT format.
    """
    return elements(path, _dialogue)


def alpaca(path: Path) -> Iterator[Sample]:
    """Yield one sample per element of a file in Alpaca format. The prompt is the instruction followed by the input.

    Elements with an empty instruction or output are skipped. Raises WorkloadError if the file is unreadable or not in
    Alpaca format.
    """
    return elements(path, _instruction)


def jsonl(path: Path) -> Iterator[Sample]:
    """Yield one sample per line of a JSON Lines file with prompts or chat messages.

    Raises WorkloadError if the file is unreadable or malformed.
    """
    return elements(path, partial(_prompt, folder=path.parent))


@contextmanager
def error_location(location: str, hint: str) -> Iterator[None]:
    """Context manager for code that reads one entry of a file. Errors in this code become WorkloadErrors.

    The message begins with `location`, such as the file name and line number. `hint` is used for errors that have no
    hint.
    """
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

    A line of more than `limit` characters is split into several lines."""
    return ((line, text) for line, text in enumerate(iter(lambda: file.readline(limit), ""), 1) if text.strip())


def elements(
    path: Path, convert: Callable[[Any], Item | None], name: str = "the dataset", hint: str = FORMAT_HINT
) -> Iterator[Item]:
    """Yield the elements of a file, each converted by the function `convert`.

    An element is a member of a JSON array, or a line of a JSON Lines file. The file is read step by step, as elements
    are needed. Elements for which `convert` returns None are skipped. `name` describes the file in error messages, and
    `hint` says what to do about an element that `convert` refuses.
    """
    with open_text(path, name) as file:
        buffer = _skip_blanks(file, "")
        items = _array_elements(path, file, buffer[1:]) if buffer.startswith("[") else _line_elements(path, file)
        for location, raw, decode in items:
            with error_location(location, hint):
                check_file_text(raw)
                item = convert(decode())
            if item is not None:
                yield item


def _line_elements(path: Path, file: TextIO) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield each line of a file, as its location, its text and a function that decodes the text as JSON.

    Blank lines are skipped. A location is a text for error messages, such as `data.jsonl, line 3`.
    """
    file.seek(0)
    for line, text in lines(file, ELEMENT_LIMIT):
        yield f"{path}, line {line}", text, partial(json.loads, text)


def _array_elements(path: Path, file: TextIO, buffer: str) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield each element of a JSON array, as its location, its text and a function that returns its value.

    `buffer` contains the text that was already read after the opening bracket of the array. The remaining text is read
    from `file`. A location is a text for error messages, such as `data.json, element 3`.
    """
    decoder = json.JSONDecoder()
    buffer = _skip_blanks(file, buffer)
    for position in count(1):
        if buffer.startswith("]"):
            return
        location = f"{path}, element {position}"
        element, raw, buffer = _next_element(decoder, file, buffer, location)
        yield location, raw, partial(_identity, element)


def _identity(value: Any) -> Any:
    return value


def _next_element(decoder: json.JSONDecoder, file: TextIO, buffer: str, location: str) -> tuple[Any, str, str]:
    """Return the next element of a JSON array in a file: its value, its source text, and the remaining buffer.

    `buffer` contains text that was already read from the file. If it does not contain the whole element, more text is
    read. The remaining buffer is the text that was read after the element. It begins with the next element or with the
    closing bracket of the array. Raises WorkloadError if the element is malformed. `location` names the element in the
    message.
    """
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
    """Return the buffer without leading white space. If the buffer is only white space, read more of the file."""
    buffer = buffer.lstrip()
    while not buffer:
        more = file.read(READ_CHARACTERS)
        if not more:
            break
        buffer = more.lstrip()
    return buffer


def _dialogue(item: Any) -> tuple[Sample, ...] | None:
    """Return one sample for each message of the user that is directly followed by an answer.

    `item` is one conversation of a file in ShareGPT format. Messages of other roles are ignored. Return None if there
    are no samples.
    """
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
    batch_body = _batch_body(item)
    if batch_body:
        item = {**batch_body, "body": {name: batch_body[name] for name in batch_body if name not in BATCH_FIELDS}}
        item.pop("model", None)  # as in all fields of BATCH_FIELDS, the run decides
        item.pop("tools", None)  # already in the body
    if "prompt" not in item and "messages" in item:
        return _chat(item)
    prompt = _whole_text(item["prompt"], "prompt")
    if not prompt:
        raise ValueError("its prompt is empty")
    urls = item.get("images", [item["image"]] if "image" in item else [])
    images = tuple(image_url(_text(url, "image"), folder) for url in urls)
    return Sample(prompt, output_tokens=_line_tokens(item), body=_line_body(item), images=images, **_line_options(item))


def _line_tokens(item: Mapping[str, Any]) -> int | None:
    """Return the output length that a line states, or None if it states none."""
    return _output_tokens(item, "output_tokens", "max_completion_tokens", "max_tokens")


def _line_body(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that a line adds to the body of its request: the fields in `body`, and the field `tools`."""
    tools = item.get("tools")
    if not isinstance(tools, list | None):
        raise TypeError(f"has tools that are not a list: {tools!r}"[:120])
    check_value(tools, "tools")
    return {**_body(item.get("body")), **({"tools": tools} if tools else {})}


def _line_options(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model, the headers and the expected text that a line of a file states, as fields of a Sample.

    `item` is the parsed line. A field that the line does not state is empty in the result. Raises TypeError for a value
    of a wrong type, and WorkloadError for a header or a text that cannot be sent.
    """
    model = item.get("model")
    headers = item.get("headers", {})
    if not isinstance(model, str | None):
        raise TypeError(f"has a model that is not text: {model!r}"[:120])
    if not isinstance(headers, Mapping) or not all(isinstance(value, str) for value in headers.values()):
        raise TypeError("has headers that are not an object of texts")
    for name, value in headers.items():
        check_header(name, value)
    expect = item.get("expect", "")
    if not isinstance(expect, str):
        raise TypeError(f"has an expect that is not text: {expect!r}"[:120])
    check_text(expect, "expect")
    return {"model": model or "", "headers": headers, "expect": expect}


def _batch_body(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the request body of a line in the format of OpenAI's batch API, or an empty mapping for any other line."""
    body = item.get("body")
    is_batch = isinstance(body, Mapping) and "messages" in body and not {"prompt", "messages"} & item.keys()
    return body if isinstance(body, Mapping) and is_batch else {}


def _chat(item: Mapping[str, Any]) -> Sample:
    """Return the sample of a line with OpenAI chat messages.

    If the last message is from the assistant, this message is the recorded answer. If a message contains more than a
    role and text, for example a tool call, all messages are sent exactly as they are in the file.
    """
    if not isinstance(item["messages"], list) or not item["messages"]:
        raise TypeError("its messages are not a list of at least one message")
    if not _is_plain(item["messages"]):
        return _whole_chat(item)
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(item["messages"])]
    answer = messages.pop()[1] if messages[-1][0] in ASSISTANT_ROLES and len(messages) > 1 else ""
    _, prompt, images = messages[-1]
    if not prompt:
        raise ValueError("its last message has no text")
    history = tuple((role, text) for role, text, _ in messages)
    return Sample(
        prompt,
        answer,
        _line_tokens(item),
        body=_line_body(item),
        images=images,
        messages=history,
        **_line_options(item),
    )


def _is_plain(messages: Sequence[Any]) -> bool:
    """Return True if every message of a chat has only a role and a text. Every API can send such a chat.

    Images are allowed too, in the last message of the user. Malformed messages count as plain, so that the function
    which reads plain messages reports the mistake.
    """
    last_user = max((index for index, message in enumerate(messages) if _role_of(message) in USER_ROLES), default=-1)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return True
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        types = [part.get("type") if isinstance(part, Mapping) else "text" for part in parts]
        if not message.keys() <= {"role", "content"} or content is None:
            return False
        if set(types) - {"text", "image_url"} or ("image_url" in types and index != last_user):
            return False
    return True


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _whole_chat(item: Mapping[str, Any]) -> Sample:
    """Return the sample of a line whose messages are sent exactly as they are in the file.

    If the last message is a text of the assistant, this text is the recorded answer, and is not sent.
    """
    messages = list(item["messages"])
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{index}] is not an object")
        _text(message["role"], f"messages[{index}].role")
        content = message.get("content")
        is_call = content is None and message["role"] in ASSISTANT_ROLES and message.get("tool_calls")
        if not (isinstance(content, str | list) or is_call):
            raise TypeError(f"messages[{index}] has no text that can be sent, but {content!r}"[:120])
    check_value(messages, "messages")
    answer = ""
    last = messages[-1]
    if last["role"] in ASSISTANT_ROLES and isinstance(last.get("content"), str) and len(messages) > 1:
        answer = messages.pop()["content"]
    body = {**_line_body(item), "messages": messages}
    return Sample("", answer, _line_tokens(item), body=body, **_line_options(item))


def _message(message: Any, name: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the role, the text and the image URLs of a chat message.

    `name` stands for the message in error messages, for example `messages[0]`.
    """
    role = _text(message["role"], f"{name}.role")
    content = message["content"]
    if isinstance(content, str):
        return role, _whole_text(content, f"{name}.content"), ()
    if not isinstance(content, list):
        raise TypeError(f"{name} has no text that can be sent, but {content!r}"[:120])
    texts: list[str] = []
    images: list[str] = []
    for part in content:
        if part["type"] == "text":
            texts.append(_whole_text(part["text"], f"{name}.content"))
        elif part["type"] == "image_url":
            images.append(_text(part["image_url"]["url"], f"{name}.image_url"))
        else:
            raise ValueError(f"{name} has a part of type {part['type']!r}: only text and image_url can be sent")
    return role, "\n".join(texts), tuple(images)


def _output_tokens(item: Mapping[str, Any], *names: str) -> int | None:
    """Return the output length in tokens: the first of the fields `names` that the line has, or None if it has none.

    Raises ValueError if the value is not a valid number of tokens."""
    name = next((name for name in names if item.get(name) is not None), None)
    if name is None:
        return None
    tokens = item[name]
    if type(tokens) is not int or not 1 <= tokens <= TOKENS_LIMIT:
        raise ValueError(f"{name} {tokens!r} is not a whole number of at least 1")
    return tokens


def _body(fields: Any) -> Mapping[str, Any]:
    if not isinstance(fields, Mapping | None):
        raise TypeError(f"has a body that is not an object: {fields!r}"[:120])
    return user_fields(fields or {}, "body")


def _text(value: Any, name: str) -> str:
    """Return the text of a field without surrounding white space. `name` is the field's name in errors.

    Raises TypeError if the value is not text, and WorkloadError if it cannot be encoded in UTF-8."""
    return _whole_text(value, name).strip()


def _whole_text(value: Any, name: str) -> str:
    """Return the text of a field, including surrounding white space. Raises the errors that `_text` raises."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}"[:120])
    check_text(value, name)
    return value


def user_fields(fields: Mapping[str, Any], name: str = "") -> Mapping[str, Any]:
    """Check the fields that a user adds to request bodies, and return them unchanged.

    Raises ValueError for a field that the user must set with another option of loadgen, and WorkloadError for a value
    that JSON cannot represent. `name` is the name of `fields` in error messages.
    """
    check_value(fields, name)
    settings = list(fields.items())
    for field in SAMPLING_FIELDS:
        parameters = fields.get(field, {})
        if not isinstance(parameters, Mapping):
            raise ValueError(f"{field!r} must be an object")
        settings += parameters.items()
    for field, value in settings:
        if (field, value) in (("ignore_eos", True), ("echo", False)):
            continue  # servers whose dialect does not set `ignore_eos` need it, such as llama.cpp
        if field in RESERVED_FIELDS:
            raise ValueError(f"{field!r} cannot be set here: {RESERVED_FIELDS[field]}")
    return fields


class Dataset(msgspec.Struct, frozen=True):
    """A workload that sends the prompts of a file, in the order of the file. `kind` is a key of SAMPLES.

    Each prompt is sent once. If `repeat_file` is set, the file starts again after its last prompt. By default, the
    requested length of a response is that of the recorded answer. The user may request other lengths."""

    kind: str
    path: Path

    @classmethod
    def of(cls, kind: str) -> Callable[[str], Self]:
        """Return a function that creates a dataset of format `kind` from a file name (`FILE` in `sharegpt:FILE`)."""
        return lambda rest: cls(kind, Path(parse_path_and_options(rest, ())[0]))

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of the file in order. Raises WorkloadError if the file is malformed."""
        return SAMPLES[self.kind](self.path)

    @property
    def has_messages(self) -> bool:
        """True if the first line contains a list of chat messages. The requests then need a chat endpoint."""
        sample = next(self.samples(), None) if self.kind == "jsonl" else None
        return sample is not None and sample.has_messages

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """Yield one `Request` per sample, with the ids 0, 1, 2, ... Raises WorkloadError if the file is malformed."""
        output_tokens = answer_tokens(prompts)
        for number, sample in enumerate(repeated(self.samples, repeat=prompts.spec.repeat_file)):
            input_tokens = 0 if sample.uncountable else prompts.count_if_known(sample.prompt)
            yield Request(
                number,
                sample.prompt,
                input_tokens,
                output_tokens(sample),
                sample.messages,
                body=sample.body,
                images=sample.images,
                model=sample.model,
                headers=sample.headers,
                expect=sample.expect,
            )

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}"


def repeated(read: Callable[[], Iterator[Item]], *, repeat: bool) -> Iterator[Item]:
    """Yield the entries of a file, which `read()` yields in order.

    If `repeat` is True, `read()` is called again after the last entry, without end. A file without entries is read only
    once, even if `repeat` is True.
    """
    empty = True
    for entry in read():
        empty = False
        yield entry
    while repeat and not empty:
        yield from read()


def describe_format(source: object) -> str:
    """Return a description of the file format of a workload, such as `ShareGPT conversations`."""
    if str(source).startswith("requests:"):
        return "whole requests"
    if not isinstance(source, Dataset):
        description: str | None = getattr(source, "description", None)
        return description or FORMATS["conversations"][1]
    if source.has_messages:
        return FORMATS["messages"][1]
    return next(description for kind, description in reversed(FORMATS.values()) if kind == source.kind)


def recognise(path: Path) -> str:
    """Return the format of a dataset file (a key of SAMPLES), judging by the fields of its first element.

    Raises WorkloadError if the file is unreadable or in an unknown format.
    """
    try:
        (element,) = next(elements(path, lambda element: (element,)), (None,))
    except WorkloadError as error:
        hint = FORMAT_CHOICE if error.hint in (LINE_HINT, FORMAT_HINT) else error.hint
        raise WorkloadError(str(error), hint) from None
    if element is None:
        raise WorkloadError(f"{path} holds no prompts", FORMAT_CHOICE)
    fields = element if isinstance(element, Mapping) else {}
    kind = next((kind for name, (kind, _) in FORMATS.items() if name in fields or name in _batch_body(fields)), "")
    if not kind:
        names = ", ".join(map(repr, fields)) or "no fields"
        raise WorkloadError(f"{path}: unknown format: its first element has {names[:200]}", FORMAT_CHOICE)
    return kind


def answer_tokens(prompts: Prompts) -> Callable[[Sample], int]:
    """Return a function that takes a sample and returns the requested length of its response in tokens.

    The function returns the first of these lengths that is available:

    - the next length from the distribution that the user has requested
    - the field `output_tokens` of the sample
    - the length of the recorded answer
    - DEFAULT_OUTPUT_TOKENS
    """
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
