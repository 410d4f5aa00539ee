"""Every dialect of every server kind, by (server, endpoint): those that generate tokens, and the others."""

from __future__ import annotations

from loadgen.servers.backends import KINDS

EVERY = {(kind.name, endpoint): dialect for kind in KINDS.values() for endpoint, dialect in kind.dialects.items()}
DIALECTS = {key: dialect for key, dialect in EVERY.items() if dialect.streams}
POOLING = {key: dialect for key, dialect in EVERY.items() if not dialect.streams}
