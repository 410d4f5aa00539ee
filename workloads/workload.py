"""The Workload: arrivals' counterpart, what is asked. A seeded iterable of Requests, made one at a time.

    synthetic                            prompts of the lengths asked for, all different
    shared-prefix:groups=K,tokens=P      the same, request i beginning with the P tokens of group i mod K
    sharegpt:FILE                        the first question of each dialogue
    alpaca:FILE                          instructions
    jsonl:FILE                           prompts, with their own output lengths where given
    multi-turn:turns=K[,think=T]         sessions of K synthetic questions
    multi-turn:FILE[,think=T]            sessions of a ShareGPT-format file

A trace brings its own lengths: see `replay`. Lengths are made exact by whoever counts for the server (`prompts_for`):

    tokenizer file         one is given; held against the server's count, and corrected by what the server adds
    server                 it counts without running the text
    server, plus template  it can count text alone without running it, and what its chat template adds is measured
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TypeAlias

from workloads import datasets, sessions
from workloads.arrivals import Trace
from workloads.datasets import Sample
from workloads.lengths import Fixed, Lengths
from workloads.prompts import (
    BLOCK_TOKENS,
    COMMON_WORDS,
    Judge,
    Prompt,
    PromptError,
    Stretch,
    Tokenizer,
    WantedText,
    id_prompts,
    text_prompts,
)
from workloads.request import Request
from workloads.sessions import Conversation, Turn
from workloads.syntax import TOKENS_LIMIT, WorkloadError, duration_ns, options, path_and_options, show_duration, whole
from workloads.traces import BLOCK_TOKENS as TRACE_BLOCK_TOKENS
from workloads.traces import Entry

TURNS_LIMIT = 1_000
GROUPS_LIMIT = 1_000_000
NUMBERS_LIMIT = 1_000_000
"""Where nobody says how many requests there will be, ids number so many; later ones may begin as earlier ones did."""
BLOCKS_LIMIT = 1 << 63
"""A trace may name its blocks by any number of 63 bits."""
WARMUP_OUTPUT = Fixed(16)
"""Where output lengths are those of a dataset's answers. Enough decode steps to warm up the server's kernels."""
SAMPLE_WORDS = 200
ANOTHER_MODEL = "pass the tokenizer.json of the model that is being served"


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What Requests are made of."""

    prompt: Prompt
    count: Callable[[str], int]
    """Tokens of a text as the server counts them."""
    input: Lengths
    """Not looked at where a dataset or trace brings its own."""
    output: Lengths | None
    """None: as long as the dataset's own answers."""
    seed: int
    how: str = ""
    """How the lengths of prompts were made exact."""

    def lengths(self) -> Iterator[tuple[int, int, int]]:
        """(number, tokens in, tokens out) of prompt after prompt. Raises WorkloadError when no output was named."""
        if self.output is None:
            raise WorkloadError("this workload has no answers of its own to take output lengths from", "name them")
        inputs, outputs = self.input.tokens(self.seed, "input"), self.output.tokens(self.seed, "output")
        return zip(count(), inputs, outputs, strict=False)

    def answer_tokens(self) -> Callable[[Sample], int]:
        """How long the answer to the next question of a dataset shall be: as named, or as the recorded one."""
        named = None if self.output is None else self.output.tokens(self.seed, "output")

        def tokens(sample: Sample) -> int:
            if named is not None:
                return next(named)
            if sample.output_tokens is not None:
                return sample.output_tokens
            if not sample.answer:
                raise WorkloadError(
                    f"no output length for the prompt {sample.prompt[:60]!r}", "name the output lengths"
                )
            return max(1, self.count(sample.answer))

        return tokens


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Prompts of the lengths asked for, all different. Without end."""

    def requests(self, source: PromptSource) -> Iterator[Request]:
        """The Requests, in order of id."""
        for number, input_tokens, output_tokens in source.lengths():
            yield Request(number, source.prompt(number, input_tokens), input_tokens, output_tokens)

    def __str__(self) -> str:
        return "synthetic"


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Request i begins with the `tokens` tokens of group i mod `groups` and goes on with its own. Without end.

    The lengths asked for are those of whole prompts.
    """

    groups: int
    tokens: int

    def requests(self, source: PromptSource) -> Iterator[Request]:
        """The Requests, in order of id. Raises WorkloadError for prompts that are not longer than `tokens`."""
        for number, input_tokens, output_tokens in source.lengths():
            if input_tokens <= self.tokens:
                raise WorkloadError(
                    f"request {number} has {input_tokens} tokens, no more than the shared prefix's {self.tokens}",
                    "ask for longer prompts, or share fewer tokens",
                )
            shared = ((-1 - number % self.groups, self.tokens),)
            yield Request(number, source.prompt(number, input_tokens, shared), input_tokens, output_tokens)

    def __str__(self) -> str:
        return f"shared-prefix:groups={self.groups},tokens={self.tokens}"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Questions from a file, in its order, once. `kind` is a key of SAMPLES."""

    kind: str
    path: Path

    def requests(self, source: PromptSource) -> Iterator[Request]:
        """The Requests, in order of id. Raises WorkloadError on damage, or when an output length cannot be known."""
        answer_tokens = source.answer_tokens()
        for number, sample in enumerate(SAMPLES[self.kind](self.path)):
            yield Request(number, sample.prompt, source.count(sample.prompt), answer_tokens(sample))

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}"


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Sessions of several turns: `turns` synthetic ones, without end, or those of the file at `path`, once."""

    turns: int | None
    path: Path | None
    think_ns: int = 0

    def conversations(self, source: PromptSource, *, chat: bool) -> Iterator[Conversation]:
        """The sessions, each at its first turn. Raises WorkloadError as Dataset does, or for prompts of token ids."""
        if self.path is None:
            asked = _synthetic_sessions(self.turns or 1, source)
        else:
            asked = sessions.recorded(datasets.sharegpt(self.path), source.count, source.answer_tokens())
        return sessions.conversations(asked, self.think_ns, chat=chat)

    def __str__(self) -> str:
        which = f"turns={self.turns}" if self.path is None else str(self.path)
        return f"multi-turn:{which}" + (f",think={show_duration(self.think_ns)}" if self.think_ns else "")


Workload: TypeAlias = Synthetic | SharedPrefix | Dataset | MultiTurn


def parse(text: str) -> Workload:
    """Read a workload as in the table above; `str()` of the result is its canonical text.

    Raises WorkloadError that names the bad part; its hint is the right syntax.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind not in KINDS:
        raise WorkloadError(f"workload {text!r}: there is no {kind!r}", f"choose {', '.join(KINDS)}")
    read, syntax = KINDS[kind]
    try:
        if bool(colon) != (kind != "synthetic"):
            raise WorkloadError(f"something follows {kind!r}" if colon else f"nothing follows {kind!r}")
        return read(rest)
    except WorkloadError as error:
        raise WorkloadError(f"workload {text!r}: {error}", f"write {syntax}") from None


def replay(entries: Iterable[Entry], source: PromptSource) -> Iterator[Request]:
    """Requests with a trace's own lengths, in its order.

    Where an entry names its blocks, each block becomes the same 512 tokens wherever it occurs, so equal leading ids
    are an equal prefix and the server's cache sees the recorded sharing. Where the ids end before the prompt does, the
    rest is the request's own; ids past its end are ignored.
    """
    for number, entry in enumerate(entries):
        blocks = entry.blocks[: -(-entry.input_tokens // TRACE_BLOCK_TOKENS)]
        prompt = source.prompt(number, entry.input_tokens, [(-1 - block, TRACE_BLOCK_TOKENS) for block in blocks])
        yield Request(number, prompt, entry.input_tokens, entry.output_tokens)


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What a run asks for, in numbers and names."""

    workload: Workload
    input: Lengths
    output: Lengths | None
    """None: as long as a dataset's own answers."""
    seed: int
    n: int | None
    """At most so many requests; of sessions, where the workload is of sessions. None: until the trace or file ends, or
    somebody stops drawing."""
    warmup: int = 0
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Prompts:
    """The Requests of a run, made exact. Each method draws anew, the same ones each time, so that every worker can.

    It holds no connection that is still used: workers may be forks, and the server's tokenizer closed.
    """

    spec: WorkloadSpec
    source: PromptSource
    chat: bool
    """Whether the Requests of sessions hold messages."""

    @property
    def how(self) -> str:
        """How the lengths were made exact."""
        return self.source.how

    @property
    def of_sessions(self) -> bool:
        """Whether these are sessions."""
        return isinstance(self.spec.workload, MultiTurn)

    def requests(self) -> Iterator[Request]:
        """In order of id. Raises WorkloadError for a workload of sessions, whose turns follow answers."""
        spec = self.spec
        if isinstance(spec.workload, MultiTurn):
            raise WorkloadError("the turns of a session follow its answers", "use closed:N arrivals")
        if spec.trace is not None and isinstance(spec.workload, Synthetic):
            return islice(replay(spec.trace.entries(), self.source), spec.n)
        return islice(spec.workload.requests(self.source), spec.n)

    def conversations(self) -> Iterator[Conversation]:
        """The sessions. Raises WorkloadError where there are none."""
        if not isinstance(self.spec.workload, MultiTurn):
            raise WorkloadError(f"{self.spec.workload} has no sessions", "name multi-turn:...")
        return islice(self.spec.workload.conversations(self.source, chat=self.chat), self.spec.n)

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
            Request(-1 - index, self.source.prompt(first + index, input_tokens), input_tokens, output_tokens)
            for index, input_tokens, output_tokens in zip(range(spec.warmup), lengths, answers, strict=False)
        ]


def prompts_for(
    spec: WorkloadSpec, *, token_ids: bool, local: Tokenizer | None, server: Judge | None, chat: bool = False
) -> Prompts:
    """Prepare prompts and counts; everything that asks the server happens here. `token_ids`: the endpoint takes them.
    Texts are built and counted all at once, ids are drawn as they are needed.

    Raises PromptError when a length cannot be made exact, or when the tokenizer file and the server disagree;
    WorkloadError when a file is damaged, or when texts are asked for without end.
    """
    source = local or server
    words = (source and source.words) or COMMON_WORDS
    ruler = _ruler(local, server, words)
    built: dict[int, str] = {}

    def lookup(number: int, input_tokens: int, shared: Sequence[Stretch] = ()) -> str:  # noqa: ARG001 - as a Prompt
        if number not in built:
            raise WorkloadError(f"no text was prepared for prompt {number}", "prepare as many as are asked for")
        return built[number]

    raw = PromptSource(lookup, lambda text: ruler.count([text])[0], spec.input, spec.output, spec.seed, ruler.how)
    wants_ids = token_ids and isinstance(spec.workload, Synthetic | SharedPrefix)
    if wants_ids and source and (alphabet := sorted(set(source.ids(" ".join(words))))):
        return Prompts(spec, replace(raw, prompt=_ids(spec, alphabet), how="token ids"), chat)
    wanted, counts = _rehearsed(spec, raw)
    if wanted:
        texts = text_prompts(lambda asked: ruler.count(ruler.framed(asked, words)), words, wanted, spec.seed)
        built |= zip((want.number for want in wanted), ruler.framed(texts, words), strict=True)
    if local and server and wanted and not server.generates:
        (counted,) = server.count([built[wanted[0].number]])
        if counted != wanted[0].tokens:
            raise PromptError(
                f"the first prompt was built to count {wanted[0].tokens} tokens and the server counts {counted}",
                ANOTHER_MODEL,
            )
    return Prompts(spec, replace(raw, count=lambda text: counts[text] if text in counts else raw.count(text)), chat)


@dataclass(frozen=True, slots=True)
class _Ruler:
    """Who counts texts, and what the server was found to add to that count."""

    tokenizer: Tokenizer
    how: str
    shift: int = 0

    def count(self, texts: Sequence[str]) -> list[int]:
        return [tokens + self.shift for tokens in self.tokenizer.count(texts)]

    def framed(self, texts: Sequence[str], words: Sequence[str]) -> list[str]:
        """A template touches the first and the last word, and may change what they cost: `[user]` and a blank before
        a word make another token than the word alone. Hence texts begin and end as the measured samples do."""
        return [_framed(text, words) for text in texts] if self.shift else list(texts)


def _ruler(local: Tokenizer | None, server: Judge | None, words: Sequence[str]) -> _Ruler:
    if local:
        shift = _shift(local, server, words) if server else 0
        return _Ruler(local, "text, counted with the tokenizer file", shift)
    if server and not server.generates:
        return _Ruler(server, "text, counted by the server")
    if server and server.plain:
        shift = _shift(server.plain, server, words)
        return _Ruler(server.plain, "text, counted by the server, plus its chat template", shift)
    raise PromptError(
        "the server does not tell how many tokens a text has without running it",
        "pass the model's tokenizer file: --tokenizer PATH/tokenizer.json",
    )


def _ids(spec: WorkloadSpec, alphabet: Sequence[int]) -> Prompt:
    numbers = (NUMBERS_LIMIT if spec.n is None else spec.n) + spec.warmup
    if isinstance(spec.workload, SharedPrefix):
        return id_prompts(alphabet, spec.seed, numbers=numbers, shared=spec.workload.groups)
    if spec.trace is not None:
        return id_prompts(alphabet, spec.seed, numbers=numbers, shared=BLOCKS_LIMIT)
    shortest = spec.input.length if isinstance(spec.input, Fixed) else BLOCK_TOKENS
    return id_prompts(alphabet, spec.seed, numbers=numbers, shortest=shortest)


def _rehearsed(spec: WorkloadSpec, raw: PromptSource) -> tuple[list[WantedText], dict[str, int]]:
    """Go through the whole workload once, to learn which texts will be wanted and which will be counted."""
    wanted: list[WantedText] = []
    counts: dict[str, int] = {}

    def note(number: int, input_tokens: int, shared: Sequence[Stretch] = ()) -> str:
        wanted.append(WantedText(number, input_tokens, tuple(shared)))
        return ""

    def counted(text: str) -> int:
        if text not in counts:
            counts[text] = raw.count(text)
        return counts[text]

    if spec.n is None and spec.trace is None and getattr(spec.workload, "path", None) is None:
        raise WorkloadError("texts are built before the run, and this load has no end", "say how many with --n")
    rehearsal = Prompts(spec, replace(raw, prompt=note, count=counted), chat=False)
    deque(rehearsal.conversations() if rehearsal.of_sessions else rehearsal.requests(), maxlen=0)
    rehearsal.warmup()
    return wanted, counts


def _framed(text: str, words: Sequence[str]) -> str:
    return f"{words[0]} {text} {words[0]}"


def _shift(ruler: Tokenizer, server: Judge, words: Sequence[str]) -> int:
    """Tokens that the server counts on top of the ruler: the chat template, a BOS the tokenizer file does not know.

    A text of many words and a short one must show the same difference; otherwise the file is another model's.
    """
    texts = [_framed(words[-1], words), _framed(" ".join(words[:SAMPLE_WORDS]), words)]
    ours, theirs = ruler.count(texts), server.count(texts)
    shift = theirs[0] - ours[0]
    if theirs[1] - ours[1] != shift:
        raise PromptError(
            f"two texts count {ours[0]} and {ours[1]} tokens by the tokenizer file and {theirs[0]} and {theirs[1]} by "
            "the server: it is not the tokenizer that the server uses",
            ANOTHER_MODEL,
        )
    return shift


def _synthetic_sessions(turns: int, source: PromptSource) -> Iterator[tuple[Turn, ...]]:
    """`turns` questions each, of the lengths asked for; a turn's whole prompt is longer by all that was said before."""
    asked = []
    for number, input_tokens, output_tokens in source.lengths():
        prompt = source.prompt(number, input_tokens)
        if not isinstance(prompt, str):
            raise WorkloadError("sessions are text, and the prompts are token ids", "build the prompts as text")
        asked.append(Turn(prompt, input_tokens, output_tokens))
        if len(asked) == turns:
            yield tuple(asked)
            asked = []


def _shared_prefix(rest: str) -> SharedPrefix:
    found = options(rest.split(","), ("groups", "tokens"))
    if len(found) < 2:
        raise WorkloadError("both groups= and tokens= are needed")
    groups = whole(found["groups"], "groups", 1, GROUPS_LIMIT)
    return SharedPrefix(groups, whole(found["tokens"], "tokens", 1, TOKENS_LIMIT))


def _multi_turn(rest: str) -> MultiTurn:
    if rest.startswith("turns="):
        found, path = options(rest.split(","), ("turns", "think")), None
    else:
        name, found = path_and_options(rest, ("think",))
        path = Path(name)
    turns = whole(found["turns"], "turns", 1, TURNS_LIMIT) if "turns" in found else None
    return MultiTurn(turns, path, duration_ns(found.get("think", "0s"), "think", zero=True))


def _dataset(kind: str) -> Callable[[str], Dataset]:
    return lambda rest: Dataset(kind, Path(path_and_options(rest, ())[0]))


SAMPLES: dict[str, Callable[[Path], Iterator[Sample]]] = {
    "sharegpt": lambda path: (dialogue[0] for dialogue in datasets.sharegpt(path)),
    "alpaca": datasets.alpaca,
    "jsonl": datasets.jsonl,
}
KINDS: dict[str, tuple[Callable[[str], Workload], str]] = {
    "synthetic": (lambda _: Synthetic(), "synthetic"),
    "shared-prefix": (_shared_prefix, "shared-prefix:groups=K,tokens=P, such as shared-prefix:groups=8,tokens=256"),
    "sharegpt": (_dataset("sharegpt"), "sharegpt:FILE"),
    "alpaca": (_dataset("alpaca"), "alpaca:FILE"),
    "jsonl": (_dataset("jsonl"), "jsonl:FILE"),
    "multi-turn": (_multi_turn, "multi-turn:turns=K[,think=T] or multi-turn:FILE[,think=T]"),
}
"""What parse reads, by first word: the reader of what follows the colon, and the syntax as errors quote it."""
