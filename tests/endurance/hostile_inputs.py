"""Cases of options, input files, plan files and run folders that are odd or corrupted."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from tests.endurance.hostile_judge import BURST, EITHER, MEASURED, REFUSED, USAGE, Case
from tests.endurance.hostile_server import SECRET, Behaviour, Reply, events, reply, stream, text, usage

EVERY = EITHER | REFUSED
"""Exit codes of a case whose value may be valid, invalid, or refused by the server."""

VALUES = {
    "an empty value": "",
    "white space": " \t",
    "NaN": "nan",
    "infinity": "inf",
    "minus infinity": "-inf",
    "a negative number": "-1",
    "zero": "0",
    "a number past any type": "1e999",
    "a number of 30 digits": "9" * 30,
    "a number of 5,000 digits": "9" * 5_000,
    "digits that are not ASCII": "٣",
    "an underscore": "1_0",
    "hexadecimal": "0x10",
    "a fraction": "1.5",
    "an option": "--quiet",
    "a path": "../..",
    "an emoji": "😀",
    "a line end": "4\n5",
    "an escape sequence": "\x1b[2J",
    "a colon": ":",
    "a comma": ",",
    "an equals sign": "=",
    "a quotation mark": '"',
    "a percent sign": "%s%n",
    "a brace": "{0}",
    "a long text": "a" * 20_000,
    "half a range": "1..",
    "a wrong unit": "5 parsecs",
    "two units": "5ms ms",
    "the API key": SECRET,
}
OPTIONS = (
    "--server",
    "--endpoint",
    "--model",
    "--api-key-env",
    "--workload",
    "--input-tokens",
    "--output-tokens",
    "--seed",
    "--n",
    "--warmup",
    "--workers",
    "--timeout",
    "--repeats",
    "--extra-body",
    "--image",
    "--tokenizer",
    "--lengths",
    "--header",
    "--ca-file",
    "--speed",
    "--stamps",
    "--client-priority",
    "--metrics-every",
    "--dcgm-url",
    "--server-pid",
    "--label",
    "--platform",
    "--gpu-model",
    "--assert",
    "--confidence",
    "--inconclusive",
    "--goodput",
    "--junit",
    "--catalog",
    "--arrivals",
    "--rate",
    "--concurrency",
    "--max-in-flight",
    "--duration",
    "--window",
    "--expect-workers",
    "--bind",
    "--join-timeout",
)
VALUES_PER_OPTION = 4
CONFLICTS: dict[str, tuple[str, ...]] = {
    "two kinds of load": ("--rate", "5", "--arrivals", "burst"),
    "a rate and a pattern": ("--rate", "5", "--arrivals", "closed:2"),
    "simulated and real": ("--simulated", "--real"),
    "simulated and a URL": ("--simulated",),
    "quiet and JSON": ("--quiet", "--json"),
    "the number of requests twice": ("--n", "2", "--n", "3"),
    "the label twice": ("--label", "a", "--label", "b"),
    "a timeout of zero": ("--timeout", "0"),
    "more workers than requests": ("--workers", "64"),
    "a file that repeats without a file": ("--repeat-file",),
    "an image without chat": ("--image", "8x8", "--endpoint", "completions"),
    "a window beyond the run": ("--window", "100s..200s"),
    "a window that ends before it begins": ("--window", "5s..1s"),
    "a confidence without an objective": ("--confidence", "95%"),
    "an objective of another unit": ("--assert", "ttft.p99 < 5 tokens"),
    "an objective that contradicts itself": ("--assert", "ttft.p99 < 1ms", "--assert", "ttft.p99 > 1s"),
    "an objective of NaN": ("--assert", "ttft.p99 < nan"),
    "an objective with code": ("--assert", "__import__('os')"),
    "a header with a line end": ("--header", "X: a\r\nY: b"),
    "a header without a name": ("--header", ": a"),
    "a header that the client needs": ("--header", "Content-Length: 5"),
    "another Host": ("--header", "Host: other.test"),
    "another Transfer-Encoding": ("--header", "Transfer-Encoding: chunked"),
    "a header from an unset variable": ("--header", "X: $NO_SUCH_VARIABLE"),
    "a header in UTF-8": ("--header", "X: é😀"),
    "a header with a NUL escape": ("--header", "X: a\x7fb"),
    "a body that is a list": ("--extra-body", "[]"),
    "a body with NaN": ("--extra-body", '{"a": NaN}'),
    "a body that sets stream": ("--extra-body", '{"stream": false}'),
    "a body with a field twice": ("--extra-body", '{"a": 1, "a": 2}'),
    "a body nested 100,000 deep": ("--extra-body", '{"a":' * 20_000),
    "a body with half a surrogate pair": ("--extra-body", '{"a": "\\ud800"}'),
    "a body from a missing file": ("--extra-body", "@none.json"),
    "a body from a folder": ("--extra-body", "@/tmp"),
    "a body from an endless file": ("--extra-body", "@/dev/zero"),
    "a prompt longer than any model": ("--input-tokens", "1000000000"),
    "lengths with a negative variation": ("--input-tokens", "lognormal:mean=5,cv=-1"),
    "lengths that can never be drawn": ("--input-tokens", "exponential:mean=1e6,max=2"),
    "lengths from an endless file": ("--input-tokens", "empirical:/dev/zero"),
    "lengths from the process's own memory": ("--input-tokens", "empirical:/proc/self/mem"),
    "a process that is not there": ("--server-pid", "4194304"),
    "the folder of the system": ("--out", "/proc"),
    "a folder that is a file": ("--out", "/etc/hostname"),
    "a folder under a file": ("--out", "/etc/hostname/run"),
    "a folder with a NUL escape": ("--out", "a\x01b"),
    "a folder name of 300 characters": ("--out", "a" * 300),
    "a report that is a folder": ("--junit", "/"),
    "distributed without workers": ("--distributed",),
    "workers without distributed": ("--expect-workers", "2"),
    "a catalog entry and a workload": ("--catalog", "paper-burst", "--workload", "synthetic"),
    "more prompts than exist": ("--input-tokens", "1", "--n", "100000"),
    "too many repeats": ("--repeats", "1000000"),
}
"""By name: options that are added to a burst."""

LINES = [json.dumps({"prompt": f"Question {index} about rivers?", "output_tokens": 3}) for index in range(6)]
JSONL = ("\n".join(LINES) + "\n").encode()
SHAREGPT = json.dumps(
    [
        {
            "id": str(i),
            "conversations": [{"from": "human", "value": f"Q{i}?"}, {"from": "gpt", "value": "one two three"}],
        }
        for i in range(6)
    ]
).encode()
ALPACA = json.dumps(
    [{"instruction": f"Name {i} rivers.", "input": "", "output": "one two three"} for i in range(6)]
).encode()
CSV = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"".join(
    b"2023-11-16 18:17:0%d.0000000,8,3\n" % i for i in range(4)
)
MOONCAKE = b"".join(
    json.dumps({"timestamp": 100 * i, "input_length": 8, "output_length": 3, "hash_ids": [i]}).encode() + b"\n"
    for i in range(4)
)
LENGTHS = b"8\n9\n10\n11\n"
LOADERS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "jsonl": (JSONL, ("--workload", "jsonl:input")),
    "sharegpt": (SHAREGPT, ("--workload", "sharegpt:input")),
    "alpaca": (ALPACA, ("--workload", "alpaca:input")),
    "multi-turn": (SHAREGPT, ("--workload", "multi-turn:input")),
    "a file of any format": (JSONL, ("--workload", "./input")),
    "a trace in CSV": (CSV, ("--arrivals", "trace:input")),
    "a trace in JSON Lines": (MOONCAKE, ("--arrivals", "trace:input")),
    "lengths": (LENGTHS, ("--input-tokens", "empirical:input")),
    "a tokenizer": (b'{"model": {"type": "BPE"}}', ("--tokenizer", "input")),
    "fields of a body": (b'{"user": "x"}', ("--extra-body", "@input")),
}


def _write(change: Callable[[bytes], bytes], content: bytes, folder: Path) -> None:
    (folder / "input").write_bytes(change(content))


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "CR LF": lambda data: data.replace(b"\n", b"\r\n"),
    "CR": lambda data: data.replace(b"\n", b"\r"),
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "UTF-32": lambda data: data.decode().encode("utf-32"),
    "Latin-1": lambda data: data.replace(b"a", b"\xe4", 3),
    "NULs": lambda data: data.replace(b"1", b"\0", 2),
    "NULs at the end": lambda data: data + b"\0" * 4096,
    "gzip": gzip.compress,
    "gzip twice": lambda data: gzip.compress(gzip.compress(data)),
    "gzip that is cut off": lambda data: gzip.compress(data)[:-12],
    "gzip with rubbish behind it": lambda data: gzip.compress(data) + b"rubbish",
    "gzip with a wrong checksum": lambda data: gzip.compress(data)[:-8] + b"\1\2\3\4\5\6\7\x08",
    "half of a surrogate pair": lambda data: data.replace(b"Q", b"\\ud83d", 1),
    "fields twice": lambda data: data.replace(b'{"', b'{"prompt": 1, "value": 2, "', 1),
    "NaN": lambda data: data.replace(b": 3", b": NaN", 1).replace(b"8", b"NaN", 1),
    "a huge integer": lambda data: data.replace(b": 3", b": " + b"9" * 400, 1).replace(b"8", b"9" * 400, 1),
    "an integer of 5,000 digits": lambda data: data.replace(b": 3", b": " + b"9" * 5_000, 1).replace(
        b"8", b"9" * 5_000, 1
    ),
    "negative numbers": lambda data: data.replace(b": 3", b": -3").replace(b"8", b"-8"),
    "fractions": lambda data: data.replace(b": 3", b": 3.7").replace(b"8", b"8.5"),
    "nothing": lambda _: b"",
    "white space": lambda _: b" \n\t\n",
    "one byte": lambda _: b"{",
    "null": lambda _: b"null\n",
    "a number": lambda _: b"42\n",
    "an empty list": lambda _: b"[]\n",
    "a list of lists": lambda _: b"[[[]]]\n",
    "lists in place of text": lambda data: data.replace(b'"Q', b'["Q', 1).replace(b'?"', b'?"]', 1),
    "null in place of text": lambda _: b'{"prompt": null}\n{"instruction": null}\n',
    "a field in place of another": lambda data: (
        data.replace(b"prompt", b"text").replace(b"conversations", b"turns").replace(b"instruction", b"ask")
    ),
    "the last line cut off": lambda data: data[:-9],
    "binary": lambda _: bytes(range(256)) * 20,
    "nested 100,000 deep": lambda _: b"[" * 100_000,
    "one line of 5 MB": lambda data: data[:-1].replace(b"1", b"1" * 5_000_000, 1),
    "a web page": lambda _: b"<!doctype html><title>404</title>\n",
    "a zip archive": lambda _: b"PK\3\4" + b"\0" * 60,
    "Parquet": lambda data: b"PAR1" + data + b"PAR1",
    "a pointer of Git LFS": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "a comment first": lambda data: b"# comment\n" + data,
    "a second header": lambda data: data + data,
    "lines in reverse": lambda data: b"\n".join(reversed(data.split(b"\n"))),
}
PLACES: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "missing": lambda _: None,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a dangling link": lambda path: path.symlink_to("none"),
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a socket": lambda path: os.mknod(path, 0o140644),
}
CHANGES_PER_LOADER = 8

LONG_NAME, LOCKED = "a" * 300, "{folder}/locked/file"
PATHS: dict[str, tuple[str, ...]] = {
    "a workload": ("burst", "--workload", "{path}"),
    "a tokenizer": ("burst", "--tokenizer", "{path}"),
    "an authority": ("burst", "--ca-file", "{path}"),
    "a body": ("burst", "--extra-body", "@{path}"),
    "lengths": ("burst", "--input-tokens", "empirical:{path}"),
    "a trace": ("run", "--arrivals", "trace:{path}"),
    "a plan": ("run", "{path}"),
    "JUnit XML": ("burst", "--simulated", "--n", "1", "--junit", "{path}"),
    "a report": ("report", "{path}"),
    "a comparison": ("compare", "{path}", "{path}"),
    "an export": ("export", "{path}", "--csv", "tables"),
    "a fit": ("twin", "fit", "{path}"),
    "a matrix": ("matrix", "{path}"),
    "a twin": ("simulate", "--twin", "{path}"),
    "hardware": ("limits", "--hardware", "{path}", "--gpu", "H100", "--model", "llama-2-7b"),
    "a sweep": ("sweep", "--simulated", "--out", "{path}", "--objective", "ttft.p99 < 1s"),
}
"""By name: a command that uses a path."""
NOT_ROOT = ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all")
"""Takes away the right of root to read every folder."""


def _lock(folder: Path) -> None:
    """Make a folder with a file that only root's special rights could read."""
    (folder / "locked").mkdir()
    (folder / "locked" / "file").write_text("{}")
    (folder / "locked").chmod(0)


PLAN = 'n = 4\narrivals = "burst"\ninput_tokens = 8\noutput_tokens = 3\n'
PLANS: dict[str, bytes] = {
    "empty": b"",
    "a byte order mark": b"\xef\xbb\xbf" + PLAN.encode(),
    "CR LF": PLAN.replace("\n", "\r\n").encode(),
    "UTF-16": PLAN.encode("utf-16"),
    "not TOML": b"n: 4\n",
    "JSON": b'{"n": 4}',
    "an unknown key": PLAN.encode() + b"requestz = 1\n",
    "a key twice": PLAN.encode() + b"n = 5\n",
    "a table in place of a number": b"[n]\na = 1\n",
    "a list in place of a number": b"n = [4]\n",
    "a date in place of a number": b"n = 2026-01-01\n",
    "NaN": b"n = nan\n",
    "a negative number": b"n = -4\n",
    "a number past 64 bits": b"n = " + b"9" * 40 + b"\n",
    "a number of 5,000 digits": b"n = " + b"9" * 5_000 + b"\n",
    "true": b"n = true\n",
    "text in place of true": PLAN.encode() + b'insecure = "yes"\n',
    "nested tables": b"[a.b.c.d]\ne = 1\n",
    "nested 5,000 lists": b"n = " + b"[" * 5_000 + b"]" * 5_000,
    "a key of 2,000 parts": b".".join([b"a"] * 2_000) + b" = 1\n",
    "a NUL": PLAN.encode() + b'label = "a\0b"\n',
    "an escaped NUL": PLAN.encode() + b'label = "a\\u0000b"\n',
    "the API key in a header": PLAN.encode() + b'header = ["X-Api-Key: ' + SECRET.encode() + b'"]\n',
    "the API key in a body": PLAN.encode() + b'[extra_body]\napi_key = "' + SECRET.encode() + b'"\n',
    "2 MB": PLAN.encode() + b"# " + b"x" * 2_000_000,
    "bytes that are not UTF-8": b'label = "\xff"\n',
    "every value wrong": b'n = "x"\nseed = "y"\ntimeout_s = []\narrivals = 5\ninput_tokens = {}\n',
    "a path as arrivals": b'arrivals = "trace:/dev/zero"\n',
}

Corrupt = Callable[[Random, Path], None]


def _cut(random: Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: random.randrange(len(data))])


def _flip(random: Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(20):
        data[random.randrange(len(data))] = random.randrange(256)
    path.write_bytes(data)


def _retype(random: Random, path: Path) -> None:
    """Replace some numbers of a JSON file by values of other types."""
    pieces = path.read_text().split(":")
    for _ in range(12):
        index = random.randrange(1, len(pieces))
        head, comma, tail = pieces[index].partition(",")
        if comma and head.strip().lstrip("-").replace(".", "").isdigit():
            pieces[index] = (
                random.choice(("null", '"x"', "[]", "{}", "true", "-1", "1e300", "9" * 30, "NaN")) + comma + tail
            )
    path.write_text(":".join(pieces))


def _instead(make: Callable[[Path], object], _: Random, path: Path) -> None:
    path.unlink()
    make(path)


CORRUPTIONS: dict[str, Corrupt] = {
    "cut off at a random byte": _cut,
    "random bytes": _flip,
    "other types": _retype,
    "empty": lambda _, path: path.write_bytes(b"") and None,
    "NULs": lambda _, path: path.write_bytes(b"\0" * 5_000) and None,
    "missing": lambda _, path: path.unlink(),
    "a folder": partial(_instead, Path.mkdir),
    "a link to itself": partial(_instead, lambda path: path.symlink_to(path.name)),
    "a link to an endless device": partial(_instead, lambda path: path.symlink_to("/dev/zero")),
    "a pipe that nobody writes to": partial(_instead, os.mkfifo),
    "UTF-16": lambda _, path: path.write_bytes(path.read_text().encode("utf-16")) and None,
    "CR LF": lambda _, path: path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n")) and None,
    "a byte order mark": lambda _, path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()) and None,
    "twice in one file": lambda _, path: path.write_bytes(path.read_bytes() * 2) and None,
    "lines in reverse": lambda _, path: path.write_bytes(b"\n".join(reversed(path.read_bytes().split(b"\n")))) and None,
    "a format of the future": lambda _, path: (
        path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":99')) and None
    ),
    "other names of states": lambda _, path: (
        path.write_bytes(path.read_bytes().replace(b'"complete"', b'"perfect"')) and None
    ),
    "no server": lambda _, path: path.write_bytes(path.read_bytes().replace(b'"server":', b'"srv":')) and None,
    "instants far in the future": lambda _, path: (
        path.write_bytes(path.read_bytes().replace(b'_ns":', b'_ns":9')) and None
    ),
    "escape sequences in every name": lambda _, path: (
        path.write_bytes(path.read_bytes().replace(b'"llama', b'"\\u001b[2J\\u202ellama')) and None
    ),
    "scripts in every name": lambda _, path: (
        path.write_bytes(path.read_bytes().replace(b'"llama', b'"</script><script>alert(1)</script>')) and None
    ),
}
READERS: dict[str, tuple[str, ...]] = {
    "report": ("report", "{folder}/bad"),
    "compare": ("compare", "{folder}/good", "{folder}/bad"),
    "export": ("export", "{folder}/bad", "--csv", "{folder}/tables"),
}


class RecordedRun:
    """A finished run of a simulated server, which is made once and then copied."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def corrupted(self, file: str, corrupt: Corrupt, seed: str, folder: Path) -> None:
        """Copy the run twice into `folder`, and corrupt one file of the second copy."""
        shutil.copytree(self.folder, folder / "good")
        shutil.copytree(self.folder, folder / "bad")
        corrupt(Random(seed), folder / "bad" / file)


def _tokens_of(count: int) -> Reply:
    payloads = [text("a ")] * (count - 1) + [text("z ", "length"), usage(8, count), b"[DONE]"]
    return reply(stream(events(payloads)))


def inputs(seed: str, recorded: RecordedRun) -> Iterator[Case]:
    """Yield every case. `seed` decides which values each option and which changes each loader gets."""
    random = Random(seed)
    run = ("run", *BURST[1:])
    for option in OPTIONS:
        for name in random.sample(sorted(VALUES), VALUES_PER_OPTION):
            command = (
                run
                if option
                in ("--arrivals", "--rate", "--concurrency", "--max-in-flight", "--duration", "--window", "--catalog")
                else BURST
            )
            yield Case(
                f"option {option}: {name}", (*command, f"{option}={VALUES[name]}"), EVERY | {4, 6}, server=Behaviour()
            )
    for name, words in CONFLICTS.items():
        command = run if {"--rate", "--arrivals", "--window", "--catalog"} & {*words} else BURST
        yield Case(f"options: {name}", (*command, *words), EVERY | {4, 6}, server=Behaviour())
    for loader, (content, words) in LOADERS.items():
        command = tuple(word for word in run if loader == "lengths" or word not in ("--input-tokens", "8"))
        for name in random.sample(sorted(CHANGES), CHANGES_PER_LOADER):
            prepare = partial(_write, CHANGES[name], content)
            yield Case(f"file for {loader}: {name}", (*command, *words), EVERY, prepare=prepare, server=Behaviour())
        for name in random.sample(sorted(PLACES), 2):
            prepare_place = partial(lambda make, folder: make(folder / "input"), PLACES[name])
            yield Case(
                f"file for {loader}: {name}", (*command, *words), USAGE, prepare=prepare_place, server=Behaviour()
            )
    for name, words in PATHS.items():
        long, locked = (tuple(word.replace("{path}", path) for word in words) for path in (LONG_NAME, LOCKED))
        yield Case(f"path of {name}: too long", long, USAGE)
        yield Case(f"path of {name}: in a locked folder", locked, USAGE, prepare=_lock, wrapper=NOT_ROOT)
    yield from _plans()
    yield from _run_folders(seed, recorded)


def _plans() -> Iterator[Case]:
    """Yield cases of plan files."""
    for name, plan in PLANS.items():
        prepare_plan = partial(lambda data, folder: (folder / "plan.toml").write_bytes(data) and None, plan)
        words = ("run", "{folder}/plan.toml", "--url", "{url}", "--timeout", "4", "--no-report")
        yield Case(f"plan: {name}", words, EVERY, prepare=prepare_plan, server=Behaviour(_tokens_of(3)))


def _run_folders(seed: str, recorded: RecordedRun) -> Iterator[Case]:
    """Yield cases of run folders, for each command that reads one."""
    random = Random(seed)
    for reader, words in READERS.items():
        for name, corrupt in CORRUPTIONS.items():
            prepare_run = partial(recorded.corrupted, "run.jsonl", corrupt, f"{seed}/{reader}/{name}")
            yield Case(f"{reader} of a run file: {name}", words, MEASURED | USAGE | {1, 4, 6, 130}, prepare=prepare_run)
        for name in random.sample(sorted(CORRUPTIONS), 4):
            prepare_run = partial(recorded.corrupted, "summary.json", CORRUPTIONS[name], f"{seed}/{reader}/{name}")
            yield Case(f"{reader} of a summary: {name}", words, MEASURED | USAGE | {1, 4, 6, 130}, prepare=prepare_run)
