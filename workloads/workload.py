"""The Workload: arrivals' counterpart, what is asked. A seeded iterable of Requests, made one at a time.

    synthetic                            prompts of the lengths asked for, all different
    shared-prefix:groups=K,tokens=P      the same, request i beginning with the P tokens of group i mod K
    sharegpt:FILE                        the first question of each dialogue
    alpaca:FILE                          instructions
    jsonl:FILE                           prompts, with their own output lengths where given
    multi-turn:turns=K[,think=T]         sessions of K synthetic questions
    multi-turn:FILE[,think=T]            sessions of a ShareGPT-format file

A trace brings its own lengths: see `replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import TypeAlias

from workloads import datasets, sessions
from workloads.datasets import Sample
from workloads.lengths import Lengths
from workloads.prompts import Prompt
from workloads.request import Request
from workloads.sessions import Conversation, Turn
from workloads.syntax import WorkloadError, duration_ns, options, path_and_options, show_duration, whole
from workloads.traces import BLOCK_TOKENS, Entry

TOKENS_LIMIT = 10_000_000
TURNS_LIMIT = 1_000
GROUPS_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Material:
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

    def input_tokens(self) -> Iterator[int]:
        """The stream of prompt lengths."""
        return self.input.tokens(self.seed, "input")

    def output_tokens(self) -> Iterator[int]:
        """The stream of output lengths. Raises WorkloadError when none was named."""
        if self.output is None:
            raise WorkloadError("this workload has no answers of its own to take output lengths from", "name them")
        return self.output.tokens(self.seed, "output")


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Prompts of the lengths asked for, all different. Without end."""

    def requests(self, material: Material) -> Iterator[Request]:
        """The Requests, in order of id."""
        for number, input_tokens, output_tokens in zip(
            count(), material.input_tokens(), material.output_tokens(), strict=False
        ):
            yield Request(number, material.prompt(number, input_tokens), input_tokens, output_tokens)

    def __str__(self) -> str:
        return "synthetic"


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Request i begins with the `tokens` tokens of group i mod `groups` and goes on with its own. Without end.

    The lengths asked for are those of whole prompts.
    """

    groups: int
    tokens: int

    def requests(self, material: Material) -> Iterator[Request]:
        """The Requests, in order of id. Raises WorkloadError for prompts that are not longer than `tokens`."""
        for number, input_tokens, output_tokens in zip(
            count(), material.input_tokens(), material.output_tokens(), strict=False
        ):
            if input_tokens <= self.tokens:
                raise WorkloadError(
                    f"request {number} has {input_tokens} tokens, no more than the shared prefix's {self.tokens}",
                    "ask for longer prompts, or share fewer tokens",
                )
            shared = ((-1 - number % self.groups, self.tokens),)
            yield Request(number, material.prompt(number, input_tokens, shared), input_tokens, output_tokens)

    def __str__(self) -> str:
        return f"shared-prefix:groups={self.groups},tokens={self.tokens}"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Questions from a file, in its order, once. `kind` is a key of SAMPLES."""

    kind: str
    path: Path

    def requests(self, material: Material) -> Iterator[Request]:
        """The Requests, in order of id. Raises WorkloadError on damage, or when an output length cannot be known."""
        lengths = None if material.output is None else material.output_tokens()
        for number, sample in enumerate(SAMPLES[self.kind](self.path)):
            output_tokens = _answer_tokens(sample, material) if lengths is None else next(lengths)
            yield Request(number, sample.prompt, material.count(sample.prompt), output_tokens)

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}"


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Sessions of several turns: `turns` synthetic ones, without end, or those of the file at `path`, once."""

    turns: int | None
    path: Path | None
    think_ns: int = 0

    def conversations(self, material: Material, *, chat: bool) -> Iterator[Conversation]:
        """The sessions, each at its first turn. Raises WorkloadError as Dataset does, or for prompts of token ids."""
        return sessions.conversations(self._sessions(material), self.think_ns, chat=chat)

    def _sessions(self, material: Material) -> Iterator[tuple[Turn, ...]]:
        if self.path is not None:
            lengths = None if material.output is None else material.output_tokens()
            return sessions.recorded(datasets.sharegpt(self.path), material.count, lengths)
        return _synthetic_sessions(self.turns or 1, material)

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


def replay(entries: Iterable[Entry], material: Material) -> Iterator[Request]:
    """Requests with a trace's own lengths, in its order.

    Where an entry names its blocks, each block becomes the same 512 tokens wherever it occurs, so equal leading ids
    are an equal prefix and the server's cache sees the recorded sharing. Where the ids end before the prompt does, the
    rest is the request's own; ids past its end are ignored.
    """
    for number, entry in enumerate(entries):
        blocks = entry.blocks[: -(-entry.input_tokens // BLOCK_TOKENS)]
        prompt = material.prompt(number, entry.input_tokens, [(-1 - block, BLOCK_TOKENS) for block in blocks])
        yield Request(number, prompt, entry.input_tokens, entry.output_tokens)


def _text(prompt: str | tuple[int, ...]) -> str:
    if not isinstance(prompt, str):
        raise WorkloadError("sessions are text, and the prompts are token ids", "build the prompts as text")
    return prompt


def _answer_tokens(sample: Sample, material: Material) -> int:
    if sample.output_tokens is not None:
        return sample.output_tokens
    if not sample.answer:
        raise WorkloadError(f"no output length for the prompt {sample.prompt[:60]!r}", "name the output lengths")
    return max(1, material.count(sample.answer))


def _synthetic_sessions(turns: int, material: Material) -> Iterator[tuple[Turn, ...]]:
    """`turns` questions each, of the lengths asked for; a turn's whole prompt is longer by all that was said before."""
    numbered = zip(count(), material.input_tokens(), material.output_tokens(), strict=False)
    while True:
        yield tuple(
            Turn(_text(material.prompt(number, input_tokens)), input_tokens, output_tokens)
            for number, input_tokens, output_tokens in islice(numbered, turns)
        )


def _shared_prefix(rest: str) -> SharedPrefix:
    found = options(rest.split(","), ("groups", "tokens"))
    if len(found) < 2:
        raise WorkloadError("both groups= and tokens= are needed")
    return SharedPrefix(
        whole(found["groups"], "groups", 1, GROUPS_LIMIT), whole(found["tokens"], "tokens", 1, TOKENS_LIMIT)
    )


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
    "sharegpt": lambda path: datasets.first_turns(datasets.sharegpt(path)),
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
