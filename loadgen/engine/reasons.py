"""Why a request was not sent: the words of its Record."""

from __future__ import annotations

import os
import ssl

from loadgen.record import Record
from workloads.sessions import TRANSCRIPT_LIMIT

NOT_SENT = ("cancelled", "not sent, the run was interrupted")
"""Error kind and detail."""


def no_connection(error: OSError | TimeoutError) -> str:
    """In the system's words: asyncio's own would name the address instead of the cause."""
    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or error}"
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def no_further_turn(record: Record) -> str:
    """Why the turns of a session after this one are not sent."""
    if record.state == "complete":
        return f"not sent, the session had grown past {TRANSCRIPT_LIMIT:,} characters"
    return f"not sent, turn {record.turn} of its session was {record.state} ({record.error_kind})"
