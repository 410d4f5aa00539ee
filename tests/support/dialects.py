"""Every dialect of every server kind, by (server, endpoint): those that generate tokens, and the others."""

from __future__ import annotations

from loadgen.servers.backends import BACKENDS

EVERY = {(kind.name, endpoint): dialect for kind in BACKENDS.values() for endpoint, dialect in kind.dialects.items()}
DIALECTS = {key: dialect for key, dialect in EVERY.items() if dialect.streams}
POOLING = {key: dialect for key, dialect in EVERY.items() if not dialect.streams}
