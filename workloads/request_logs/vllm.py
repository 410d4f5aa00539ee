"""Reads the text log of vLLM with `--enable-log-requests`.

Depending on vLLM's version and log level, one line or two lines describe a request (vllm/entrypoints/logger.py, in
newer versions vllm/entrypoints/serve/utils/request_logger.py):

    INFO 11-05 12:39:35 [logger.py:40] Received request ID: prompt: '...', params: SamplingParams(...),
        prompt_token_ids: [...], prompt_embeds shape: None, lora_request: None.

    DEBUG 11-05 12:39:35 [logger.py:40] Request ID details: prompt: '...', prompt_token_ids: [...], ...
    INFO 11-05 12:39:35 [logger.py:51] Received request ID: params: SamplingParams(...), lora_request: None.

With `--enable-log-outputs`, the log also contains the responses. At the level DEBUG, newer versions also write the
token ids of a response. For a streamed response, only the chunks with text contribute token ids, so tokens without text
are missing:

    INFO 11-05 12:39:36 [logger.py:72] Generated response ID (streaming complete): output: '...', output_token_ids: ...
    DEBUG 11-05 12:39:36 [logger.py:98] Generated response ID details: output_token_ids: [...]

vLLM writes times without a year, in whole seconds. The requests of one second are spread evenly over this second. If a
line begins with a time that has a fraction of a second, as `docker logs --timestamps` writes it, this time is used.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from loadgen.workloads.request_logs.logged import LoggedRequest, LogNotes, PromptContent
from loadgen.workloads.request_logs.prompt_text import token_ids
from loadgen.workloads.session_formats.rows import RowStore, file_lines, row_store
from loadgen.workloads.spec_syntax import NS_PER_S, WorkloadError
from loadgen.workloads.traces import parse_date

_LITERAL = r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*\""""
# At most 300 characters stand in front of vLLM's message: time, level, process and file.
_MESSAGE = re.compile(r"(.{0,300}?)\b(Received request|Request|Generated response) (\S+?)(:? .*)", re.S)
_PROMPT = re.compile(rf"prompt: (None|{_LITERAL})", re.S)
_IDS = re.compile(r"prompt_token_ids: (None|\[[\d, ]*\])")
_OUTPUT = re.compile(rf"output: ({_LITERAL})", re.S)
_OUTPUT_IDS = re.compile(r"output_token_ids: (?:\w+\()?\[([\d, ]*)\]")
_STREAMED = re.compile(r"<streaming_complete: (\d+) tokens>")
"""What vLLM writes as the output of a streamed response whose text it has not collected."""
_PARAMS = re.compile(r"\bparams: (\w+)")
_LORA = re.compile(r"lora_request: LoRARequest\(lora_name='([^']*)'")
_TIME = re.compile(r"((?:\d{4}-)?\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:\d\d)?(?= |\]|$)")
YEAR = 2000
"""Year of times without a year. It is a leap year, so every date exists."""
DAY_NS = 86_400 * NS_PER_S
OTHER_LINES = "lines that describe no request"
NO_LENGTH = "requests without a prompt: newer versions of vLLM write prompts only with VLLM_LOGGING_LEVEL=DEBUG"
NO_TEXT_GENERATED = "requests that generate no text, such as embeddings and tokenize"
GENERATING = {"SamplingParams", "BeamSearchParams"}
SPREAD = "requests with times in whole seconds, which are spread evenly over their second"
SAME_LENGTH = "prompts that are as long as the longest one: with --max-log-len, their real lengths are larger"
SAME_LENGTH_MIN = 3
CUT_HINT = "remove the incomplete line, or name the format of the log with --format"


class _Line(NamedTuple):
    """A line of vLLM's log that is about one request, divided into its parts.

    `line` is the number of the line. `head` is the text before vLLM's message, such as the time. `id` is the id of the
    request, and `rest` is the text after the id.
    """

    line: int
    head: str
    kind: str
    """`Received request`, `Request` (its details) or `Generated response`."""
    id: str
    rest: str


def read(path: Path, notes: LogNotes) -> Iterator[LoggedRequest]:
    """Yield the requests of a log. The file is read twice: for the responses, and for the requests.

    Raises WorkloadError for an incomplete line, and for a log without requests."""
    with row_store() as outputs:
        _store_outputs(path, outputs)
        longest = count = 0
        group: list[LoggedRequest] = []
        clock = _Clock()
        for request, whole_seconds in _received(path, notes, outputs, clock):
            length = len(request.prompt or "")
            if length == longest:
                count += 1
            elif length > longest:
                count = 1
            longest = max(longest, length)
            if group and group[0].start_ns != request.start_ns:
                yield from _spread(group, notes)
                group = []
            if whole_seconds:
                group.append(request)
            else:
                yield request
        yield from _spread(group, notes)
    if count >= SAME_LENGTH_MIN:
        notes.remarks[SAME_LENGTH] += count


def _lines(path: Path, notes: LogNotes | None = None) -> Iterator[_Line]:
    """Yield the lines of the log that are about a request. All other lines are counted in `notes`."""
    for line, text in file_lines(path, "the log"):
        match = _MESSAGE.match(text)
        is_details = match is not None and match[2] == "Request"
        if match is None or (is_details and not match[4].startswith(" details: ")):
            if notes is not None:
                notes.left_out[OTHER_LINES] += 1
            continue
        yield _Line(line, match[1], match[2], match[3], match[4])


def _store_outputs(path: Path, outputs: RowStore) -> None:
    """Read the log `path`, and store the length of each logged response in `outputs`, under the id of the request.

    Lengths are stored as text. The text is a number of tokens, such as `128`. If the log does not show the number of
    tokens, the stored text is the character `'` and then the response itself, such as `'Hello`.
    """
    pieces: Counter[str] = Counter()
    """Number of tokens in the pieces of streamed responses that are not complete yet, by id."""
    for entry in _lines(path):
        if entry.kind != "Generated response":
            continue
        literal = _OUTPUT.search(entry.rest)
        ids = _OUTPUT_IDS.search(entry.rest, literal.end() if literal else 0)
        tokens = ids[1].count(",") + 1 if ids is not None and ids[1] else 0
        if entry.rest.startswith(" (streaming delta)"):
            pieces[entry.id] += tokens
            continue
        tokens = tokens or pieces.pop(entry.id, 0)
        if tokens:
            length = f"{tokens}"
        elif literal is not None:
            text = _text_of(literal[1], f"{path}, line {entry.line}")
            streamed = _STREAMED.fullmatch(text)
            length = streamed[1] if streamed else f"'{text}"
        elif " details: " in entry.rest:
            continue
        else:
            raise WorkloadError(f"{path}, line {entry.line}: a response is incomplete", CUT_HINT)
        outputs.add(entry.line, "", entry.id, length)


def _received(path: Path, notes: LogNotes, outputs: RowStore, clock: _Clock) -> Iterator[tuple[LoggedRequest, bool]]:
    """Yield each logged request that has a prompt, as a pair of the request and a flag.

    The flag is True if the log states the time of the request only in whole seconds. `outputs` contains the responses
    in the log, and `clock` reads the times. `notes` counts the requests that are left out.
    """
    details: dict[str, str] = {}
    """Lines with details of requests that have not been received yet, by id."""
    count = 0
    for entry in _lines(path, notes):
        where = f"{path}, line {entry.line}"
        if entry.kind == "Request":
            details[entry.id] = entry.rest
            continue
        if entry.kind == "Generated response":
            continue
        count += 1
        prompt_text = details.pop(entry.id, entry.rest)
        settings = _PROMPT.sub("", entry.rest, count=1)
        kind = _PARAMS.search(settings)
        if kind is None:
            raise WorkloadError(f"{where}: the request {entry.id} is incomplete", CUT_HINT)
        if kind[1] not in GENERATING:
            notes.left_out[NO_TEXT_GENERATED] += 1
            continue
        prompt = _prompt(prompt_text, where)
        if prompt is None:
            notes.left_out[NO_LENGTH] += 1
            continue
        start_ns, whole_seconds = clock.time(entry.head, where)
        lora = _LORA.search(settings)
        request = LoggedRequest(
            name=f"{where}, {entry.id}", where=where, start_ns=start_ns, prompt=prompt, model=lora[1] if lora else ""
        )
        output = outputs.row(entry.id) or outputs.row(entry.id.rpartition("-")[0])
        if output is not None:
            text = output[1]
            request.output = text[1:] if text.startswith("'") else None
            request.output_tokens = None if text.startswith("'") else int(text)
        yield request, whole_seconds
    if not count:
        raise WorkloadError(
            f"{path}: no line has 'Received request', so it is no log of requests",
            "start vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG, or name the format with --format",
        )


def _prompt(rest: str, where: str) -> PromptContent | None:
    """Return the prompt that a line of the log contains: its token ids if the line has them, otherwise its text.

    `rest` is the part of the line after the id of the request. `where` is the location of the line, for error messages.
    Return None if the line has no prompt. Raises WorkloadError if the prompt is cut off.
    """
    match = _PROMPT.search(rest)
    if match is None:
        if re.search(r"\bprompt: ['\"]", rest):
            raise WorkloadError(f"{where}: the prompt is incomplete", CUT_HINT)
        return None
    ids = _IDS.search(rest, match.end())
    if ids is not None and re.search(r"\d", ids[1]):
        return token_ids(map(int, ids[1].strip("[]").split(",")))
    return None if match[1] == "None" else _text_of(match[1], where)


def _text_of(literal: str, where: str) -> str:
    """Return the text that `literal` represents, for example the text `it's` for the literal `"it's"`.

    vLLM writes the literals to its log with Python's `repr`. `where` is the location of the literal in the file, for
    the error message. Raises WorkloadError if the literal is malformed.
    """
    try:
        return str(literal_eval(literal))
    except (ValueError, SyntaxError):
        raise WorkloadError(f"{where}: the text in quotes is damaged", CUT_HINT) from None


class _Clock:
    """Reads the times at the beginning of the lines of a log.

    If the dates have no year and jump back by more than 180 days, as from December to January, a new year has begun.
    """

    def __init__(self) -> None:
        self._last_ns: int | None = None

    def time(self, head: str, where: str) -> tuple[int, bool]:
        """Return the time of a line in ns, and True if the line states it in whole seconds.

        `head` is the part of the line before the message. `where` is the location in the file, for error messages.
        Raises WorkloadError if the line has no valid time.
        """
        match = _TIME.search(head)
        if match is None:
            raise WorkloadError(
                f"{where}: there is no time in front of the message",
                "keep the beginning of the lines, such as: INFO 11-05 12:39:35 [logger.py:40] Received request ...",
            )
        day, clock_time, fraction, zone = match.groups()
        has_year = len(day) > len("01-31")
        text = f"{day if has_year else f'{YEAR}-{day}'} {clock_time}" + (f".{fraction}" if fraction else "")
        try:
            time_ns = parse_date(text + (zone or ""))
        except ValueError:
            raise WorkloadError(f"{where}: {match[0]} is no time", CUT_HINT) from None
        if not has_year:
            while self._last_ns is not None and time_ns < self._last_ns - 180 * DAY_NS:
                time_ns += 366 * DAY_NS  # the length of the year YEAR
            self._last_ns = time_ns
        return time_ns, fraction is None


def _spread(group: list[LoggedRequest], notes: LogNotes) -> Iterator[LoggedRequest]:
    """Spread the requests of one second evenly over this second, and yield them."""
    for index, request in enumerate(group):
        request.start_ns = (request.start_ns or 0) + index * NS_PER_S // len(group)
        yield request
    notes.remarks[SPREAD] += len(group)
