"""Cases of odd surroundings: environment variables, streams, limits, folders, signals and terminals."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.endurance.hostile_judge import BURST, EITHER, MEASURED, REFUSED, USAGE, Case
from tests.endurance.hostile_server import PAYLOADS, Behaviour, events, reply

SLOW = reply(
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    *[item for payload in PAYLOADS for item in (0.4, b"%x\r\n%b\r\n" % (len(events([payload])), events([payload])))],
    b"0\r\n\r\n",
)
"""A whole answer that takes two seconds."""
ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "the locale C without UTF-8": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "a locale that does not exist": {"LC_ALL": "xx_YY.UTF-9"},
    "an encoding of output that is ASCII": {"PYTHONIOENCODING": "ascii"},
    "an encoding of output that is Latin-1": {"PYTHONIOENCODING": "latin-1"},
    "no HOME": {"HOME": None, "XDG_CACHE_HOME": None},
    "a HOME that does not exist": {"HOME": "/nonexistent", "XDG_CACHE_HOME": None},
    "a HOME that is a file": {"HOME": "/etc/hostname", "XDG_CACHE_HOME": None},
    "a cache that is a file": {"XDG_CACHE_HOME": "/etc/hostname"},
    "a cache in /proc": {"XDG_CACHE_HOME": "/proc"},
    "a TMPDIR that does not exist": {"TMPDIR": "/nonexistent"},
    "no PATH": {"PATH": None},
    "a TERM that is dumb": {"TERM": "dumb"},
    "an unknown TERM": {"TERM": "xyz-4"},
    "NO_COLOR and FORCE_COLOR": {"NO_COLOR": "1", "FORCE_COLOR": "1"},
    "FORCE_COLOR": {"FORCE_COLOR": "1"},
    "COLUMNS of 0": {"COLUMNS": "0"},
    "COLUMNS of 1": {"COLUMNS": "1"},
    "COLUMNS of -5": {"COLUMNS": "-5"},
    "COLUMNS of a million": {"COLUMNS": "1000000"},
    "COLUMNS that are not a number": {"COLUMNS": "wide"},
    "proxies that nobody should use": {
        "http_proxy": "http://127.0.0.1:1",
        "ALL_PROXY": "socks5://127.0.0.1:1",
        "no_proxy": "",
    },
    "an unknown time zone": {"TZ": "Mars/Olympus"},
    "a time zone of 99 hours": {"TZ": "A99"},
    "warnings as errors": {"PYTHONWARNINGS": "error"},
    "Python in development mode": {"PYTHONDEVMODE": "1"},
    "Python that optimises": {"PYTHONOPTIMIZE": "2"},
    "no bytecode": {"PYTHONDONTWRITEBYTECODE": "1"},
    "unbuffered output": {"PYTHONUNBUFFERED": "1"},
    "a random hash seed": {"PYTHONHASHSEED": "random"},
    "an API key with a line end": {"LOADGEN_API_KEY": "a\r\nX: b"},
    "an API key that is empty": {"LOADGEN_API_KEY": ""},
    "an API key in UTF-8": {"LOADGEN_API_KEY": "schlüssel"},
    "an API key of 100 kB": {"LOADGEN_API_KEY": "k" * 100_000},
    "an address of a server in the environment that is none": {
        "LOADGEN_OPENAI_URL": "nonsense",
        "LOADGEN_VLLM_URL": "http://",
    },
    "SSL files that do not exist": {"SSL_CERT_FILE": "/nonexistent", "SSL_CERT_DIR": "/nonexistent"},
}
SHELLS: dict[str, tuple[str, frozenset[int], bool]] = {
    "closed standard input": ('exec "$@" <&-', MEASURED, False),
    "closed standard output": ('exec "$@" >&-', MEASURED | USAGE, True),
    "closed standard error": ('exec "$@" 2>&-', MEASURED, True),
    "all streams closed": ('exec "$@" <&- >&- 2>&-', MEASURED | USAGE, True),
    "a full standard output": ('exec "$@" >/dev/full', MEASURED | USAGE, True),
    "a full standard error": ('exec "$@" 2>/dev/full', MEASURED, True),
    "both streams full": ('exec "$@" >/dev/full 2>&1', MEASURED | USAGE, True),
    "a reader that leaves at once": ('"$@" | true; exit "${PIPESTATUS[0]}"', MEASURED, True),
    "a reader of one line": ('"$@" | head -n 1; exit "${PIPESTATUS[0]}"', MEASURED, True),
    "a reader of one byte of both streams": ('"$@" 2>&1 | head -c 1; exit "${PIPESTATUS[0]}"', MEASURED, True),
    "a reader that never reads": ('"$@" | sleep 5; exit "${PIPESTATUS[0]}"', MEASURED, True),
    "standard input from an endless device": ('exec "$@" </dev/zero', MEASURED, False),
    "10 open files": ('ulimit -n 10; exec "$@"', MEASURED | USAGE | {3, 5}, False),
    "24 open files": ('ulimit -n 24; exec "$@"', MEASURED | USAGE | {3, 5}, False),
    "files of at most 1 kB": ('ulimit -f 1; exec "$@"', MEASURED | USAGE, False),
    "no files at all": ('ulimit -f 0; exec "$@"', MEASURED | USAGE, False),
    "no core files and a small stack": ('ulimit -c 0; ulimit -s 512; exec "$@"', MEASURED, False),
    "a folder that was removed": ('mkdir gone; cd gone; rmdir ../gone; exec "$@"', MEASURED | USAGE, False),
    "a folder that cannot be written": ('mkdir ro; chmod 500 ro; cd ro; exec "$@"', MEASURED | USAGE, False),
    "a mask that forbids everything": ('umask 777; exec "$@"', MEASURED | USAGE, False),
    "ignored interrupts": ("trap '' INT TERM HUP; exec \"$@\"", MEASURED, False),
    "the lowest priority": ('exec nice -n 19 "$@"', MEASURED, False),
    "one CPU": ('exec taskset -c 0 "$@"', MEASURED, False),
    "no /proc": ('exec unshare -m sh -c \'mount -t tmpfs t /proc && exec "$@"\' sh "$@"', MEASURED, False),
    "no /sys": ('exec unshare -m sh -c \'mount -t tmpfs t /sys && exec "$@"\' sh "$@"', MEASURED, False),
    "no /dev/shm": ('exec unshare -m sh -c \'umount /dev/shm; exec "$@"\' sh "$@"', MEASURED | USAGE, False),
    "a /tmp that is read-only": (
        'exec unshare -m sh -c \'mount -t tmpfs -o ro t /tmp; exec "$@"\' sh "$@"',
        MEASURED | USAGE | {1, 3},
        False,
    ),
    "a user without a name": ('exec setpriv --reuid 54321 --clear-groups "$@"', MEASURED | USAGE, False),
    "no capabilities": ('exec setpriv --bounding-set -all --inh-caps -all "$@"', MEASURED, False),
    "a terminal of width 1": ('exec script -qec "stty cols 1; $*" /dev/null', MEASURED, False),
    "a terminal of width 0": ('exec script -qec "stty cols 0 rows 0; $*" /dev/null', MEASURED, False),
}
"""By name: a script for bash, exit codes, and whether messages cannot be expected."""


def surroundings(seed: str) -> Iterator[Case]:
    """Yield every case. `seed` decides when signals are sent."""
    for name, environment in ENVIRONMENTS.items():
        yield Case(f"environment: {name}", BURST, EITHER | REFUSED, server=Behaviour(), environment=environment)
    for name, (script, codes, silent) in SHELLS.items():
        wrapper = ("bash", "-c", script, "bash")
        yield Case(f"shell: {name}", BURST, codes, server=Behaviour(), wrapper=wrapper, silent=silent)
    random = Random(seed)
    for number in range(12):
        after_s = random.uniform(0.3, 3.0)
        yield Case(
            f"interrupt after {after_s:.2f} s ({number})",
            BURST,
            MEASURED | {130, -2},
            server=Behaviour(SLOW),
            interrupt_after_s=after_s,
        )
    for words in (("--help",), ("run", "--help"), ("--version",), ("limits", "--gpu", "H100", "--model", "llama-2-7b")):
        for name, script in {
            "a full output": 'exec "$@" >/dev/full',
            "no reader": '"$@" | true; exit "${PIPESTATUS[0]}"',
            "closed": 'exec "$@" >&-',
        }.items():
            yield Case(
                f"{' '.join(words)}: {name}",
                words,
                frozenset({0, 2}),
                wrapper=("bash", "-c", script, "bash"),
                silent=True,
            )
