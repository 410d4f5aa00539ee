"""Parses workloads, such as `synthetic` or `sharegpt:FILE`, and generates their requests one at a time from a seed.

If the arrivals are a trace, the trace defines the lengths of the requests (see `Trace.requests`). The module
loadgen.workloads.token_counter chooses how tokens are counted to make lengths exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from loadgen.workloads import raw_requests, sessions
from loadgen.workloads.arrival_processes import Trace
from loadgen.workloads.audio_files import Recordings
from loadgen.workloads.datasets import Dataset, recognise
from loadgen.workloads.images import SyntheticImage
from loadgen.workloads.lengths import Fixed, Lengths
from loadgen.workloads.prompts import (
    BLOCK_TOKENS,
    COMMON_WORDS,
    NUMBERS_LIMIT,
    Prompt,
    PromptError,
    ServerTokenCounter,
    SharedSpan,
    Tokenizer,
    id_prompts,
)
from loadgen.workloads.raw_requests import RawRequests
from loadgen.workloads.recordings import AUDIO_TYPES, SyntheticRecording
from loadgen.workloads.request import Request, merged
from loadgen.workloads.session_files import SYNTAX as SESSIONS_SYNTAX
from loadgen.workloads.session_files import SessionFile, count_requests
from loadgen.workloads.session_graph import SessionGraph
from loadgen.workloads.sessions import MultiTurn, Session
from loadgen.workloads.spec_syntax import (
    TOKENS_LIMIT,
    WorkloadError,
    parse_integer,
    parse_options,
    parse_path_and_options,
)
from loadgen.workloads.text_prompts import Progress, ignore_progress, no_text, text_prompt
from loadgen.workloads.texts import BATCH, VocabularyStore
from loadgen.workloads.token_counter import ANOTHER_MODEL, APPROXIMATE, CountingMethod, TokenCounter, choose_counter

FILE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".gz", ".parquet", ".csv", ".txt", ".zst")
"""Suffixes of names that can only be files, so that a missing file is named as such."""
GROUPS_LIMIT = 1_000_000
BLOCKS_LIMIT = 1 << 63  # Hash ids of blocks in a trace may be any number of 63 bits
PLAIN = Request(0, "", 0, 0)
"""A request that consists of nothing but its prompt."""
WARMUP_OUTPUT = Fixed(16)
"""Output length of warm-up requests if the run uses the answer lengths of a dataset. The number of decode steps is
large enough to warm up the server's kernels."""


class Synthetic(msgspec.Struct, frozen=True):
    """A workload of generated prompts with the requested lengths. All prompts differ. Their number is not limited."""

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """Yield the requests in order of id, without end."""
        for number, input_tokens, output_tokens in prompts.lengths():
            yield Request(number, prompts.prompt(number, input_tokens), input_tokens, output_tokens)

    def __str__(self) -> str:
        return "synthetic"


class SharedPrefix(msgspec.Struct, frozen=True):
    """A workload of generated prompts in which groups of prompts share a prefix. The number of prompts is not limited.

    Request i belongs to group `i mod groups`. All prompts of a group begin with the same `tokens` tokens. The requested
    input length applies to the whole prompt, including the prefix."""

    groups: int
    tokens: int

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """Yield the requests in order of id, without end.

        Raises WorkloadError for a prompt that is not longer than its shared prefix."""
        for number, input_tokens, output_tokens in prompts.lengths():
            if input_tokens <= self.tokens:
                raise WorkloadError(
                    f"request {number} has {input_tokens} tokens, no more than the shared prefix's {self.tokens}",
                    "request longer prompts, or share fewer tokens",
                )
            shared = ((-1 - number % self.groups, self.tokens),)
            yield Request(number, prompts.prompt(number, input_tokens, shared), input_tokens, output_tokens)

    def __str__(self) -> str:
        return f"shared-prefix:groups={self.groups},tokens={self.tokens}"


Workload: TypeAlias = Synthetic | SharedPrefix | Dataset | MultiTurn | RawRequests | Recordings | SessionFile


def has_sessions(workload: Workload) -> bool:
    """Return True if the workload consists of sessions."""
    return isinstance(workload, MultiTurn | SessionFile) or (isinstance(workload, RawRequests) and workload.sessions)


def parse(text: str) -> Workload:
    """Parse the text of a workload, such as `synthetic` or `sharegpt:FILE`, or just the name of a file with prompts.

    Raises WorkloadError for invalid text. Its message names the invalid part, and its hint shows the syntax."""
    kind = text.strip().partition(":")[0]
    if kind not in WORKLOADS:
        path = Path(text.strip())
        if path.suffix.lower() in AUDIO_TYPES:
            return Recordings(path)
        if path.exists() or path.suffix in FILE_SUFFIXES:
            return Dataset(recognise(path), path)
        raise WorkloadError(
            f"workload {text!r}: unknown source {kind!r}, and no file has this name",
            f"choose {', '.join(WORKLOADS)}, or name a file",
        )
    return _parse_kind(text)


@lru_cache(256)
def _parse_kind(text: str) -> Workload:
    """Parse the text of a workload that begins with a key of WORKLOADS. Raises WorkloadError for invalid text."""
    kind, colon, rest = text.strip().partition(":")
    parse_rest, syntax = WORKLOADS[kind]
    try:
        if bool(colon) != (kind != "synthetic"):
            raise WorkloadError(f"{kind!r} takes no value" if colon else f"no value follows {kind!r}")
        return parse_rest(rest)
    except WorkloadError as error:
        raise WorkloadError(f"workload {text!r}: {error}", f"write {syntax}") from None


class WorkloadSpec(msgspec.Struct, frozen=True):
    """All settings that determine the requests of a run: workload, lengths, seed and number of requests."""

    workload: Workload
    input: Lengths  # Ignored if a dataset or trace defines the lengths
    output: Lengths | None  # None: the answer lengths of a dataset, or DEFAULT_OUTPUT_TOKENS if it has none
    seed: int
    n: int | None
    """Maximum number of requests, or of sessions. None: until the trace or file ends, or the run stops."""
    warmup: int = 0
    trace: Trace | None = None
    request_fields: Mapping[str, Any] = {}
    """Additional fields of each `Request`, such as fields of its `body`."""
    repeat_file: bool = False
    """True if the prompts of a file are repeated from the first after the last."""
    image_sizes: tuple[tuple[int, int], ...] = ()
    """Width and height in pixels of each synthetic image that a request contains."""
    batch_size: int = 1
    """Number of inputs of each request. Only requests to pooling endpoints have more than one."""
    recordings: bool = False
    """True if requests contain recordings instead of texts. `input` is then the length of the synthetic ones in
    seconds."""
    query_words: int = 0
    """Number of words at the start of an input that all inputs of a request share, because the endpoint takes them as
    the query. 0: the inputs share nothing. Used only if `batch_size` is larger than 1."""

    @property
    def holds_texts(self) -> bool:
        """True if the workload reads the texts of its prompts from a file. Only warm-up prompts are then generated."""
        return getattr(self.workload, "path", None) is not None and not isinstance(self.workload, SessionFile)

    @property
    def prompt_seed(self) -> int:
        """The seed of the generated prompts. This seed differs from `seed` if the workload has a salt."""
        salt = getattr(self.workload, "salt", "")
        return int.from_bytes(sha256(f"{self.seed}/{salt}".encode()).digest()[:6]) if salt else self.seed

    @property
    def numbers(self) -> int:
        """The number of prompts in a run, including the prompts of warm-up requests.

        - A request counts as `batch_size` prompts, one for each of its inputs.
        - A session of `multi-turn` counts as one prompt, no matter how many turns it has.
        - A session of `sessions:FILE` counts as one prompt for each of its requests.

        If the run has no limit on the number of requests, NUMBERS_LIMIT requests are assumed.
        """
        requests = NUMBERS_LIMIT if self.n is None else self.n
        if isinstance(self.workload, SessionFile) and self.n is not None:
            requests = count_requests(self.workload, self.n, self.seed)
        return (requests + self.warmup) * self.batch_size


class Prompts(msgspec.Struct, frozen=True):
    """Generates the requests of a run. The lengths of the prompts are exact if `exact` is True.

    Each call of a method generates the same requests again. Every worker process can therefore generate the requests by
    itself, without a connection to the server.
    """

    spec: WorkloadSpec
    prompt: Prompt
    count: Callable[[str], int]  # Tokens of a text as the server counts them
    counting_method: str = ""  # Description of the method that counted the prompts, or of the assumption about them
    chat: bool = False  # Requests of sessions contain messages
    exact: bool = True  # Same meaning as in TokenCounter
    any_text: bool = True
    query_tokens: int = 0
    """Length in tokens of the beginning that all inputs of a request share. 0: they share none."""

    @property
    def has_sessions(self) -> bool:
        """True if the workload consists of sessions."""
        return has_sessions(self.spec.workload)

    @property
    def has_graphs(self) -> bool:
        """True if each session of the workload is a graph of requests. The method `graphs` then yields the sessions."""
        return isinstance(self.spec.workload, SessionFile)

    @property
    def warmup_start(self) -> int:
        """The number of the first warm-up prompt. The measured prompts of the run have lower numbers."""
        first = NUMBERS_LIMIT if self.spec.n is None else self.spec.n
        if self.has_graphs:
            return self.spec.numbers - self.spec.warmup * self.spec.batch_size
        turns = self.spec.workload.turns if isinstance(self.spec.workload, MultiTurn) else None
        return first * (turns or 1) * self.spec.batch_size

    @property
    def shared_spans(self) -> int:
        """The number of shared spans in the run, or 0 if the number is unknown.

        A shared span is a sequence of tokens with which several prompts begin.
        """
        if self.query_tokens:
            return self.spec.numbers // self.spec.batch_size
        return getattr(self.spec.workload, "groups", 0)

    def requests(self) -> Iterator[Request]:
        """Yield the requests in order of id.

        Raises WorkloadError for a workload of multi-turn sessions. The method `conversations` yields these sessions.
        """
        spec = self.spec
        if isinstance(spec.workload, MultiTurn | SessionFile):
            raise WorkloadError("the turns of a session follow its responses", "run whole sessions")
        if spec.trace is not None and isinstance(spec.workload, Synthetic):
            result = spec.trace.requests(self)
        else:
            result = spec.workload.requests(self._with_queries())
        if spec.batch_size > 1:
            result = batches(result, spec.batch_size)
        return map(self._complete, islice(result, spec.n))

    def _with_queries(self) -> Prompts:
        """Return prompts for requests whose inputs share a query, such as requests for reranking.

        All inputs of a request begin with the same query of `query_tokens` tokens. If `query_tokens` is 0, the prompts
        are returned unchanged. Otherwise, building an input raises WorkloadError if the input is not longer than the
        query.
        """
        if not self.query_tokens:
            return self

        def prompt(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str | tuple[int, ...]:
            if input_tokens <= self.query_tokens:
                raise WorkloadError(
                    f"input {number} has {input_tokens} tokens, no more than the query's {self.query_tokens}",
                    "request longer inputs",
                )
            query = (-1 - number // self.spec.batch_size, self.query_tokens)
            return self.prompt(number, input_tokens, (query, *shared))

        return replace(self, prompt=prompt)

    def conversations(self) -> Iterator[Session]:
        """Yield the sessions. Raises WorkloadError for a workload without sessions."""
        source = self.spec.workload
        if not isinstance(source, MultiTurn | RawRequests) or not self.has_sessions:
            raise WorkloadError(f"{source} has no sessions", "use multi-turn:...")
        sessions: Iterator[Session] = source.conversations(self)
        return islice(sessions, self.spec.n)

    @property
    def is_endless(self) -> bool:
        """True if the workload repeats the sessions of a file without end, and their number is not limited."""
        return isinstance(self.spec.workload, SessionFile) and self.spec.workload.loop and self.spec.n is None

    def graphs(self, *, once: bool = False) -> Iterator[SessionGraph]:
        """Yield the sessions of the workload, each as a graph of requests.

        A workload may repeat the sessions of its file without end. In this case, `once` limits the result to one pass
        over the file. Raises WorkloadError for a workload whose sessions are not graphs.
        """
        source = self.spec.workload
        if not isinstance(source, SessionFile):
            raise WorkloadError(f"{source} has no sessions with several requests", "use sessions:FILE")
        if once and self.is_endless:
            source = replace(source, loop=False)
        return islice(source.graphs(self), self.spec.n)

    def warmup(self) -> list[Request]:
        """Return the warm-up requests. Their ids are -1, -2, and so on.

        The warm-up prompts are generated with the requested lengths, even if the other prompts come from a file. They
        share no prefix with the prompts of the run, so they cause no hits in the server's prefix cache during the run.
        """
        spec = self.spec
        first = self.warmup_start
        lengths = spec.input.tokens(spec.seed, "warm-up input")
        outputs = (spec.output or WARMUP_OUTPUT).tokens(spec.seed, "warm-up output")
        build = self._with_queries().prompt
        requests: Iterator[Request] = (
            Request(-1 - index, build(first + index, input_tokens), input_tokens, output_tokens)
            for index, input_tokens, output_tokens in zip(count(), lengths, outputs, strict=False)
        )
        if spec.batch_size > 1:
            grouped = batches(requests, spec.batch_size)
            requests = (replace(request, id=-1 - index) for index, request in enumerate(grouped))
        return [*map(self._complete, islice(requests, spec.warmup))]

    def _complete(self, request: Request) -> Request:
        """Return `request` with everything that the WorkloadSpec adds to requests: fields, images, or a recording.

        A field that the body of the request already has keeps its value. If the run sends recordings, a synthetic
        recording replaces the prompt of the request, unless the request already has a recording. Raises WorkloadError
        if the request has images and the endpoint is not a chat endpoint.
        """
        spec = self.spec
        if spec.recordings and request.recording is None:
            recording = SyntheticRecording(request.input_tokens, f"{spec.seed}/{request.id}")
            request = replace(request, prompt="", input_tokens=0, recording=recording)
        images = request.images
        if not (spec.request_fields or spec.image_sizes or images):
            return request
        images += tuple(
            SyntheticImage(width, height, f"{spec.seed}/{request.id}/{index}")
            for index, (width, height) in enumerate(spec.image_sizes)
        )
        if images and not self.chat:
            raise WorkloadError("only chat requests can contain images", "use --endpoint chat")
        changes = dict(spec.request_fields)
        changes["body"] = merged(spec.request_fields.get("body", {}), request.body)
        changes["images"] = images
        if images:
            changes["input_tokens"] = 0
        return replace(request, **changes)

    def lengths(self) -> Iterator[tuple[int, int, int]]:
        """Yield (number, input tokens, output tokens) for each generated prompt, without end.

        Raises WorkloadError if no output lengths are requested."""
        spec = self.spec
        if spec.output is None:
            raise WorkloadError("this workload has no answers whose lengths could be used", "state output lengths")
        inputs = spec.input.tokens(spec.seed, "input")
        outputs = spec.output.tokens(spec.seed, "output")
        return zip(count(), inputs, outputs, strict=False)

    def count_if_known(self, text: str) -> int:
        """Return the number of tokens of `text`, which comes from a file, or 0 if the number is unknown.

        The number is unknown if the token counter can only count generated texts.
        """
        return self.count(text) if self.any_text else 0


def batches(requests: Iterator[Request], size: int) -> Iterator[Request]:
    """Combine every `size` requests into one request with `size` inputs, and yield the combined requests.

    The combined requests have the ids 0, 1, 2, ... If fewer than `size` requests are left at the end, they are not
    used. Each of `requests` must have nothing but a prompt. WorkloadError is raised for a request that has, for
    example, messages, images or its own fields.
    """
    for number in count():
        members = [*islice(requests, size)]
        if len(members) < size:
            return
        if any(replace(member, id=0, prompt="", input_tokens=0, output_tokens=0) != PLAIN for member in members):
            raise WorkloadError(
                "a line with messages, images or its own fields cannot be one of several inputs of a request",
                "leave --batch-size out",
            )
        tokens = [member.input_tokens for member in members]
        yield replace(
            members[0],
            id=number,
            input_tokens=sum(tokens) if all(tokens) else 0,
            batch=tuple(member.prompt for member in members[1:]),
            inputs=size,
        )


def prepare_prompts(
    spec: WorkloadSpec,
    *,
    token_ids: bool,
    local: Tokenizer | None,
    server: ServerTokenCounter | None,
    chat: bool = False,
    by: CountingMethod | None = None,
    store: VocabularyStore | None = None,
    progress: Progress = ignore_progress,
) -> Prompts:
    """Prepare the prompts of a run. To count tokens, this function may send texts to the server.

    - `token_ids`: True if the endpoint accepts token ids.
    - `local`: the tokenizer file, or None if the user names none.
    - `server`: the server's token counter, or None if the server has none.
    - `chat`: True if the endpoint is a chat endpoint.
    - `by`: the method that counts tokens. None chooses the best available method.
    - `store`: stores the server's vocabulary, so that later runs need not measure it again.
    - `progress`: called with the number of prompts that have been surveyed, counted or built so far.

    Normally, each prompt is built later, when it is needed. With some tokenizers, the token count of a text is not the
    sum of the counts of its words. All texts are then built and counted here (see loadgen.workloads.text_prompts).

    Raises PromptError if a length cannot be exact, or if the tokenizer file and the server count differently. Raises
    WorkloadError if a file is malformed.
    """
    from_file = spec.holds_texts
    counter = choose_counter(local, server, by, drawn=not from_file, store=store)
    counts: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in counts:
            counts[text] = counter.count([text])[0]
        return counts[text]

    prompts = Prompts(spec, no_text, count, counter.counting_method, chat, counter.exact, counter.any_text)
    if spec.batch_size > 1 and spec.query_words:
        # The first word of a text includes the tokens that the server adds.
        first_word = counter.count(counter.framed([counter.words[0]]))[0]
        prompts = replace(prompts, query_tokens=first_word + spec.query_words - 1)
    ids = _ids(spec, _source_of_ids(local, server, counter, by)) if token_ids else None
    if ids:
        return replace(prompts, prompt=ids, counting_method="token ids", exact=True)
    if from_file:
        _count_file(prompts, counter, counts, progress)
    prompt, samples = text_prompt(prompts, counter, store, progress)
    if samples and counter.exact and local and server and not server.generates:
        first = samples[0]
        _check_count(server, str(prompt(first.number, first.tokens, first.shared)), first.tokens)
    if not counter.any_text and counts:
        method = f"{counter.counting_method}; the lengths of its answers are approximate: {APPROXIMATE}"
        return replace(prompts, prompt=prompt, counting_method=method)
    return replace(prompts, prompt=prompt)


def _count_file(prompts: Prompts, counter: TokenCounter, counts: dict[str, int], progress: Progress) -> None:
    """Count the tokens of texts in the workload's file, and store the number for each text in `counts`.

    The texts are the prompts and the recorded answers whose lengths the run needs. They are counted in large batches,
    because a server counts single texts slowly. `progress` is called with the number of entries of the file that have
    been read.

    Raises WorkloadError if the file is malformed. Also raises WorkloadError if the file contains images or lists of
    messages, but the endpoint is not a chat endpoint.
    """
    spec = prompts.spec
    source = spec.workload
    samples = source.samples() if isinstance(source, Dataset | MultiTurn) else None
    waiting: dict[str, None] = {}
    done = 0

    def count_waiting() -> None:
        texts = [text for text in waiting if text not in counts]
        counts.update(zip(texts, counter.count(texts), strict=True))
        waiting.clear()
        progress(done)

    for entry in islice(samples or (), None if spec.n is None else spec.n * spec.batch_size):
        for turn, sample in enumerate(entry if isinstance(entry, tuple) else (entry,)):
            sample.check_endpoint(chat=prompts.chat)
            if counter.any_text and not turn and not sample.uncountable:
                waiting[sample.prompt] = None
            if spec.output is None and sample.output_tokens is None and sample.answer:
                waiting[sample.answer] = None
        done += 1
        if len(waiting) >= BATCH:
            count_waiting()
    count_waiting()


def _check_count(server: ServerTokenCounter, text: str, expected: int) -> None:
    """Raise PromptError if `server` does not count `expected` tokens in `text`.

    The text is a generated prompt that was built with `expected` tokens. If the server counts another number, its
    tokenizer differs from the tokenizer with which the prompt was built.
    """
    (tokens,) = server.count([text])
    if tokens != expected:
        raise PromptError(
            f"the first prompt was built with {expected} tokens, but the server counts {tokens}", ANOTHER_MODEL
        )


def _source_of_ids(
    local: Tokenizer | None, server: ServerTokenCounter | None, counter: TokenCounter, by: CountingMethod | None
) -> Tokenizer | None:
    """Return the tokenizer that supplies the token ids of prompts, or None if no tokenizer can supply them.

    - `local` is a tokenizer on this machine.
    - `server` counts tokens by requests to the server.
    - `counter` is the token counter of the run.
    - `by` is the counting method that the user requests.

    The first of these cases that applies determines the result:

    1. `by` is `tokenizer`: the result is `local`.
    2. The counts of `counter` are only estimates: the result is None.
    3. `by` is `server`: the result is `server`.
    4. Otherwise: the result is `local`, or `server` if `local` is None.
    """
    if by == "tokenizer":
        return local
    if not counter.exact:
        return None
    return server if by == "server" else local or server


def _ids(spec: WorkloadSpec, source: Tokenizer | None) -> Prompt | None:
    """Return a function that builds prompts of random token ids, or None if the prompts must be texts.

    Prompts can be token ids under two conditions:

    - The workload generates whole prompts, as `synthetic` does. No prompt contains chat messages or an earlier
      response.
    - The tokenizer `source` can return token ids. It supplies the ids from which prompts are built.
    """
    drawn = isinstance(spec.workload, Synthetic | SharedPrefix) or (
        isinstance(spec.workload, SessionFile) and not spec.workload.has_messages
    )
    alphabet = sorted(set(source.ids(" ".join(source.words or COMMON_WORDS)))) if source and drawn else []
    if not alphabet:
        return None
    shared = 0
    shortest = BLOCK_TOKENS
    if isinstance(spec.workload, SharedPrefix):
        shared = spec.workload.groups
    elif spec.trace is not None or isinstance(spec.workload, SessionFile):
        shared = BLOCKS_LIMIT
    elif isinstance(spec.input, Fixed):
        shortest = spec.input.length
    return id_prompts(alphabet, spec.prompt_seed, numbers=spec.numbers, shared=shared, shortest=shortest)


def _shared_prefix(rest: str) -> SharedPrefix:
    result = parse_options(rest.split(","), ("groups", "tokens"))
    if len(result) < 2:
        raise WorkloadError("both groups= and tokens= are needed")
    groups = parse_integer(result["groups"], "groups", 1, GROUPS_LIMIT)
    return SharedPrefix(groups, parse_integer(result["tokens"], "tokens", 1, TOKENS_LIMIT))


WORKLOADS: dict[str, tuple[Callable[[str], Workload], str]] = {
    "synthetic": (lambda _: Synthetic(), "synthetic"),
    "shared-prefix": (_shared_prefix, "shared-prefix:groups=K,tokens=P, such as shared-prefix:groups=8,tokens=256"),
    "sharegpt": (Dataset.of("sharegpt"), "sharegpt:FILE"),
    "alpaca": (Dataset.of("alpaca"), "alpaca:FILE"),
    "jsonl": (Dataset.of("jsonl"), "jsonl:FILE"),
    "requests": (raw_requests.raw_requests, "requests:FILE[,sessions=yes]"),
    "audio": (lambda rest: Recordings(Path(parse_path_and_options(rest, ())[0])), "audio:FOLDER or audio:FILE"),
    "sessions": (SessionFile.parse, SESSIONS_SYNTAX),
    "multi-turn": (sessions.multi_turn, "multi-turn:turns=K[,think=T] or multi-turn:FILE[,think=T]"),
}
"""Workloads that `parse` accepts, by name: the parser of the text after the colon, and the syntax."""
