"""The Workload: arrivals' counterpart, what is asked. A seeded iterable of Requests, made one at a time.

A trace brings its own lengths: see `Trace.requests`. Lengths are made exact by whoever counts for the server
(`loadgen.workloads.token_counter`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count, islice
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from loadgen.workloads import sessions
from loadgen.workloads.arrival_processes import Trace
from loadgen.workloads.datasets import Dataset
from loadgen.workloads.images import SyntheticImage
from loadgen.workloads.lengths import Fixed, Lengths
from loadgen.workloads.prompts import (
    BLOCK_TOKENS,
    COMMON_WORDS,
    Prompt,
    PromptError,
    ServerTokenCounter,
    SharedSpan,
    TextSpec,
    Tokenizer,
    id_prompts,
    text_prompts,
)
from loadgen.workloads.request import Request, merged
from loadgen.workloads.sessions import Conversation, MultiTurn
from loadgen.workloads.spec_syntax import TOKENS_LIMIT, WorkloadError, parse_integer, parse_options
from loadgen.workloads.token_counter import ANOTHER_MODEL, APPROXIMATE, CountingMethod, choose_counter

GROUPS_LIMIT = 1_000_000
NUMBERS_LIMIT = 1_000_000
"""Where nobody says how many requests there will be, ids number so many; later ones may begin as earlier ones did."""
BLOCKS_LIMIT = 1 << 63  # a trace may name its blocks by any number of 63 bits
WARMUP_OUTPUT = Fixed(16)
"""Where output lengths are those of a dataset's answers. Enough decode steps to warm up the server's kernels."""


class Synthetic(msgspec.Struct, frozen=True):
    """Prompts of the lengths asked for, all different. Without end."""

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """The Requests, in order of id."""
        for number, input_tokens, output_tokens in prompts.lengths():
            yield Request(number, prompts.prompt(number, input_tokens), input_tokens, output_tokens)

    def __str__(self) -> str:
        return "synthetic"


class SharedPrefix(msgspec.Struct, frozen=True):
    """Request i begins with the `tokens` tokens of group i mod `groups` and goes on with its own. Without end. The
    lengths asked for are those of whole prompts."""

    groups: int
    tokens: int

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """The Requests, in order of id. Raises WorkloadError for prompts that are not longer than `tokens`."""
        for number, input_tokens, output_tokens in prompts.lengths():
            if input_tokens <= self.tokens:
                raise WorkloadError(
                    f"request {number} has {input_tokens} tokens, no more than the shared prefix's {self.tokens}",
                    "ask for longer prompts, or share fewer tokens",
                )
            shared = ((-1 - number % self.groups, self.tokens),)
            yield Request(number, prompts.prompt(number, input_tokens, shared), input_tokens, output_tokens)

    def __str__(self) -> str:
        return f"shared-prefix:groups={self.groups},tokens={self.tokens}"


Workload: TypeAlias = Synthetic | SharedPrefix | Dataset | MultiTurn


def parse(text: str) -> Workload:
    """Read a workload as KINDS says. Raises WorkloadError that names the bad part; its hint is the right syntax."""
    kind, colon, rest = text.strip().partition(":")
    if kind not in WORKLOADS:
        raise WorkloadError(f"workload {text!r}: there is no {kind!r}", f"choose {', '.join(WORKLOADS)}")
    read, syntax = WORKLOADS[kind]
    try:
        if bool(colon) != (kind != "synthetic"):
            raise WorkloadError(f"something follows {kind!r}" if colon else f"nothing follows {kind!r}")
        return read(rest)
    except WorkloadError as error:
        raise WorkloadError(f"workload {text!r}: {error}", f"write {syntax}") from None


class WorkloadSpec(msgspec.Struct, frozen=True):
    """What a run asks for, in numbers and names."""

    workload: Workload
    input: Lengths  # not looked at where a dataset or trace brings its own
    output: Lengths | None  # None: as long as a dataset's own answers, or UNNAMED where it names none
    seed: int
    n: int | None
    """At most so many requests; of sessions, where the workload is of sessions. None: until the trace or file ends, or
    somebody stops drawing."""
    warmup: int = 0
    trace: Trace | None = None
    request_fields: Mapping[str, Any] = {}
    """What each Request has besides: fields of its `body`, ..."""
    image_sizes: tuple[tuple[int, int], ...] = ()
    """Sizes of the synthetic pictures in each Request."""


class Prompts(msgspec.Struct, frozen=True):
    """The Requests of a run, made exact. Each method draws anew, the same ones each time, so that every worker can. It
    holds no connection that is still used: workers may be forks, and the server's tokenizer closed."""

    spec: WorkloadSpec
    prompt: Prompt
    count: Callable[[str], int]  # tokens of a text as the server counts them
    counting_method: str = ""  # how the lengths of prompts were made exact, or what is assumed of them
    chat: bool = False  # the Requests of sessions hold messages
    exact: bool = True  # as in loadgen.workloads.token_counter.TokenCounter, and so is the next
    any_text: bool = True

    @property
    def has_sessions(self) -> bool:
        """Whether these are sessions."""
        return isinstance(self.spec.workload, MultiTurn)

    def requests(self) -> Iterator[Request]:
        """In order of id. Raises WorkloadError for a workload of sessions, whose turns follow answers."""
        spec = self.spec
        if isinstance(spec.workload, MultiTurn):
            raise WorkloadError("the turns of a session follow its answers", "use closed:N arrivals")
        if spec.trace is not None and isinstance(spec.workload, Synthetic):
            result = spec.trace.requests(self)
        else:
            result = spec.workload.requests(self)
        return map(self._whole, islice(result, spec.n))

    def conversations(self) -> Iterator[Conversation]:
        """The sessions. Raises WorkloadError where there are none."""
        if not isinstance(self.spec.workload, MultiTurn):
            raise WorkloadError(f"{self.spec.workload} has no sessions", "name multi-turn:...")
        return islice(self.spec.workload.conversations(self), self.spec.n)

    def warmup(self) -> list[Request]:
        """Synthetic Requests with ids -1, -2, ..., of the lengths named, whatever the workload. They share nothing with
        the run's own, so they leave nothing of use in the server's prefix cache."""
        spec = self.spec
        first = NUMBERS_LIMIT if spec.n is None else spec.n
        if isinstance(spec.workload, MultiTurn):
            first *= spec.workload.turns or 1
        lengths = spec.input.tokens(spec.seed, "warm-up input")
        answers = (spec.output or WARMUP_OUTPUT).tokens(spec.seed, "warm-up output")
        return [
            self._whole(Request(-1 - index, self.prompt(first + index, input_tokens), input_tokens, output_tokens))
            for index, input_tokens, output_tokens in zip(range(spec.warmup), lengths, answers, strict=False)
        ]

    def _whole(self, request: Request) -> Request:
        """The Request with what each one has besides; fields of its own body win. Raises WorkloadError for pictures
        where there is no place for them."""
        spec, images = self.spec, request.images
        if not (spec.request_fields or spec.image_sizes or images):
            return request
        images += tuple(
            SyntheticImage(*size, f"{spec.seed}/{request.id}/{at}") for at, size in enumerate(spec.image_sizes)
        )
        if images and not self.chat:
            raise WorkloadError("only messages of a chat hold pictures", "use --endpoint chat")
        changes = {
            **spec.request_fields,
            "body": merged(spec.request_fields.get("body", {}), request.body),
            "images": images,
        }
        return replace(request, **changes | ({"input_tokens": 0} if images else {}))

    def lengths(self) -> Iterator[tuple[int, int, int]]:
        """(number, tokens in, tokens out) of prompt after prompt. Raises WorkloadError when no output was named."""
        spec = self.spec
        if spec.output is None:
            raise WorkloadError("this workload has no answers of its own to take output lengths from", "name them")
        inputs, outputs = spec.input.tokens(spec.seed, "input"), spec.output.tokens(spec.seed, "output")
        return zip(count(), inputs, outputs, strict=False)

    def known(self, text: str) -> int:
        """Tokens of a text of others; 0 where nobody can say."""
        return self.count(text) if self.any_text else 0


def prepare_prompts(
    spec: WorkloadSpec,
    *,
    token_ids: bool,
    local: Tokenizer | None,
    server: ServerTokenCounter | None,
    chat: bool = False,
    by: CountingMethod | None = None,
) -> Prompts:
    """Prepare prompts and counts; everything that asks the server happens here. `token_ids`: the endpoint takes them.
    `by`: who counts where lengths need not be exact. Texts are built and counted all at once, ids are drawn as they are
    needed. Raises PromptError when a length cannot be made exact, or when tokenizer and server disagree; WorkloadError
    when a file is damaged, or when texts are asked for without end."""
    own = getattr(spec.workload, "path", None) is not None
    ruler = choose_counter(local, server, by, drawn=not own)
    built: dict[int, str] = {}
    wanted: list[TextSpec] = []

    def lookup(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str:  # noqa: ARG001 - as a Prompt
        if number not in built:
            raise WorkloadError(f"no text was prepared for prompt {number}", "prepare as many as are asked for")
        return built[number]

    def note(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str:
        wanted.append(TextSpec(number, input_tokens, tuple(shared)))
        return ""

    count = cache(lambda text: ruler.count([text])[0])
    prompts = Prompts(spec, lookup, count, ruler.counting_method, chat, ruler.exact, ruler.any_text)
    source = {None: local or server, "server": server, "tokenizer": local, "approximate": None}[by]
    if token_ids and (ids := _ids(spec, source)):
        return replace(prompts, prompt=ids, counting_method="token ids", exact=True)
    if spec.n is None and spec.trace is None and not own:
        raise WorkloadError("texts are built before the run, and this load has no end", "say how many with --n")
    # The whole workload once, to learn which texts are wanted; what is counted on the way is remembered.
    rehearsal = replace(prompts, prompt=note)
    deque(rehearsal.conversations() if rehearsal.has_sessions else rehearsal.requests(), maxlen=0)
    rehearsal.warmup()
    if wanted:
        texts = text_prompts(lambda asked: ruler.count(ruler.framed(asked)), ruler.words, wanted, spec.seed)
        built |= zip((want.number for want in wanted), ruler.framed(texts), strict=True)
        if ruler.exact and local and server and not server.generates:
            (tokens,) = server.count([built[wanted[0].number]])
            if tokens != wanted[0].tokens:
                raise PromptError(
                    f"the first prompt was built to count {wanted[0].tokens} tokens and the server counts {tokens}",
                    ANOTHER_MODEL,
                )
    if not ruler.any_text and own and count.cache_info().currsize:
        return replace(
            prompts,
            counting_method=f"{ruler.counting_method}; the lengths of its answers are approximate: {APPROXIMATE}",
        )
    return prompts


def _ids(spec: WorkloadSpec, source: Tokenizer | None) -> Prompt | None:
    """Prompts of token ids, where the workload draws its prompts and somebody knows some."""
    drawn = isinstance(spec.workload, Synthetic | SharedPrefix)
    alphabet = sorted(set(source.ids(" ".join(source.words or COMMON_WORDS)))) if source and drawn else []
    if not alphabet:
        return None
    shared, shortest = 0, BLOCK_TOKENS
    if isinstance(spec.workload, SharedPrefix):
        shared = spec.workload.groups
    elif spec.trace is not None:
        shared = BLOCKS_LIMIT
    elif isinstance(spec.input, Fixed):
        shortest = spec.input.length
    numbers = (NUMBERS_LIMIT if spec.n is None else spec.n) + spec.warmup
    return id_prompts(alphabet, spec.seed, numbers=numbers, shared=shared, shortest=shortest)


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
    "multi-turn": (sessions.multi_turn, "multi-turn:turns=K[,think=T] or multi-turn:FILE[,think=T]"),
}
"""What parse reads, by first word: the reader of what follows the colon, and the syntax as errors quote it."""
