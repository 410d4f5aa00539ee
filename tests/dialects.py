"""Every dialect of every server kind, by (server, endpoint)."""

from __future__ import annotations

from servers.kinds import KINDS

DIALECTS = {(kind.name, endpoint): dialect for kind in KINDS.values() for endpoint, dialect in kind.dialects.items()}
