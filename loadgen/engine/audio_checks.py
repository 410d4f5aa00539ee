"""Checks the options of a plan for the audio endpoints, before the server is contacted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.errors import PlanError
from loadgen.plan import default_input_tokens
from loadgen.servers.backends.audio import READABLE_FORMATS
from loadgen.workloads import lengths
from loadgen.workloads.audio_files import Recordings
from loadgen.workloads.workload import Synthetic

if TYPE_CHECKING:
    from loadgen.plan import Plan
    from loadgen.servers.backends.dialect import Dialect

Mistake = tuple[str, str]
"""The message about a wrong option, and the hint."""


def check_audio(plan: Plan, dialect: Dialect) -> None:
    """Raise PlanError if an option of the plan does not fit its endpoint.

    Endpoints for texts do not accept options about recordings. Endpoints for audio do not accept options about tokens.
    """
    if dialect.inputs == "recording":
        mistakes = [*_recording_mistakes(plan), *_token_mistakes(plan, dialect)]
    elif dialect.count_by_running is None:
        mistakes = [*_no_recording_mistakes(plan, dialect), *_token_mistakes(plan, dialect), *_speech_mistakes(plan)]
    else:
        mistakes = [*_no_recording_mistakes(plan, dialect)]
    if mistakes:
        message, hint = mistakes[0]
        raise PlanError(message, hint)


def _recording_mistakes(plan: Plan) -> Iterator[Mistake]:
    """Yield the mistakes in the options of a plan whose endpoint transcribes recordings.

    Such a plan must meet three conditions:

    - It has no options for text prompts, such as --input-tokens.
    - If the recordings come from files, it does not set their length (--audio-seconds).
    - The format of the response is a format that loadgen can read (READABLE_FORMATS).
    """
    if plan.input_tokens != default_input_tokens(vars(plan)):
        yield (
            f"--input-tokens {plan.input_tokens}: --endpoint transcriptions takes recordings, which have no tokens",
            "State their length in seconds: --audio-seconds 10.",
        )
    if not isinstance(plan.prompt_source, Synthetic | Recordings):
        yield (
            f"--workload {plan.workload} has texts, and --endpoint transcriptions takes recordings",
            "Use --workload audio:FOLDER for audio files, or leave --workload out for synthetic recordings.",
        )
    if plan.audio_seconds is not None and plan.uses_file:
        yield (
            f"--audio-seconds {plan.audio_seconds}: the files of --workload {plan.workload} have their own length",
            "Leave --audio-seconds out.",
        )
    name = plan.extra_body.get("response_format", READABLE_FORMATS[0])
    if name not in READABLE_FORMATS:
        yield (
            f"--extra-body: a transcript in the format {name!r} is plain text, like an error of the server",
            f"Use {' or '.join(READABLE_FORMATS)}.",
        )


def _no_recording_mistakes(plan: Plan, dialect: Dialect) -> Iterator[Mistake]:
    """Yield a mistake for each option about recordings, in a plan whose endpoint accepts only texts."""
    hint = "Use --endpoint transcriptions for recordings"
    if plan.audio_seconds is not None:
        what = f"--audio-seconds {plan.audio_seconds}"
        yield f"{what}: --endpoint {dialect.endpoint} takes texts, not recordings", f"{hint}, or leave it out."
    if isinstance(plan.prompt_source, Recordings):
        yield f"--workload {plan.workload}: --endpoint {dialect.endpoint} takes texts, not recordings", f"{hint}."


def _token_mistakes(plan: Plan, dialect: Dialect) -> Iterator[Mistake]:
    """Yield a mistake for each option that has no effect on an audio endpoint, because audio is not counted in tokens.

    For example, --output-tokens has no effect, because the input determines the length of the output.
    """
    defaults = (lengths.ANSWERS, lengths.DEFAULT_OUTPUT_TOKENS)
    speech = dialect.inputs != "recording"
    if plan.output_tokens not in defaults:
        result = "the speech" if speech else "the transcript"
        hint = (
            "Leave it out." if speech else "Leave it out, or limit it: --extra-body '{\"max_completion_tokens\": 64}'."
        )
        yield f"--output-tokens {plan.output_tokens}: the input decides the length of {result}", hint
    settings = {"--tokenizer": bool(plan.tokenizer), "--lengths": bool(plan.lengths)}
    for option, is_set in settings.items():
        if is_set:
            yield f"{option}: --endpoint {dialect.endpoint} counts no tokens", f"Leave {option} out."


def _speech_mistakes(plan: Plan) -> Iterator[Mistake]:
    """Yield the mistakes in the options that determine how speech is returned."""
    if plan.extra_body.get("stream_format") == "sse":
        yield (
            "--extra-body: with the stream_format 'sse', the response is no audio but events",
            "Leave stream_format out: audio is streamed in chunks of HTTP.",
        )
