"""Builds prompts of exactly N tokens, as the server counts them. All prompts of a run differ in their first tokens.

    token ids   If the API accepts token ids, a prompt of N tokens consists of N ids.
    text        Otherwise a prompt consists of words whose token counts add up to N. If the token count of the whole
                text differs from this sum, its last words are replaced until the count is N.

A prompt consists of two or three parts:

    shared spans    Optional: tokens with which other prompts also begin.
    number          Words or token ids that encode the number of the prompt, so that prompts differ.
    random words    Random words or token ids up to the requested length.

A seed gives the same prompts, byte for byte, on any machine. Prompt i has a separate random generator, seeded with the
text "seed:i". Only `Random.random` is used, because Python guarantees the same sequence in every version for this
method alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from loadgen.workloads.input_files import check_input, read_input
from loadgen.workloads.random_streams import item_picker
from loadgen.workloads.spec_syntax import WorkloadError

if TYPE_CHECKING:
    import tokenizers

BLOCK_TOKENS = 16  # Block size of vLLM's prefix cache. Prompts must differ within their first block.
NUMBERS_LIMIT = 1_000_000
"""Number of different prompts if the number of requests is unknown. Later prompts may begin like earlier ones."""
SPANS_LIMIT = 4096  # Number of cached spans; they take 16 MiB at 512 tokens each

Item = TypeVar("Item", int, str)
SharedSpan = tuple[int, int]
"""A negative number and a length in tokens, which identify a span that prompts may share. Equal pairs stand for equal
tokens."""
CountTokens = Callable[[Sequence[str]], list[int]]  # The signature of Tokenizer.count

_COMMON = (
    "the of and to in is that it was for on are as with they be at one have this from by but some what there we can "
    "out other all your when up use how each which do time if will way about many then them would so these long make "
    "see two has look more day could go come no most over know than call first people may down now find any new work "
    "part take get a b c d e f g h j k l m n o p q r s t u v w x y z"
)
COMMON_WORDS = tuple(_COMMON.split())
"""Short English words, which are one token each in most vocabularies, and letters for other vocabularies."""

TOKENIZER_BYTES = 1 << 28  # Maximum size of a tokenizer file, ten times the largest known one
CANDIDATES_LIMIT = 1024
MARKED_WORD = re.compile("[\u0120\u2581]([A-Za-z]{2,12})")
"""Matches a word after a space in a vocabulary. Byte-level BPE and SentencePiece write these characters for a space."""


class PromptError(WorkloadError):
    """Prompts of the requested length cannot be built. The message states the reason, and `hint` says what to do."""


class Tokenizer(Protocol):
    """Interface of an object that counts tokens, either with a tokenizer file or by requests to the server."""

    @property
    def words(self) -> Sequence[str]:
        """Different plain words, most of which are one token each. Empty if no words are known."""

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text when it is sent as a prompt.

        The number includes special tokens and the chat template.
        """

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, or an empty list if the ids are unknown.

        Special tokens, such as a BOS token, are not included.
        """


class ServerTokenCounter(Tokenizer, Protocol):
    """Interface of a token counter that sends each text to the server, which counts the tokens."""

    @property
    def generates(self) -> bool:
        """True if the server must run the model on a text to count its tokens.

        In this case, the text is in the server's prefix cache afterwards.
        """

    @property
    def plain(self) -> Tokenizer | None:
        """A token counter that uses a route of the server for plain text. None if the server has no such route.

        This counter does not run the model. Its counts do not include the tokens that the endpoint of the run adds to a
        prompt, such as those of a chat template. The counter is needed only if `generates` is True.
        """


class LocalTokenizer(msgspec.Struct, frozen=True):
    """A tokenizer from a tokenizer.json file.

    `count` includes the special tokens that the file's post-processor adds. `ids` does not include them.
    """

    tokenizer: tokenizers.Tokenizer
    words: tuple[str, ...]

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(encoding) for encoding in self.tokenizer.encode_batch_fast(texts)]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def tokenizer_file(named: Path) -> Path:
    """Return the path of the tokenizer.json that `named` refers to.

    `named` is a file, a folder with a tokenizer.json, or the name of a model in the local Hugging Face cache, such as
    Qwen/Qwen3-0.6B. Nothing is downloaded. Raises PromptError if there is no such file."""
    if named.exists() and not named.is_dir():
        try:
            check_input(named)
        except OSError as error:
            raise PromptError(
                f"cannot read {named}: {error.strerror}", "pass --tokenizer PATH/tokenizer.json"
            ) from None
        return named
    folders = [named]
    source = f"the folder {named}"
    if not named.is_dir():
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home, "hub")).expanduser()
        model = hub / f"models--{str(named).replace('/', '--')}"
        newest = model / "refs" / "main"
        revision = newest.read_text(encoding="ascii").strip() if newest.is_file() else ""
        folders = sorted(model.glob("snapshots/*"), key=lambda folder: folder.name != revision)
        source = f"the cached model {named}"
        if not folders:
            problem = f"there is no file {named}, no folder, and no model of that name in {hub}"
            raise PromptError(problem, _download_hint(str(named)))
    files = (folder / "tokenizer.json" for folder in folders)
    result = next((file for file in files if file.is_file()), None)
    if result is None:
        problem = f"{source} has no tokenizer.json: save_pretrained of transformers' AutoTokenizer writes one"
        raise PromptError(problem, "pass another --tokenizer" if named.is_dir() else _download_hint(str(named)))
    return result


def _download_hint(named: str) -> str:
    """Return a hint on how to supply the tokenizer of the model `named`.

    The hint contains the command that downloads the tokenizer from Hugging Face, and the option for a local file. If
    `named` cannot be the name of a model, the hint contains only the option.

    The command is `hf` of huggingface_hub, which is installed with loadgen because the library `tokenizers` requires
    it.
    """
    if not re.fullmatch(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?", named) or named.endswith(".json"):
        return "pass --tokenizer PATH/tokenizer.json"
    return f"download it: hf download {named} tokenizer.json; or pass --tokenizer PATH/tokenizer.json"


def load_tokenizer(named: Path) -> LocalTokenizer:
    """Load the tokenizer that `named` refers to: a file, a folder or a model (see `tokenizer_file`).

    Raises PromptError if there is no such file, or if it is unreadable or not a tokenizer."""
    import tokenizers

    path = tokenizer_file(named)
    # Threads of the tokenizers library do not survive a fork, and counting is short.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(read_input(path, TOKENIZER_BYTES).decode())
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}", "pass --tokenizer PATH/tokenizer.json") from error
    except Exception as error:  # the library raises plain Exception for every invalid file
        problem = f"{path} is not a tokenizer.json: {str(error)[:200]}"
        raise PromptError(problem, "pass a Hugging Face tokenizer.json") from error
    # A file may request truncation or padding to a length. Servers ignore that, and so must the count.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LocalTokenizer(tokenizer, tuple(_plain_words(tokenizer)))


def _plain_words(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield plain words of the tokenizer's vocabulary, most frequent first, and then COMMON_WORDS.

    Words that the tokenizer encodes with a special token, such as the one for unknown text, are left out."""
    tokens = (tokenizer.id_to_token(token_id) or "" for token_id in range(tokenizer.get_vocab_size()))
    marked = (match[1] for match in map(MARKED_WORD.fullmatch, tokens) if match)
    candidates = list(dict.fromkeys([*islice(marked, CANDIDATES_LIMIT), *COMMON_WORDS]))
    encodings = tokenizer.encode_batch_fast(candidates, add_special_tokens=False)
    added = tokenizer.get_added_tokens_decoder().keys()
    # A word with unknown letters would become the model's special token for unknown text.
    return (word for word, encoding in zip(candidates, encodings, strict=True) if added.isdisjoint(encoding.ids))


class Prompt(Protocol):
    """Interface of a function that builds the prompt with a given number.

    The function builds the same prompt for the same arguments in every call and in every process. Prompts with
    different numbers differ in their first tokens. If they begin with the same shared spans (`shared`), they differ in
    the first tokens after these spans.
    """

    def __call__(self, number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str | tuple[int, ...]:
        """Return prompt number `number`: a text or token ids, with exactly `input_tokens` tokens.

        The prompt begins with the spans of tokens in `shared`. If the prompt is shorter than these spans, they are cut.
        """


def id_prompts(
    alphabet: Sequence[int], seed: int, *, numbers: int, shared: int = 0, shortest: int = BLOCK_TOKENS
) -> Prompt:
    """Return a prompt builder (`Prompt`) whose prompts are random token ids from `alphabet`.

    - `numbers`: Number of prompts, which are numbered from 0.
    - `shared`: Number of shared spans, which are numbered -1, -2, and so on. A shared span is a sequence of token ids
      with which several prompts begin.
    - `shortest`: Length in tokens from which all prompts must be different. Prompts of this length or more already
      differ in their first tokens. Shorter prompts may be equal.

    Raises PromptError if the alphabet is too small for this many different prompts and spans.
    """
    size = len(alphabet)
    total = numbers + shared
    max_depth = min(shortest, BLOCK_TOKENS)
    depth = next((depth for depth in range(1, max_depth + 1) if size**depth >= total), 0)
    if not depth:
        raise PromptError(
            f"{size} token ids make only {size**max_depth} different prompts of {max_depth} tokens, not {total}",
            "request longer prompts or fewer of them",
        )
    order = shuffled(alphabet, seed)
    pick = item_picker(order)

    def numbered_ids(number: int, tokens: int) -> list[int]:
        lead = counter_digits(number + shared if number >= 0 else -1 - number, [order] * depth)
        return [*lead[:tokens], *pick(prompt_random(seed, number), max(0, tokens - depth))]

    span_ids = lru_cache(SPANS_LIMIT)(numbered_ids)

    def prompt(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> tuple[int, ...]:
        ids: list[int] = []
        for span_number, span_tokens in shared:
            if len(ids) >= input_tokens:
                break
            ids += span_ids(span_number, span_tokens)
        return (*ids[:input_tokens], *numbered_ids(number, max(0, input_tokens - len(ids))))

    return prompt


def prompt_random(seed: int, number: int) -> Random:
    """Return the random generator of one prompt, or of a sequence of tokens with which several prompts begin.

    The generator is seeded with a text that contains `seed` and `number`. Python hashes the text with SHA-512, so
    generators of consecutive numbers are independent.
    """
    return Random(f"{seed}:{number}")  # noqa: S311


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """Return the items in a random order that depends only on the seed."""
    random = Random(f"{seed}")  # noqa: S311
    return sorted(items, key=lambda _: random.random())


def counter_digits(number: int, wheels: Sequence[Sequence[Item]]) -> list[Item]:
    """Return `number` as a list of digits, lowest digit first, like a mechanical counter with one wheel per digit.

    Each entry of `wheels` lists the symbols of one digit, which are words or token ids. For example, with the symbols
    a, b and c on both of two wheels, the number 5 (2 + 1 * 3) becomes the list c, b.
    """
    symbols = []
    for wheel in wheels:
        number, position = divmod(number, len(wheel))
        symbols.append(wheel[position])
    return symbols
