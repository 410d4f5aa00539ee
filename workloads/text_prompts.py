"""Prepares the text prompts of a run in three stages.

    1. The requests of the run are generated without texts, and a TextSurvey records the lengths of the texts.
    2. The number of tokens of each word (WordCosts) is loaded from an earlier run, or measured now.
    3. A TextWriter writes a few texts as a sample, and the tokens of each complete text of the sample are counted.

If the texts of the sample have the requested lengths, the token count of a text is the sum over its words. The
workers can then write each text shortly before they send it. Otherwise the tokens of every complete text must be
counted, either before the run or, with a tokenizer file, by the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from msgspec.structs import replace

from loadgen.workloads.lengths import Fixed
from loadgen.workloads.prompts import CountTokens, Prompt, PromptError, SharedSpan
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.texts import (
    OPENINGS,
    TextSpec,
    TextSurvey,
    TextWriter,
    VocabularyStore,
    WordCosts,
    measure_openings,
    measure_words,
    text_writer,
    words_of,
)
from loadgen.workloads.token_counter import TokenCounter

if TYPE_CHECKING:
    from loadgen.workloads.workload import Prompts

SAMPLES = 8  # Maximum number of complete texts that are counted as a sample
REHEARSED = 10_000  # Number of prompts that are surveyed if the number of requests is unknown
PROGRESS_EVERY = 1_000

Progress = Callable[[int], None]
"""Callback that is called with the number of prompts that have been surveyed, counted or built so far."""


def ignore_progress(_done: int) -> None:
    """Do nothing. This progress callback is used when no progress is shown."""


def text_prompt(
    prompts: Prompts,
    counter: TokenCounter,
    store: VocabularyStore | None = None,
    progress: Progress = ignore_progress,
) -> tuple[Prompt, list[TextSpec]]:
    """Return a prompt builder (`Prompt`) for the text prompts of a run, and the specs of a few texts as samples.

    The texts have exactly the requested lengths, as `counter` counts them. `prompts` generates the requests of the run,
    but not their texts. If the run needs no generated text, there are no samples. `store` holds the token counts of
    words from earlier runs. Raises PromptError if a length cannot be exact, and WorkloadError if a file is malformed.
    """
    builder = _TextBuilder(prompts, counter, progress)
    if counter.offline:
        store = None  # without requests to the server, counting is so fast that nothing needs to be stored
    prompt = _build(builder, counter, store) if builder.samples else no_text
    return prompt, builder.samples


def _build(builder: _TextBuilder, counter: TokenCounter, store: VocabularyStore | None) -> Prompt:
    known = store.load() if store else None
    if known is not None and known.adds_up:
        try:
            writer = builder.writer(known)
        except PromptError:
            writer = None
        if writer is not None and builder.confirms(writer):
            return builder.written(writer)
    vocabulary = measure_words(builder.count, counter.words)
    if vocabulary.adds_up:
        writer = builder.writer(vocabulary)
        if builder.confirms(writer):
            if store:
                store.save(vocabulary)
            return builder.written(writer)
    return builder.counted(builder.writer(vocabulary, builder.count))


def no_text(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str:  # noqa: ARG001 - a Prompt
    """Raise WorkloadError, because no text was prepared for the prompt with the number `number`.

    This function is used as the prompt builder (`Prompt`) of a run without prepared texts, so it has the parameters of
    a prompt builder.
    """
    raise WorkloadError(f"no text was prepared for prompt {number}", "prepare every prompt of the run")


class _TextBuilder:
    """Builds the text prompts of one run, given the words of a vocabulary and their token counts."""

    def __init__(self, prompts: Prompts, counter: TokenCounter, progress: Progress) -> None:
        self._prompts = prompts
        self._counter = counter
        self._progress = progress
        self._survey, self.samples = _survey(prompts, progress)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text in `texts`.

        If the token counter has a `frame` word, each text is sent with this word at both ends. These words are then
        counted too.
        """
        return self._counter.count(self._counter.framed(texts))

    def writer(self, vocabulary: WordCosts, count: CountTokens | None = None) -> TextWriter:
        """Return a writer that builds the texts of the run from the words of `vocabulary`.

        A word at the start of a text may have another number of tokens than later in the text. Only the first OPENINGS
        words of the vocabulary were measured at the start of a text. The writer therefore begins each text with one of
        these words.

        These few words may not be enough to reach every length, or to make enough different short texts. This method
        then measures all words of the vocabulary at the start of a text, and tries again. If the number of requests is
        known, it first records the lengths of all prompts of the run.

        `count` counts the tokens of complete texts. It is None if the token count of a text is the sum over its words.
        Raises PromptError if the second attempt also fails.
        """
        try:
            return self._writer(vocabulary, OPENINGS, count)
        except PromptError:
            pass
        if not self._survey.complete and self._prompts.spec.n is not None:
            self._survey, self.samples = _survey(self._prompts, self._progress, complete=True)
        vocabulary = measure_openings(self.count, vocabulary)
        return self._writer(vocabulary, len(vocabulary.costs), count)

    def _writer(self, vocabulary: WordCosts, openings: int, count: CountTokens | None) -> TextWriter:
        writer = text_writer(words_of(vocabulary, openings), self._survey, self._prompts.spec.prompt_seed, count)
        if writer.openings.short:
            _rehearse(replace(self._prompts, prompt=writer.openings.rank), None, self._progress)
        return writer

    def confirms(self, writer: TextWriter) -> bool:
        """Return True if sample texts of the run have the requested lengths.

        The tokens of each complete sample text are counted. `writer` writes the samples.
        """
        return self.count(writer.texts(self.samples)) == [spec.tokens for spec in self.samples]

    def written(self, writer: TextWriter) -> Prompt:
        """Return a prompt builder (`Prompt`) that writes each text when the text is needed."""

        def write(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str:
            return self._counter.framed([writer.text(TextSpec(number, input_tokens, tuple(shared)))])[0]

        return write

    def counted(self, writer: TextWriter) -> Prompt:
        """Return a prompt builder (`Prompt`) that counts the tokens of each text as a whole.

        This is necessary if the token count of a text differs from the sum over its words.

        Normally, this method already writes and counts all texts of the run, with `writer`. If the number of requests
        is unknown, each text is written and counted later, when it is needed. This is only possible if counting needs
        no request to the server (`TokenCounter.offline`).

        Raises PromptError if the number of requests is unknown and counting needs requests to the server, or if a text
        cannot have exactly the requested length.
        """
        if not self._survey.complete and self._prompts.spec.n is None:
            if self._counter.offline:
                return self.written(writer)
            raise PromptError(
                "every text must be counted before the run, because the server's count of a text is not the sum of its "
                "words, and this load has no end",
                "set a number with --n",
            )
        specs: list[TextSpec] = []

        def note(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str:
            specs.append(TextSpec(number, input_tokens, tuple(shared)))
            return ""

        _rehearse(replace(self._prompts, prompt=note), 0 if _is_from_file(self._prompts) else None, ignore_progress)
        writer.write_first_spans(spec.shared[0] for spec in specs if spec.shared)
        texts = self._counter.framed(writer.texts(specs, self._progress))
        by_number = dict(zip((spec.number for spec in specs), texts, strict=True))

        def lookup(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str:
            return by_number[number] if number in by_number else no_text(number, input_tokens, shared)

        return lookup


def _survey(prompts: Prompts, progress: Progress, *, complete: bool = False) -> tuple[TextSurvey, list[TextSpec]]:
    """Count the prompt texts that a run needs, by length. Return the counts, and a few of the texts as TextSpecs.

    The texts of the warm-up prompts are always counted. Which other texts are counted depends on the workload. The
    first case that applies decides:

    - The prompts are read from a file: no other texts are counted, because no more are generated.
    - The workload is `sessions:FILE`: the texts of all sessions are counted. If the run repeats the file without end,
      the texts of one pass over the file are counted.
    - The number of requests is unknown: the texts of the first REHEARSED prompts are counted.
    - All prompts have the same length, and `complete` is False: the first REHEARSED prompts are sufficient here, too.
    - All other workloads: the texts of all prompts are counted.

    If a workload consists of sessions, REHEARSED is a number of sessions. If lengths are random and the number of
    requests is unknown, the shortest possible length counts once more, because the first prompts may not contain it.
    """
    spec = prompts.spec
    from_file = _is_from_file(prompts)
    endless = spec.n is None and spec.trace is None and not prompts.has_graphs
    limit = None
    if from_file:
        limit = 0
    elif prompts.has_graphs:
        limit = None
    elif endless or (isinstance(spec.input, Fixed) and spec.trace is None and not complete):
        limit = max(1, REHEARSED // spec.batch_size)
    survey = TextSurvey(
        prompts.warmup_start + spec.warmup * spec.batch_size,
        prompts.shared_spans,
        complete=from_file or (limit is None and not prompts.is_endless),
    )
    samples: list[TextSpec] = []

    def note(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str:
        if len(samples) < SAMPLES:
            samples.append(TextSpec(number, input_tokens, tuple(shared)))
        return survey.note(number, input_tokens, shared)

    _rehearse(replace(prompts, prompt=note), limit, progress if limit is None else ignore_progress)
    lowest = getattr(spec.input, "low", None)
    if endless and not from_file and lowest is not None and not prompts.shared_spans:
        survey.lengths[lowest] += 1
    return survey, samples


def _is_from_file(prompts: Prompts) -> bool:
    """Return True if the texts of the prompts are read from a file. Only warm-up prompts are then generated."""
    return prompts.spec.holds_texts


def _rehearse(prompts: Prompts, limit: int | None, progress: Progress) -> None:
    """Generate all requests of a run in advance, so that `prompts.prompt` is called for the text of each prompt.

    Callers replace `prompts.prompt` by a function that only records the length of the text. No request is sent.

    `limit` is the maximum number of requests, or of sessions if the workload consists of sessions. None means no limit.
    The warm-up requests do not count towards this limit, and are always generated.
    """
    if prompts.has_graphs:
        for done, graph in enumerate(islice(prompts.graphs(once=True), limit), 1):
            graph.prepare_prompts()
            if done % PROGRESS_EVERY == 0:
                progress(done)
        prompts.warmup()
        return
    requests = prompts.conversations() if prompts.has_sessions else prompts.requests()
    for done, _ in enumerate(islice(requests, limit), 1):
        if done % PROGRESS_EVERY == 0:
            progress(done)
    prompts.warmup()
