"""A Record whose chunks are still JSON text. Readers of large runs convert this text to arrays block by block."""

from __future__ import annotations

import msgspec
from msgspec.structs import fields

from loadgen.analysis.run.record import Integer, Record, Tokens

_EMPTY = msgspec.Raw(b"[]")
_INSTANTS = msgspec.json.Decoder(list[Integer])
_TOKENS = msgspec.json.Decoder(list[Tokens])


class CompactRecord(Record, tag_field="type", tag="request", kw_only=True, omit_defaults=True, gc=False):
    """A Record with the JSON text of its chunk times and of its token counts per chunk.

    The text is well-formed JSON, but its types are not checked yet. A Python integer per chunk would take most of the
    time of reading a run.
    """

    chunk_ns: msgspec.Raw = _EMPTY  # type: ignore[assignment]
    chunk_tokens: msgspec.Raw = _EMPTY  # type: ignore[assignment]

    def expanded(self) -> Record:
        """Return the Record with lists of integers. Raises msgspec.ValidationError if a list has other elements."""
        values = {name: getattr(self, name) for name in _OTHER_FIELDS}
        return Record(
            **values, chunk_ns=_INSTANTS.decode(self.chunk_ns), chunk_tokens=_TOKENS.decode(self.chunk_tokens)
        )


_OTHER_FIELDS = [field.name for field in fields(Record) if field.name not in ("chunk_ns", "chunk_tokens")]
