"""Tables of the dialects (API formats) of all servers. The key of a table is (server, endpoint).

EVERY has all dialects, DIALECTS those that generate a requested number of tokens, POOLING those that take several
inputs, and AUDIO those with recordings or speech. STREAMED has those that stream tokens, transcripts included.
"""

from __future__ import annotations

from loadgen.servers.backends import BACKENDS, token_simulators

EVERY = {(kind.name, endpoint): dialect for kind in BACKENDS.values() for endpoint, dialect in kind.dialects.items()}
STREAMED = {key: dialect for key, dialect in EVERY.items() if dialect.streams}
DIALECTS = {key: dialect for key, dialect in EVERY.items() if dialect.has_output_length}
POOLING = {key: dialect for key, dialect in EVERY.items() if dialect.inputs in ("several", "pairs")}
AUDIO = {key: dialect for key, dialect in EVERY.items() if dialect.count_by_running is None}
STREAMING_BACKENDS = token_simulators()
"""Backends with a simulated server that generates tokens."""
