"""Runs one hostile case as a real command, and lists every promise that the command broke."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from loadgen.analysis.run import runfile
from loadgen.analysis.run.errors import RunFileError
from loadgen.analysis.run.record import Record
from tests.endurance.hostile_server import SECRET, Behaviour, Log, serving

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
"""Longest time of a case. A command that needs longer is interrupted, and the case is lost."""
ALL, NONE, ANY = "all", "none", "any"
"""How many requests of a run must be complete."""
USAGE, SERVER = frozenset({2}), frozenset({3})
MEASURED = frozenset({0, 5})
FAILED = frozenset({1})
EITHER = MEASURED | FAILED
REFUSED = USAGE | SERVER
SENT, TOKENS = 4, 3
"""Requests and output tokens per request of a case, unless its words change them."""
BURST = (
    "burst",
    "--url",
    "{url}",
    "--n",
    "4",
    "--input-tokens",
    "8",
    "--output-tokens",
    "3",
    "--timeout",
    "4",
    "--no-report",
)


@dataclass(frozen=True)
class Case:
    """One command in hostile conditions, and what must hold afterwards."""

    name: str
    words: tuple[str, ...] = BURST
    """The arguments of `loadgen`. `{url}` and `{folder}` are replaced."""
    codes: frozenset[int] = MEASURED
    complete: str = ANY
    says: str = ""
    """A regular expression that the output must match."""
    server: Behaviour | None = None
    prepare: Callable[[Path], None] | None = None
    """Makes the files of the case in its folder."""
    wrapper: tuple[str, ...] = ()
    """Words before the command, such as `sh -c 'exec "$0" "$@"'`."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables to set. None removes the variable."""
    interrupt_after_s: float | None = None
    """Time after which SIGINT is sent, for commands that run until they are interrupted."""
    silent: bool = False
    """The case takes the streams away, so that no message can be expected."""


@dataclass
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str
    ended: bool
    left: list[str]
    """Command lines of the processes that outlived the command."""


def judge(case: Case) -> tuple[Outcome, list[str]]:
    """Run a case. Return the outcome and the broken promises."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        log = stack.enter_context(serving(case.server)) if case.server else Log()
        if case.prepare:
            case.prepare(folder)
        outcome = _run(case, folder, log.url)
        lost = [*_complaints(case, outcome), *_secrets(outcome, folder)]
        runs = [path.parent for path in folder.rglob("run.jsonl") if path.is_file()]
        if len(runs) == 1 and case.server:
            lost += _accounts(case, outcome, runs[0], log)
        elif log.received and case.server and not runs:
            lost.append(f"{len(log.received)} requests were received, and there is no run")
        for path in folder.rglob("*"):  # so that the folder can be removed
            with contextlib.suppress(OSError):
                path.chmod(0o700, follow_symlinks=False) if path.is_dir() and not path.is_symlink() else None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
    return outcome, lost


def _run(case: Case, folder: Path, url: str) -> Outcome:
    words = [word.replace("{url}", url).replace("{folder}", str(folder)) for word in case.words]
    if words[0] in ("burst", "run") and "--out" not in words and "--repeats" not in words:
        words += ["--out", str(folder / "run")]
    given = {"PYTHONPATH": str(ROOT), "LOADGEN_API_KEY": SECRET, "XDG_CACHE_HOME": str(folder / "cache")}
    environment = {**os.environ, **given, **case.environment}
    command = [*case.wrapper, sys.executable, "-m", "loadgen", *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={key: value for key, value in environment.items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    ended = True
    try:
        if case.interrupt_after_s is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(case.interrupt_after_s)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        ended = False
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
    left = _survivors(process.pid)
    return Outcome(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), ended, left)


def _survivors(session: int) -> list[str]:
    """Wait until the processes of a session have ended. Return the command lines of those that do not end."""
    deadline_s = time.monotonic() + 10
    while True:
        alive = [*_members(session)]
        if not alive:
            return []
        if time.monotonic() > deadline_s:
            lines = []
            for pid in alive:
                with contextlib.suppress(OSError):
                    lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
                    os.kill(pid, signal.SIGKILL)
            return lines
        time.sleep(0.02)


def _members(session: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, member_of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(member_of) == session and state != "Z":
                    yield int(entry.name)


def _complaints(case: Case, outcome: Outcome) -> Iterator[str]:
    """Yield what is wrong with exit code and text."""
    both = outcome.out + outcome.err
    if not outcome.ended:
        yield f"it did not end within {LIMIT_S:g} s"
    if "Traceback" in both:
        yield f"traceback: {both[-1500:]}"
    if outcome.code not in case.codes:
        yield f"exit code {outcome.code}, expected {sorted(case.codes)}: {both[-700:]}"
    if case.says and not re.search(case.says, both):
        yield f"the output does not match {case.says!r}: {both[-700:]}"
    if outcome.left:
        yield f"left running: {outcome.left}"
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f\x9b\u202a-\u202e\u2066-\u2069]", both):
        yield f"control characters in the output: {both[-700:]!r}"
    if outcome.code in REFUSED and not case.silent and not _is_sentence(outcome.err):
        yield f"the message does not say what is wrong and what to do: {outcome.err!r}"


def _is_sentence(err: str) -> bool:
    """Return True if the last message has a hint, or is an answer of the option parser."""
    lines = err.strip().splitlines()
    named = [line for line in lines if line.startswith("loadgen: ") or "Error" in line or line.startswith("loadgen ")]
    return bool(named) and len(lines[-1]) > 12


def _secrets(outcome: Outcome, folder: Path) -> Iterator[str]:
    """Yield where the API key was written."""
    if SECRET in outcome.out + outcome.err:
        yield "the API key is in the output"
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26:
                content = path.read_bytes()
                if SECRET.encode() in content and path.name not in ("plan.toml",):
                    yield f"the API key is in {path.relative_to(folder)}"


def _accounts(case: Case, outcome: Outcome, folder: Path, log: Log) -> Iterator[str]:
    """Yield what does not add up between the run, its summary, the printed text and the server's log."""
    try:
        run = runfile.read(folder)
    except RunFileError as error:
        if outcome.code not in USAGE:  # a command that could not write its files says so
            yield f"the run cannot be read: {error}"
        return
    records = [record for record in run.records if record.id >= 0]  # warm-up requests have negative ids
    ids = sorted(record.id for record in records)
    planned = run.header.plan.get("n") if isinstance(run.header.plan, dict) else None
    if planned and ids != [*range(planned)]:
        yield f"{planned} requests, but records of {ids[:20]}"
    if len(set(log.received) - set(ids)) > 0:
        yield f"the server received {sorted(set(log.received) - set(ids))}, which have no record"
    complete = [record for record in records if record.state == "complete"]
    if case.complete == ALL and len(complete) != len(ids):
        yield f"only {len(complete)} of {len(ids)} complete: {[r.error_detail for r in records if r.error_detail][:2]}"
    if case.complete == NONE and complete:
        yield f"{len(complete)} requests are called complete"
    if any(record.output_tokens != record.output_tokens_asked for record in complete):
        yield f"complete with {[record.output_tokens for record in complete]} output tokens"
    yield from _reasons_and_instants(run, records, log)
    yield from _summary(outcome, folder, len(ids), len(complete))


def _summary(outcome: Outcome, folder: Path, recorded: int, complete: int) -> Iterator[str]:
    """Yield where the files and the text disagree with the numbers of recorded and of complete requests."""
    left = [path.name for path in folder.iterdir() if path.name.startswith((".", "part")) or path.suffix == ".tmp"]
    if left:
        yield f"half-written files: {left}"
    summary_file = folder / "summary.json"
    if not summary_file.exists():
        yield f"there is a run, but no summary: {outcome.err[-500:]}"
        return
    counts = msgspec.json.decode(summary_file.read_bytes())["requests"]
    states = ("complete", "truncated", "failed", "rejected", "dropped", "unrecorded")
    if counts["complete"] != complete or sum(counts.get(state, 0) for state in states) != recorded:
        yield f"the summary counts {counts}, the run has {recorded} records"
    said = re.search(r"([\d,]+) of ([\d,]+) complete", outcome.out)
    if said and int(said[1].replace(",", "")) != complete:
        yield f"the output says {said[0]!r}, the run has {complete}"
    if outcome.code in MEASURED and complete != recorded:
        yield f"exit code {outcome.code} with {complete} of {recorded} complete"


def _reasons_and_instants(run: runfile.Run, records: list[Record], log: Log) -> Iterator[str]:
    """Yield failures without a reason, and first bytes that arrived at an impossible instant by the server's log."""
    for record in records:
        if record.state != "complete" and not record.error_detail:
            yield f"request {record.id} is {record.state} without a reason"
        sent = log.first_byte_ns.get(record.id)
        if sent and record.first_byte_ns is not None and record.reopened == 0:
            at_ns = run.header.start_ns + record.first_byte_ns
            if not sent[0] - 1_000_000 <= at_ns <= sent[1] + 2_000_000_000:
                yield f"the first byte of {record.id} was sent at {sent} and is said to have arrived at {at_ns}"
