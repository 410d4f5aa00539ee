"""Packs large parts of an HTML page as compressed text. In the browser, the script gunzip.js unpacks this text."""

from __future__ import annotations

import base64
import gzip


def packed(content: bytes) -> str:
    """Return the content as base64-encoded gzip. The same content always gives the same text."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()
