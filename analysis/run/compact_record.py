"""A Record whose chunks are still JSON text. Readers of large runs convert this text to arrays block by block."""

from __future__ import annotations

import msgspec
from msgspec.structs import fields

from loadgen.analysis.run.record import Integer, Record, Tokens

EMPTY_LIST = msgspec.Raw(b"[]")
_INSTANTS = msgspec.json.Decoder(list[Integer])
_TOKENS = msgspec.json.Decoder(list[Tokens])


class CompactRecord(Record, tag_field="type", tag="request", kw_only=True, omit_defaults=True, gc=False):
    """A Record whose chunk times and token counts per chunk are still JSON text.

    The text is well-formed JSON, but may still contain values other than integers. A Record with a Python integer per
    chunk would be much slower to read: creating the integers takes most of the time of reading a run.
    """

    chunk_ns: msgspec.Raw = EMPTY_LIST  # type: ignore[assignment]
    chunk_tokens: msgspec.Raw = EMPTY_LIST  # type: ignore[assignment]

    def expanded(self) -> Record:
        """Return the Record, with its chunk times and its token counts decoded from JSON text to lists of integers.

        Raises msgspec.ValidationError if one of these texts is not a list of integers.
        """
        values = {name: getattr(self, name) for name in _OTHER_FIELDS}
        return Record(
            **values, chunk_ns=_INSTANTS.decode(self.chunk_ns), chunk_tokens=_TOKENS.decode(self.chunk_tokens)
        )


_OTHER_FIELDS = [field.name for field in fields(Record) if field.name not in ("chunk_ns", "chunk_tokens")]
