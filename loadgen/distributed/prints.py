"""Digests of what workers will send: equal where prompts, model and dialect are, so no prompt has to be shipped."""

from __future__ import annotations

import hashlib
from itertools import islice

from loadgen.engine.worker import WorkerTask

REQUESTS_IN_PRINT = 2


def print_of(task: WorkerTask) -> bytes:
    """A digest of the first bodies that a worker sends: equal where prompts, model and dialect are."""
    made = hashlib.sha256()
    for request in islice(task.requests(), REQUESTS_IN_PRINT):
        made.update(task.dialect.encode(request, task.model))
    return made.digest()
