"""What a run asks, from its words to its Requests, made exact by whoever counts for the server.

    order = Order(workload, input, output, seed, n=1000, warmup=10, trace=None)
    made = material(order, token_ids=dialect.token_ids, local=tokenizer_file, server=judge)    before the workers start
    made.how                                     how the lengths were made exact
    requests(order, made)                        in order of id, the same each time; for every worker to draw anew
    warm_up(order, made)                         Requests with ids below zero
    conversations(order, made, chat=False)       sessions instead of Requests, where the workload is multi-turn

    synthetic, any lengths     ids are drawn as they are needed; texts are built and counted by `material`, all at once
    shared prefixes            the same; stretches that prompts share have numbers below zero
    dataset                    the file's texts, counted by `material`
    trace                      a synthetic workload with a Trace has the trace's own lengths and shared blocks
    multi-turn                 always text: the answers, which are part of the prompts, are

Everything that asks the server happens within `material`. What it returns holds no connection that is still used, so
workers may be forks and the connection closed.

    who counts a text     when
    tokenizer file        one is given; held against the server's count, and corrected by what the server adds
    server                it counts without running the text
    server, plus template it can count text alone without running it, and what its chat template adds is measured
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from workloads.arrivals import Trace
from workloads.lengths import Fixed, Lengths
from workloads.prompts import BLOCK_TOKENS, Judge, Prompt, PromptError, Stretch, Tokenizer, id_prompts
from workloads.request import Request
from workloads.sessions import Conversation
from workloads.syntax import WorkloadError
from workloads.texts import Wanted, text_prompts
from workloads.words import COMMON_WORDS
from workloads.workload import Material, MultiTurn, SharedPrefix, Synthetic, Workload, replay

NUMBERS_LIMIT = 1_000_000
"""Where nobody says how many requests there will be, ids number so many; later ones may begin as earlier ones did."""
BLOCKS_LIMIT = 1 << 63
"""A trace may name its blocks by any number of 63 bits."""
WARMUP_OUTPUT = Fixed(16)
"""Where output lengths are those of a dataset's answers. Enough decode steps to warm up the server's kernels."""
SAMPLE_WORDS = 200


@dataclass(frozen=True, slots=True)
class Order:
    """What a run asks for."""

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
    """The Requests of a run, made exact. Each method draws anew, the same ones each time, so that every worker can."""

    order: Order
    material: Material
    chat: bool
    """Whether the Requests of sessions hold messages."""

    @property
    def how(self) -> str:
        """How the lengths were made exact."""
        return self.material.how

    @property
    def of_sessions(self) -> bool:
        """Whether these are sessions."""
        return isinstance(self.order.workload, MultiTurn)

    def requests(self) -> Iterator[Request]:
        """In order of id. Raises WorkloadError for sessions."""
        return requests(self.order, self.material)

    def conversations(self) -> Iterator[Conversation]:
        """The sessions. Raises WorkloadError where there are none."""
        return conversations(self.order, self.material, chat=self.chat)

    def warmup(self) -> list[Request]:
        """Other Requests of the same kind, with ids below zero."""
        return warm_up(self.order, self.material)


def prompts_for(order: Order, *, token_ids: bool, chat: bool, local: Tokenizer | None, server: Judge | None) -> Prompts:
    """See `material`."""
    return Prompts(order, material(order, token_ids=token_ids, local=local, server=server), chat)


def material(order: Order, *, token_ids: bool, local: Tokenizer | None, server: Judge | None) -> Material:
    """Prepare prompts and counts. `token_ids` says that the endpoint takes token ids.

    Raises PromptError when a length cannot be made exact, or when the tokenizer file and the server disagree;
    WorkloadError when a file is damaged, or when texts are asked for without end.
    """
    source = local or server
    words = (source and source.words) or COMMON_WORDS
    ruler = _ruler(local, server, words)
    raw = Material(_Lookup({}), lambda text: ruler.count([text])[0], order.input, order.output, order.seed, ruler.how)
    wants_ids = token_ids and isinstance(order.workload, Synthetic | SharedPrefix)
    if wants_ids and source and (alphabet := sorted(set(source.ids(" ".join(words))))):
        return replace(raw, prompt=_ids(order, alphabet), how="token ids")
    wanted, counts = _rehearsed(order, raw)
    prompts = _texts(wanted, order.seed, ruler, words)
    if local and server and prompts and not server.generates:
        _check_first(prompts[0], wanted[0].tokens, server)
    texts = {want.number: text for want, text in zip(wanted, prompts, strict=True)}
    return replace(raw, prompt=_Lookup(texts), count=lambda text: counts[text] if text in counts else raw.count(text))


def requests(order: Order, material: Material) -> Iterator[Request]:
    """The Requests, in order of id, the same each time. Raises WorkloadError for a workload of sessions."""
    workload = order.workload
    if isinstance(workload, MultiTurn):
        raise WorkloadError("the turns of a session follow its answers", "use closed:N arrivals")
    if order.trace is not None and isinstance(workload, Synthetic):
        return islice(replay(order.trace.entries(), material), order.n)
    return islice(workload.requests(material), order.n)


def conversations(order: Order, material: Material, *, chat: bool) -> Iterator[Conversation]:
    """The first `n` sessions. `chat` as MultiTurn says.

    Raises WorkloadError for a workload that is not of sessions.
    """
    if not isinstance(order.workload, MultiTurn):
        raise WorkloadError(f"{order.workload} has no sessions", "name multi-turn:...")
    return islice(order.workload.conversations(material, chat=chat), order.n)


def warm_up(order: Order, material: Material) -> list[Request]:
    """Synthetic Requests with ids -1, -2, ..., of the lengths that the order names, whatever its workload.

    They share nothing with the run's own, so they leave nothing of use in the server's prefix cache.
    """
    first = NUMBERS_LIMIT if order.n is None else order.n
    if isinstance(order.workload, MultiTurn):
        first *= order.workload.turns or 1
    lengths = order.input.tokens(order.seed, "warm-up input")
    answers = (order.output or WARMUP_OUTPUT).tokens(order.seed, "warm-up output")
    return [
        Request(-1 - index, material.prompt(first + index, input_tokens), input_tokens, output_tokens)
        for index, input_tokens, output_tokens in zip(range(order.warmup), lengths, answers, strict=False)
    ]


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


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Texts built beforehand, by number."""

    texts: dict[int, str]

    def __call__(self, number: int, input_tokens: int, shared: Sequence[Stretch] = ()) -> str:  # noqa: ARG002
        if number not in self.texts:
            raise WorkloadError(f"no text was prepared for prompt {number}", "prepare as many as are asked for")
        return self.texts[number]


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


def _ids(order: Order, alphabet: Sequence[int]) -> Prompt:
    numbers = (NUMBERS_LIMIT if order.n is None else order.n) + order.warmup
    if isinstance(order.workload, SharedPrefix):
        return id_prompts(alphabet, order.seed, numbers=numbers, shared=order.workload.groups)
    if order.trace is not None:
        return id_prompts(alphabet, order.seed, numbers=numbers, shared=BLOCKS_LIMIT)
    shortest = order.input.length if isinstance(order.input, Fixed) else BLOCK_TOKENS
    return id_prompts(alphabet, order.seed, numbers=numbers, shortest=shortest)


def _rehearsed(order: Order, raw: Material) -> tuple[list[Wanted], dict[str, int]]:
    """Go through the whole order once, to learn which texts will be wanted and which will be counted."""
    wanted: list[Wanted] = []
    counts: dict[str, int] = {}

    def note(number: int, input_tokens: int, shared: Sequence[Stretch] = ()) -> str:
        wanted.append(Wanted(number, input_tokens, tuple(shared)))
        return ""

    def counted(text: str) -> int:
        if text not in counts:
            counts[text] = raw.count(text)
        return counts[text]

    if order.n is None and _endless(order):
        raise WorkloadError("texts are built before the run, and this load has no end", "say how many with --n")
    rehearsal = replace(raw, prompt=note, count=counted)
    drawn = conversations(order, rehearsal, chat=False) if _of_sessions(order) else requests(order, rehearsal)
    deque(drawn, maxlen=0)
    warm_up(order, rehearsal)
    return wanted, counts


def _of_sessions(order: Order) -> bool:
    return isinstance(order.workload, MultiTurn)


def _endless(order: Order) -> bool:
    return order.trace is None and getattr(order.workload, "path", None) is None


def _texts(wanted: Sequence[Wanted], seed: int, ruler: _Ruler, words: Sequence[str]) -> list[str]:
    if not wanted:
        return []
    texts = text_prompts(lambda asked: ruler.count(ruler.framed(asked, words)), words, wanted, seed)
    return ruler.framed(texts, words)


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
            "pass the tokenizer.json of the model that is being served",
        )
    return shift


def _check_first(text: str, tokens: int, server: Judge) -> None:
    (counted,) = server.count([text])
    if counted != tokens:
        raise PromptError(
            f"the first prompt was built to count {tokens} tokens and the server counts {counted}",
            "pass the tokenizer.json of the model that is being served",
        )
