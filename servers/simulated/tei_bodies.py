"""The types of TEI 1.9.3's request bodies (source: `router/src/http/types.rs` of this version)."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.servers.simulated.serde import (
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
