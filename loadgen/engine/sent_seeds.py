"""Remembers which seeds were sent to which server, in a file in the user's cache folder.

Two runs with the same seed send the same prompts, so the server may have the prompts of the second run in its prefix
cache. The report of the second run then mentions the first run, unless the file cannot be read.

The file contains a hash of each combination of URL, model and seed, and the time of the last run with this combination.
It contains no addresses and no secrets.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from loadgen.machine import cache_folder
from loadgen.servers.errors import DECODE_ERRORS

FILE_BYTES = 1 << 20
MAX_SEEDS = 2_000
"""Maximum number of stored pairs of server and seed. The oldest ones are removed."""


def note_seed(url: str, model: str, seed: int) -> str:
    """Record that a run is about to send the prompts generated from `seed` to the server at `url`.

    If an earlier run has already sent these prompts for this `model` to this server, return the time of that run (RFC
    3339, UTC). Otherwise return an empty string. Only runs of the same user on this machine are known.
    """
    key = hashlib.sha256(msgspec.json.encode([url, model, seed])).hexdigest()[:32]
    with suppress(OSError):
        file = cache_folder() / "sent-seeds.json"
        times: dict[str, str] = {}
        with suppress(OSError, *DECODE_ERRORS), file.open("rb") as stored:
            times = msgspec.json.decode(stored.read(FILE_BYTES), type=dict[str, str])
        before = times.pop(key, "")
        times[key] = datetime.now(UTC).isoformat(timespec="seconds")
        newest = dict(list(times.items())[-MAX_SEEDS:])
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(newest))
        temporary.replace(file)  # atomic: a run that starts now reads either the old or the new file
        return before
    return ""
