"""Remembers in the user's cache folder which seeds were sent to which server.

If a server has the prompts of a run in its prefix cache, the report can say that an earlier run sent them. The file
holds a hash of each URL and seed, and the time of the last run with them. It contains no addresses and no secrets. If
there is no usable file, only this sentence of the report is missing.
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
    """Record that a run is about to send the prompts of a seed to a server.

    Return the time (RFC 3339, UTC) at which an earlier run of this user on this machine sent the same prompts to the
    same server. Return an empty string if no such run is known.
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
