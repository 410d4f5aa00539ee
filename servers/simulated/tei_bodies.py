"""The types of TEI 1.9.3's request bodies, and the errors for bodies of the wrong type.

Source: `router/src/http/types.rs` at that tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.servers.simulated import protocol, serde
from loadgen.servers.simulated.protocol import ErrorReply, Reply
from loadgen.servers.simulated.serde import (
    AnyValue,
    BodyError,
    Boolean,
    JsonType,
    ListOf,
    Number,
    Optional,
    Struct,
    Text,
    Untagged,
)

_IDS = ListOf(Number("u32"))
_INPUT = Untagged("Input", (Text(), _IDS, ListOf(Text()), ListOf(_IDS)))
_TEXTS = ListOf(Text())
_TRUNCATE: Mapping[str, JsonType] = {"truncate": Optional(Boolean())}
EMBED = Struct(
    "EmbedRequest",
    {
        **_TRUNCATE,
        "inputs": _INPUT,
        "prompt_name": Optional(Text()),
        "normalize": Boolean(),
        "dimensions": Optional(Number("usize")),
    },
    ("inputs",),
)
OPENAI_EMBED = Struct(
    "OpenAICompatRequest",
    {
        "input": _INPUT,
        "model": Optional(Text()),
        "user": Optional(Text()),
        "encoding_format": Text(),
        "dimensions": Optional(Number("usize")),
    },
    ("input",),
)
RERANK = Struct(
    "RerankRequest",
    {**_TRUNCATE, "query": Text(), "texts": _TEXTS, "raw_scores": Boolean(), "return_text": Boolean()},
    ("query", "texts"),
)
PREDICT = Struct(
    "PredictRequest",
    {**_TRUNCATE, "inputs": Untagged("PredictInput", (Text(), _TEXTS, ListOf(_TEXTS))), "raw_scores": Boolean()},
    ("inputs",),
)
TOKENIZE = Struct(
    "TokenizeRequest",
    {
        "inputs": Untagged("TokenizeInput", (Text(), _TEXTS)),
        "add_special_tokens": Boolean(),
        "prompt_name": Optional(Text()),
    },
    ("inputs",),
)
ROUTES: Mapping[str, Struct] = {
    "/embed": EMBED,
    "/embed_all": EMBED,
    "/embed_sparse": EMBED,
    "/embeddings": OPENAI_EMBED,
    "/v1/embeddings": OPENAI_EMBED,
    "/rerank": RERANK,
    "/predict": PREDICT,
    "/tokenize": TOKENIZE,
}


def read(path: str, body: bytes | bytearray) -> Mapping[str, Any]:
    """Return the fields of a request body. Raises ErrorReply with axum's plain-text message if the body is invalid."""
    json_type = ROUTES.get(path)
    try:
        result = serde.decode(body, json_type or AnyValue())
    except BodyError as error:
        raise ErrorReply(Reply(error.text.encode(), 400 if error.syntax else 422, protocol.TEXT_TYPE)) from None
    return result if isinstance(result, dict) else {}
