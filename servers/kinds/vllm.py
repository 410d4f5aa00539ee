"""vLLM: `/v1/completions` (native, takes token ids) and `/v1/chat/completions`. Checked on 0.2.0 to 0.33.0.

`ignore_eos` with `min_tokens` fixes the output length, `return_token_ids` (0.10.2) counts the tokens of each chunk,
which under load holds several, and `include_usage` gives the totals. Versions that do not know a field pass over it.
Stop strings are never sent: they make the server hold text back. `[DONE]` ends every answer, failed ones too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from servers.kinds.base import Dialect
from servers.kinds.errors import error_text
from servers.kinds.openai import chat_fields, completions_fields, decode, text, unless_marker
from workloads.request import Request


def _encode_completions(request: Request, model: str) -> bytes:
    return msgspec.json.encode(completions_fields(request, model) | _exact(request))


def _encode_chat(request: Request, model: str) -> bytes:
    return msgspec.json.encode(chat_fields(request, model) | _exact(request))


def _exact(request: Request) -> dict[str, Any]:
    return {
        "min_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


_decode = partial(decode, empty_is_token=unless_marker, always_done=True)

COMPLETIONS = Dialect(
    server="vllm",
    endpoint="completions",
    path="/v1/completions",
    token_ids=True,
    fixed_output=True,
    encode=_encode_completions,
    decode=_decode,
    text=text,
    error_text=error_text,
)
CHAT = Dialect(
    server="vllm",
    endpoint="chat",
    path="/v1/chat/completions",
    token_ids=False,
    fixed_output=True,
    encode=_encode_chat,
    decode=_decode,
    text=text,
    error_text=error_text,
)
