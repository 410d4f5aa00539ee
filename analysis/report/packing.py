"""Packs large parts of a page as text. The script gunzip.js unpacks them in the browser."""

from __future__ import annotations

import base64
import gzip


def packed(content: bytes) -> str:
    """Return the content as base64-encoded gzip. The same content always gives the same text."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()
