"""The command `anonymise`: turn a log of real requests into a trace without text."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

from typer import Argument, Option

from loadgen.errors import OutputError, PlanError

if TYPE_CHECKING:
    from loadgen.workloads.anonymise import TraceFacts

Logs = Annotated[list[Path], Argument(help="Logs: OpenTelemetry spans, LiteLLM or vLLM logs, or request bodies.")]


def anonymise(
    logs: Logs,
    out: Annotated[
        Path, Option("--out", "-o", metavar="FILE", help="Trace to write; a name that ends in .gz is compressed.")
    ] = Path("trace.jsonl"),
    format_name: Annotated[
        str | None,
        Option("--format", help="Format: opentelemetry, litellm, vllm or requests. Default: recognised."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        Option(help="Tokenizer that counts tokens: a tokenizer.json, a folder, or the name of a cached model."),
    ] = None,
    block_tokens: Annotated[
        int, Option(min=1, max=1024, help="Tokens per block of a prompt; prompts share whole blocks.")
    ] = 16,
    model: Annotated[
        list[str] | None,
        Option(metavar="OLD=NEW", help="Name in the trace of a model in the log. Others are left out. Repeatable."),
    ] = None,
    salt_env: Annotated[
        str | None,
        Option(metavar="NAME", help="Environment variable with the salt of the hashes. Default: a new random salt."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Write a trace without text from a log of real requests.

    The trace has lengths, times, sessions, tool delays, and salted hashes that show which prompts begin alike. It has
    no text, names, ids or headers. `loadgen run --workload sessions:trace.jsonl` replays it. Exit codes: 0 written;
    2 usage error, or an invalid log.
    """
    from loadgen.workloads.anonymise import BlockHasher, salt_from, write_trace
    from loadgen.workloads.prompts import load_tokenizer
    from loadgen.workloads.request_logs import LOG_FORMATS

    if format_name is not None and format_name not in LOG_FORMATS:
        raise PlanError(f"--format {format_name} is no format of logs", f"Choose one of {', '.join(LOG_FORMATS)}.")
    if any(out.exists() and log.exists() and out.samefile(log) for log in logs):
        raise PlanError(f"--out {out} is the log itself", "Name another file with --out.")
    if out.name.endswith(".zst"):
        raise PlanError("traces are not written with zstd", "Name a file that ends in .jsonl or .jsonl.gz with --out.")
    salt = None
    if salt_env is not None:
        salt = os.environ.get(salt_env)
        if not salt:
            raise PlanError(
                f"the environment variable {salt_env} of --salt-env is not set", "Set it, or leave out --salt-env."
            )
    hasher = BlockHasher(salt_from(salt), block_tokens, load_tokenizer(tokenizer) if tokenizer else None)
    with _new_file(out) as file:
        facts = write_trace(logs, file, hasher, block_tokens, format_name, _model_names(model or []))
    if as_json:
        from msgspec import json

        print(json.format(json.encode({"trace": str(out), **_fields(facts)})).decode())
        return
    print("\n".join(_describe(facts, out, exact=tokenizer is not None)))


def _fields(facts: TraceFacts) -> dict[str, object]:
    from msgspec import to_builtins

    result: dict[str, object] = to_builtins(facts)
    return result


def _model_names(pairs: list[str]) -> dict[str, str]:
    """Parse `pairs` of the form `OLD=NEW`. Return a dict that maps the name of a model in the log to its name in the
    trace.

    Raises PlanError if a pair has another form, or if two pairs have the same old name.
    """
    result: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = pair.rpartition("=")
        if not (old and equals and new):
            raise PlanError(f"--model {pair} is not OLD=NEW", "Write --model gpt-4o=small.")
        if old in result:
            raise PlanError(f"--model names {old} twice", "Write one name per model.")
        result[old] = new
    return result


@contextmanager
def _new_file(path: Path) -> Iterator[IO[str]]:
    """Open a file for writing under a temporary name.

    If the context ends without an error, the file gets the name `path`. Otherwise it is deleted. A device, such as
    /dev/stdout, is opened directly. Raises OutputError if the file cannot be written.
    """
    if path.exists() and not path.is_file():  # such as /dev/stdout
        with path.open("w", encoding="utf-8") as device:
            yield device
        return
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    compressed = path.name.endswith(".gz")
    try:
        with gzip.open(temporary, "wt", encoding="utf-8") if compressed else temporary.open("w", encoding="utf-8") as f:
            yield f
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", "Name another file with --out.") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _describe(facts: TraceFacts, out: Path, *, exact: bool) -> Iterator[str]:
    """Yield the lines of text that describe a trace that was written to `out`.

    `exact` is true if the token counts in the trace are exact.
    """
    from loadgen.workloads.token_counter import APPROXIMATE

    requests = f"{facts.requests:,} request{'' if facts.requests == 1 else 's'}"
    sessions = f"{facts.sessions:,} session{'' if facts.sessions == 1 else 's'}"
    times = f" over {facts.span_s:,.0f} s" if facts.span_s else ", without times"
    yield f"{out}: {requests} in {sessions}{times}, from {', '.join(facts.formats)}"
    yield f"Prompts    {facts.input_tokens:,} tokens, {_sources(facts.input_lengths)}"
    yield f"Responses  {facts.output_tokens:,} tokens, {_sources(facts.output_lengths)}"
    if facts.repeated_tokens is not None:
        share = f"{facts.repeated_tokens / facts.input_tokens:.0%}"
        yield f"Shared     {share} of the prompt tokens begin like an earlier prompt (blocks of {facts.block_tokens})"
    if not exact and "estimated from the text" in {**facts.input_lengths, **facts.output_lengths}:
        yield f"Estimated lengths: {APPROXIMATE}. --tokenizer makes them exact."
    if facts.models > facts.models_kept:
        yield (
            f"Models     {facts.models - facts.models_kept} of {facts.models} names left out; --model OLD=NEW "
            "gives a model a name in the trace"
        )
    yield from (f"Left out   {reason} ({count:,})" for reason, count in facts.left_out.items())
    yield from (f"Note       {remark} ({count:,})" for remark, count in facts.remarks.items())
    yield f"Replay     loadgen run --url URL --workload sessions:{out}"


def _sources(counts: dict[str, int]) -> str:
    """Return text that says where token counts come from, such as `counts in the log`.

    `counts` contains the number of counts from each source. If there are several sources, the text contains these
    numbers.
    """
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{source} ({count:,})" for source, count in counts.items())
