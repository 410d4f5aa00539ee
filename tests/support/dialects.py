"""Tables of the dialects (API formats) of all servers. The key of a table is (server, endpoint).

EVERY has all dialects, DIALECTS those that stream tokens, and POOLING the others.
"""

from __future__ import annotations

from loadgen.servers.backends import BACKENDS, token_simulators

EVERY = {(kind.name, endpoint): dialect for kind in BACKENDS.values() for endpoint, dialect in kind.dialects.items()}
DIALECTS = {key: dialect for key, dialect in EVERY.items() if dialect.streams}
POOLING = {key: dialect for key, dialect in EVERY.items() if not dialect.streams}
STREAMING_BACKENDS = token_simulators()
"""Backends with a simulated server that generates tokens."""
