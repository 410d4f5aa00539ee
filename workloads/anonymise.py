"""Turns a request log into a trace without text, which `--workload sessions:FILE` replays.

The trace holds lengths, times and sessions. For each block of tokens of a prompt, it holds a number. The number is a
keyed hash (BLAKE2b) of the prompt up to the end of the block. Equal numbers therefore stand for equal beginnings. The
key is the salt, which is random by default and is never written.

    log ──request_logs──> LoggedRequest ──BlockHasher──> AnonymousRequest ──write_trace──> one session per line
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import msgspec

from loadgen.workloads.prompts import Tokenizer
from loadgen.workloads.request_logs import LOG_FORMATS, recognise_log
from loadgen.workloads.request_logs.logged import LoggedRequest, LogNotes, PromptContent
from loadgen.workloads.session_formats.rows import row_store
from loadgen.workloads.session_graph import NODES_LIMIT, ROOT_ROLE, After
from loadgen.workloads.spec_syntax import NS_PER_S, TOKENS_LIMIT, WorkloadError
from loadgen.workloads.token_counter import ABOUT_ONE_TOKEN

DEFAULT_BLOCK_TOKENS = 16
"""Tokens per block of vLLM's prefix cache."""
ID_BITS = 53
"""Number of bits of a block's number. Every JSON tool reads such numbers exactly."""
SALT_MIN = 16
"""Minimum number of characters of a salt that the user chooses. A shorter one could be guessed."""
CALIBRATION_REQUESTS = 200
"""Number of requests from which the number of characters per token is estimated."""
BLOCKS_REMEMBERED = 2_000_000
"""Maximum number of blocks that are remembered to compute the share of tokens that repeat an earlier prompt."""
OUTPUT_UNKNOWN = "responses of unknown length: they get the length of --output-tokens, by default 128 tokens"
NO_TEXT = "prompts without text: within a session, each is assumed to begin with the one before if it is longer"


class AnonymousRequest(msgspec.Struct):
    """A request of a log without its text: times, lengths, block numbers and the requests that it followed."""

    key: int
    """Number of the request in the log."""
    start_ns: int | None
    end_ns: int | None
    input_tokens: int
    output_tokens: int | None
    blocks: list[int] | None
    """None: the log has no text of the prompt."""
    model: str
    after: list[tuple[int, After, int]] | None
    """Keys of the requests that this one followed, `end` or `start`, and the delay in ns. None: decided by times."""
    branch: str
    role: str
    tool_ns: int


class TraceFacts(msgspec.Struct):
    """Facts about a trace that `loadgen anonymise` has written. The command prints them."""

    formats: list[str] = []
    sessions: int = 0
    requests: int = 0
    span_s: float = 0.0
    """Time between the starts of the first and the last request."""
    input_tokens: int = 0
    output_tokens: int = 0
    input_lengths: dict[str, int] = {}
    """Number of prompts by the source of their lengths."""
    output_lengths: dict[str, int] = {}
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    repeated_tokens: int | None = 0
    """Prompt tokens in blocks with which an earlier prompt began too. None: too many blocks to tell."""
    left_out: dict[str, int] = {}
    remarks: dict[str, int] = {}
    models: int = 0
    """Number of model names in the log."""
    models_kept: int = 0
    """Number of model names that have a name in the trace."""


class BlockHasher:
    """Splits prompts into blocks of tokens, and gives each block a number.

    The number is a hash of the prompt from its beginning to the end of the block.
    """

    def __init__(self, salt: bytes, block_tokens: int, tokenizer: Tokenizer | None = None) -> None:
        self._key = blake2b(salt, digest_size=64).digest()
        self._block_tokens = block_tokens
        self._tokenizer = tokenizer
        self._words_per_token = 1.0
        """Words by the rule ABOUT_ONE_TOKEN for each token that the log has counted."""

    def calibrate(self, requests: Iterable[LoggedRequest]) -> None:
        """Estimate the number of words per token from the requests whose text and length are both in the log.

        If the log has no such request, the default estimate is kept.
        """
        words = tokens = 0
        for request in requests:
            if isinstance(request.prompt, str) and request.input_tokens:
                words += len(ABOUT_ONE_TOKEN.findall(request.prompt))
                tokens += request.input_tokens
        if words and tokens:
            self._words_per_token = words / tokens

    def length(self, content: PromptContent | None, counted: int | None) -> tuple[int | None, str]:
        """Return the length of a text in tokens, and a description of how this number was determined.

        `content` is the text or its token ids, and `counted` is the number that the log states. Either may be None. If
        both are None, the length is None.
        """
        if isinstance(content, tuple):
            return len(content), "token ids in the log"
        if content is not None and self._tokenizer is not None:
            return max(1, len(self._tokenizer.ids(content))), "counted with the tokenizer"
        if counted is not None:
            return counted, "counts in the log"
        if content is None:
            return None, "unknown"
        words = len(ABOUT_ONE_TOKEN.findall(content))
        return max(1, round(words / self._words_per_token)), "estimated from the text"

    def blocks(self, prompt: PromptContent, input_tokens: int) -> list[int]:
        """Return one hash for each block of a prompt that has `input_tokens` tokens. The last block may be incomplete.

        Without a tokenizer, the end of each block of a text is only estimated. The text may then have fewer blocks than
        `input_tokens` requires, and empty blocks are added. Each hash also depends on all earlier blocks, so the hashes
        of the empty blocks depend on the whole text.
        """
        needed = -(-input_tokens // self._block_tokens)
        contents = islice(chain(self._contents(prompt), iter(lambda: b"", None)), needed)
        return list(self._chained(contents))

    def unknown_blocks(self, name: str, before: Sequence[int], input_tokens: int) -> list[int]:
        """Return block numbers for a prompt of `input_tokens` tokens whose text is unknown.

        The prompt begins with the block numbers `before`, which it shares with another prompt. The other numbers are
        hashes of `name`, so that no other prompt has them.
        """
        needed = -(-input_tokens // self._block_tokens)
        own = (f"{name}/{index}".encode() for index in range(needed - len(before)))
        return [*before, *self._chained(own)]

    def _contents(self, prompt: PromptContent) -> Iterator[bytes]:
        """Yield the content of each block of a prompt as bytes.

        With a tokenizer, or if the prompt consists of token ids, the content of a block is its token ids. Otherwise the
        content is a part of the text. The ends of the blocks are then estimated from the mean number of words per
        token.
        """
        if isinstance(prompt, str) and self._tokenizer is not None:
            prompt = tuple(self._tokenizer.ids(prompt))
        size = self._block_tokens
        if isinstance(prompt, tuple):
            for start in range(0, len(prompt), size):
                yield array("q", prompt[start : start + size]).tobytes()
            return
        ends = [match.end() for match in ABOUT_ONE_TOKEN.finditer(prompt)]
        start = position = 0
        for block in range(1, len(ends) + 1):
            position = round(block * size * self._words_per_token)
            if position >= len(ends):
                break
            end = ends[max(1, position) - 1]
            yield prompt[start:end].encode("utf-8", "surrogatepass")
            start = end
        yield prompt[start:].encode("utf-8", "surrogatepass")

    def _chained(self, contents: Iterable[bytes]) -> Iterator[int]:
        """Yield a hash for each block in `contents`. Each hash covers this block and all blocks before it."""
        before = b""
        for content in contents:
            before = blake2b(before + content, key=self._key, digest_size=16).digest()
            yield int.from_bytes(before[:8]) >> (64 - ID_BITS)


def salt_from(text: str | None) -> bytes:
    """Return the bytes of a salt that the user has chosen, or a new random salt for None.

    Raises WorkloadError if the text is too short."""
    if text is None:
        return secrets.token_bytes(32)
    if len(text) < SALT_MIN:
        raise WorkloadError(
            f"the salt has {len(text)} characters, fewer than {SALT_MIN}, so it could be guessed",
            "use a long random text: openssl rand -hex 32",
        )
    return text.encode("utf-8", "surrogateescape")


def write_trace(
    paths: Sequence[Path],
    file: IO[str],
    hasher: BlockHasher,
    block_tokens: int,
    format_name: str | None = None,
    models: Mapping[str, str] = {},
) -> TraceFacts:
    """Write the requests of the logs `paths` as a trace to `file`, and return facts about the trace.

    `models` maps the names of models in the logs to their names in the trace. Models that are not in `models` get no
    name in the trace. Raises WorkloadError for an invalid log, and if no request can be written.
    """
    facts = TraceFacts(block_tokens=block_tokens)
    notes = LogNotes()
    writer = _TraceWriter(file, hasher, facts, notes, models)
    formats: dict[str, None] = {}
    numbers: dict[str, int] = {}
    with row_store() as store, row_store() as names:
        first_ns: int | None = None
        last_ns: int | None = None
        requests = _requests(paths, format_name, formats, notes)
        sample = list(islice(requests, CALIBRATION_REQUESTS))
        hasher.calibrate(sample)
        for number, request in enumerate(chain(sample, requests), 1):
            if not names.add(number, "", request.name, ""):
                raise WorkloadError(
                    f"{request.where}: the request {request.name!r} occurs twice", "remove one of the lines"
                )
            if request.after is not None:
                numbers[request.name] = number
            anonymous = writer.without_text(request, number, numbers)
            if anonymous.start_ns is not None:
                first_ns = anonymous.start_ns if first_ns is None else min(first_ns, anonymous.start_ns)
                last_ns = anonymous.start_ns if last_ns is None else max(last_ns, anonymous.start_ns)
            session = f"request {number}" if request.session is None else f"session {request.session}"
            order = number if anonymous.start_ns is None else anonymous.start_ns
            store.add(order, session, f"{number}", msgspec.json.encode(anonymous).decode())
        for _, found in store.sessions():
            writer.write([ROW.decode(text) for _, text in found], first_ns or 0)
    facts.span_s = ((last_ns or 0) - (first_ns or 0)) / NS_PER_S
    facts.formats = list(formats)
    facts.left_out, facts.remarks = dict(notes.left_out), dict(notes.remarks)
    if not facts.requests:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in facts.left_out.items()) or "it has none"
        raise WorkloadError(f"{', '.join(map(str, paths))}: no request is left: {reasons}", "name another log")
    return facts


ROW = msgspec.json.Decoder(AnonymousRequest)


def _requests(
    paths: Sequence[Path], format_name: str | None, formats: dict[str, None], notes: LogNotes
) -> Iterator[LoggedRequest]:
    """Yield the requests of all logs.

    The title of the format of each log is added to `formats`. `format_name` is the name of the format, or None to
    recognise the format of each log.
    """
    for path in paths:
        known = LOG_FORMATS[format_name or recognise_log(path)]
        formats[known.title] = None
        yield from known.read(path, notes)


class _TraceWriter:
    """Removes the text of requests, and writes their sessions to a trace."""

    def __init__(
        self, file: IO[str], hasher: BlockHasher, facts: TraceFacts, notes: LogNotes, models: Mapping[str, str]
    ) -> None:
        self._file = file
        self._hasher = hasher
        self._facts = facts
        self._notes = notes
        self._models = models
        self._seen: set[int] = set()
        self._model_names: set[str] = set()
        facts.input_lengths, facts.output_lengths = Counter(), Counter()

    def without_text(self, request: LoggedRequest, number: int, numbers: Mapping[str, int]) -> AnonymousRequest:
        """Return the request without its text, and add its lengths to the facts about the trace.

        `number` is the number of this request in the log. `numbers` maps the names of earlier requests to their
        numbers. Raises WorkloadError if the length of the prompt is unknown or invalid.
        """
        input_tokens, source = self._hasher.length(request.prompt, request.input_tokens)
        if input_tokens is None or not 0 < input_tokens <= TOKENS_LIMIT:
            raise WorkloadError(f"{request.where}: its prompt has {input_tokens} tokens", "remove the request")
        self._facts.input_lengths[source] = self._facts.input_lengths.get(source, 0) + 1
        output_tokens, output_source = self._hasher.length(request.output, request.output_tokens)
        self._facts.output_lengths[output_source] = self._facts.output_lengths.get(output_source, 0) + 1
        if output_tokens is None:
            self._notes.remarks[OUTPUT_UNKNOWN] += 1
        if request.prompt is None:
            self._notes.remarks[NO_TEXT] += 1
        if request.model:
            self._model_names.add(request.model)
            self._facts.models = len(self._model_names)
            self._facts.models_kept = len(self._model_names & self._models.keys())
        return AnonymousRequest(
            key=number,
            start_ns=request.start_ns,
            end_ns=request.end_ns,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            blocks=None if request.prompt is None else self._hasher.blocks(request.prompt, input_tokens),
            model=self._models.get(request.model, ""),
            after=None
            if request.after is None
            else [(numbers[name], after, delay_ns) for name, after, delay_ns in request.after],
            branch=request.branch,
            role=request.role,
            tool_ns=request.tool_ns,
        )

    def write(self, requests: list[AnonymousRequest], first_ns: int) -> None:
        """Write one session. `first_ns` is the time of the first request of the trace."""
        if len(requests) > NODES_LIMIT:
            raise WorkloadError(
                f"a session has {len(requests):,} requests, more than {NODES_LIMIT:,}",
                "split the log by time, and replay the parts one after the other",
            )
        self._facts.sessions += 1
        self._facts.requests += len(requests)
        self._guess_blocks(requests)
        branches = {name: f"{index}" for index, name in enumerate({request.branch: None for request in requests})}
        for request in requests:
            request.branch = branches[request.branch]
        ids = {request.key: f"{index}" for index, request in enumerate(requests, 1)}
        start_ns = requests[0].start_ns
        nodes = [
            self._node(request, edges, ids, start_ns) for request, edges in zip(requests, _edges(requests), strict=True)
        ]
        line: dict[str, Any] = {"session": f"{self._facts.sessions}"}
        if start_ns is not None:
            line["at_s"] = _seconds(start_ns - first_ns)
        if any("blocks" in node for node in nodes):
            line["block_tokens"] = self._facts.block_tokens
        self._file.write(msgspec.json.encode({**line, "nodes": nodes}).decode() + "\n")

    def _guess_blocks(self, requests: list[AnonymousRequest]) -> None:
        """Assign invented block numbers to those prompts of a session whose texts are unknown.

        Block numbers show which prompts begin with the same tokens: such prompts begin with the same block numbers.
        Without texts, this must be guessed from the branches of the session. A branch is a sequence of requests that
        follow one another. If a prompt is longer than the previous prompt of its branch, it is assumed to begin with
        that previous prompt.

        If only one prompt of a branch has no text, this prompt gets no block numbers.
        """
        branches = Counter(request.branch for request in requests if request.blocks is None)
        last: dict[str, AnonymousRequest] = {}
        for request in requests:
            if request.blocks is None and branches[request.branch] > 1:
                before = last.get(request.branch)
                shared: Sequence[int] = ()
                if before is not None and request.input_tokens > before.input_tokens:
                    shared = (before.blocks or [])[: before.input_tokens // self._facts.block_tokens]
                request.blocks = self._hasher.unknown_blocks(f"{request.key}", shared, request.input_tokens)
                last[request.branch] = request

    def _node(
        self,
        request: AnonymousRequest,
        edges: Sequence[tuple[int, After, int]],
        ids: Mapping[int, str],
        start_ns: int | None,
    ) -> dict[str, Any]:
        """Return one node of the trace: a request with its lengths, blocks and edges.

        - `edges` contains the requests that this request follows. Each edge consists of the key of a request, the event
          (`end` or `start`), and the delay in ns after the event.
        - `ids` maps the keys of requests to the ids of nodes.
        - `start_ns` is the start of the session, or None if the log states no times.
        """
        node: dict[str, Any] = {"id": ids[request.key]}
        if edges:
            tool_ns = request.tool_ns
            node["after"] = [
                {"node": ids[key], "on": after, "delay_s": _seconds(delay_ns - (tool_ns if after == "end" else 0))}
                for key, after, delay_ns in edges
            ]
            node["history"] = "fresh"
            if tool_ns:
                node["tool_s"] = _seconds(tool_ns)
        elif start_ns is not None and request.start_ns is not None and request.start_ns > start_ns:
            node["at_s"] = _seconds(request.start_ns - start_ns)
        node["input_tokens"] = request.input_tokens
        self._facts.input_tokens += request.input_tokens
        if request.output_tokens:
            node["output_tokens"] = request.output_tokens
            self._facts.output_tokens += request.output_tokens
        if request.blocks:
            node["blocks"] = request.blocks
            self._count_repeated(request.blocks, request.input_tokens)
        if request.model:
            node["model"] = request.model
        if request.role != ROOT_ROLE:
            node["role"] = request.role
            node["agent"] = request.branch
        return node

    def _count_repeated(self, blocks: Sequence[int], input_tokens: int) -> None:
        """Count the prompt tokens in the leading blocks that a prompt shares with earlier prompts.

        `blocks` contains the block numbers of the prompt. The number of tokens is added to `repeated_tokens` of the
        facts about the trace. This value becomes None (unknown) if the trace has more than BLOCKS_REMEMBERED different
        blocks.
        """
        if self._facts.repeated_tokens is None:
            return
        known = next((index for index, block in enumerate(blocks) if block not in self._seen), len(blocks))
        self._facts.repeated_tokens += min(known * self._facts.block_tokens, input_tokens)
        self._seen.update(blocks)
        if len(self._seen) > BLOCKS_REMEMBERED:
            self._facts.repeated_tokens = None
            self._seen.clear()


def _edges(requests: Sequence[AnonymousRequest]) -> Iterator[list[tuple[int, After, int]]]:
    """Yield the edges of each request of a session. `requests` contains the requests of this session.

    An edge is a condition for sending the request. It consists of the key of an earlier request, the event `start` or
    `end`, and the delay in ns after this event.

    - If the log states which requests preceded a request, these requests are used.
    - Normally, a request follows all requests that had ended when it started. An earlier request is left out if it had
      ended before the start of another of these requests.
    - If the log does not say when responses ended, each request follows the previous request. It is sent no earlier
      than its recorded time.
    """
    running: list[tuple[int, int, int]] = []
    """End, start and key of the requests that have not ended yet."""
    ended: list[tuple[int, int, int]] = []
    before: AnonymousRequest | None = None
    for request in requests:
        if request.after is not None:
            yield request.after
            continue
        if request.end_ns is None or request.start_ns is None:
            yield _edges_after(before, request)
            before = request
            continue
        while running and running[0][0] <= request.start_ns:
            ended.append(heappop(running))
        latest_start_ns = max((start_ns for _, start_ns, _ in ended), default=0)
        ended = [entry for entry in ended if entry[0] > latest_start_ns or entry[1] == latest_start_ns]
        yield [(key, "end", request.start_ns - end_ns) for end_ns, _, key in ended]
        heappush(running, (request.end_ns, request.start_ns, request.key))


def _edges_after(before: AnonymousRequest | None, request: AnonymousRequest) -> list[tuple[int, After, int]]:
    """Return the conditions for sending `request`, if the log does not say when responses ended.

    `before` is the previous request of the session. If it is None, there are no conditions. Otherwise, two conditions
    must hold:

    - The response to the previous request has ended.
    - The time since the start of the previous request is at least the time in the log between the starts of the two
      requests. If the log lacks one of these starts, there is no such condition.

    A condition (edge) consists of the key of the previous request, the event `end` or `start`, and the minimum delay in
    ns after this event.
    """
    if before is None:
        return []
    if request.start_ns is None or before.start_ns is None:
        return [(before.key, "end", 0)]
    return [(before.key, "start", request.start_ns - before.start_ns), (before.key, "end", 0)]


def _seconds(value_ns: int) -> float:
    """Return a time in seconds, rounded to microseconds."""
    return round(max(0, value_ns) / NS_PER_S, 6)
