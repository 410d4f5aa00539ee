"""Builds responses of three tokens in every server's format, and the Record that loadgen makes of each response."""

from __future__ import annotations

from itertools import accumulate
from string import ascii_lowercase
from typing import Any, cast

from loadgen.analysis.run.record import Record
from loadgen.engine.client_health import Health
from loadgen.engine.clock import ClockPairs
from loadgen.engine.record_builder import build_records
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.wire.connection import READ_BYTES
from loadgen.servers.wire.http1 import ProtocolError
from loadgen.servers.wire.transport import Exchange, WireError
from loadgen.workloads.request import Request
from tests.support.dialects import EVERY

Key = tuple[str, str]
"""(server, endpoint), such as `("vllm", "chat")`."""
ASKED = 3
DONE = "[DONE]"


TYPED = ("responses", "messages")
"""Endpoints whose events have a type and whose usage comes with the end."""
_STATUSES = {"length": "incomplete", "content_filter": "incomplete", "stop": "completed", "error": "failed"}
_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal", "stop": "end_turn"}


def usage(output: int | str) -> str:
    return f'{{"choices":[],"usage":{{"prompt_tokens":5,"completion_tokens":{output}}}}}'


def chunk(key: Key, word: str, reason: str = "") -> str:
    """Return the JSON of one chunk of an OpenAI stream, with the text `word`."""
    if key[1] == "responses":
        return f'{{"type":"response.output_text.delta","delta":"{word}"}}'
    if key[1] == "messages":
        return f'{{"type":"content_block_delta","delta":{{"type":"text_delta","text":"{word}"}}}}'
    said = f'"delta":{{"content":"{word}"}}' if key[1] == "chat" else f'"text":"{word}"'
    end = f',"finish_reason":"{reason}"' if reason else ""
    return f'{{"choices":[{{{said}{end}}}]}}'


def token(key: Key, number: int | str, *, last: bool = False, total: int | str = 0, reason: str = "length") -> str:
    """Return the JSON of one token event of a native route: `/generate_stream` of TGI or LightLLM, or `/generate`."""
    if key[0] == "sglang":
        finish = f'{{"type":"{reason}"}}' if last else "null"
        count = total if last else number
        return (
            f'{{"text":"abc","meta_info":{{"prompt_tokens":5,"completion_tokens":{count},"finish_reason":{finish}}}}}'
        )
    if key[0] == "lightllm":
        counts = f'"count_output_tokens":{total if last else number},"prompt_tokens":5'
        return f'{{"token":{{{counts}}},"finished":{str(last).lower()},"finish_reason":"{reason}"}}'
    details = f'{{"finish_reason":"{reason}","generated_tokens":{total},"input_length":5}}' if last else "null"
    text = '"abc"' if last else "null"
    return f'{{"token":{{"id":{number}}},"generated_text":{text},"details":{details}}}'


def end_events(key: Key, total: int | str | None = None, reason: str = "length") -> list[str]:
    """Return the events that end a response of any endpoint but `generate`. `total` is the token count in them."""
    counts = "" if total is None else f'"input_tokens":5,"output_tokens":{total}'
    if key[1] == "responses":
        status = _STATUSES[reason]
        cause = {"length": "max_output_tokens"}.get(reason, reason)
        details = f'{{"reason":"{cause}"}}' if status == "incomplete" else "null"
        response = f'"status":"{status}","incomplete_details":{details},"usage":{{{counts}}}'
        return [f'{{"type":"response.{status}","response":{{{response}}}}}']
    if key[1] == "messages":
        stop = f'"delta":{{"stop_reason":"{_STOP_REASONS.get(reason, reason)}"}}'
        return [f'{{"type":"message_delta",{stop},"usage":{{{counts}}}}}', '{"type":"message_stop"}']
    return [*([] if total is None else [usage(total)]), DONE]


def whole(key: Key, tokens: int = ASKED, total: int | str | None = None, reason: str = "length") -> list[str]:
    """Return the events of a complete response with the given number of tokens.

    `total` is the token count that the server reports (default: the true number).
    """
    stated = tokens if total is None else total
    if key[1] in TYPED:
        return [*(chunk(key, word) for word in ascii_lowercase[:tokens]), *end_events(key, stated, reason)]
    if key[1] != "generate":
        return [*(chunk(key, word) for word in "abcdef"[:tokens]), chunk(key, "", reason), usage(stated), DONE]
    last = token(key, tokens, last=True, total=stated, reason=reason)
    end = [DONE] if key[0] == "sglang" else []
    return [*(token(key, number) for number in range(1, tokens)), last, *end]


def recorded(
    key: Key,
    *events: str,
    full_reads: bool = False,
    cut: tuple[WireError, str] | None = None,
    raw: bytes | None = None,
    asked: int = ASKED,
    dialect: Dialect | None = None,
    reads: tuple[int, ...] = (),
) -> tuple[Record, dict[str, Any]]:
    """Return the Record of a response with these events, and the health counters of its worker.

    The whole response is received in one read. If `full_reads` is True, it is received in reads of READ_BYTES. `cut`
    is the (error kind, message) with which the transport ended the response. `raw` replaces all received bytes.
    `dialect` replaces the default dialect of `key`. `reads` are the sizes of the
    first reads; one more read gets the rest.
    """
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    head = b"HTTP/1.1 200 OK\r\n\r\n" if cut else b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    exchange = Exchange(cast(Any, None), lambda _: None, sent_ns=0, sent_end_ns=1, ended_at_ns=10**9)
    exchange.parts.append(head + body if raw is None else raw)
    step = READ_BYTES if full_reads else max(1, len(exchange.raw))
    for end in [*accumulate(reads), *range(step, len(exchange.raw) + step, step)]:
        exchange.sizes.append(min(end, len(exchange.raw)))
        exchange.user_ns.append(1000 * len(exchange.sizes))
        exchange.kernel_timespecs += bytes(16)
    try:
        exchange.framing.scan(exchange.raw)
    except ProtocolError as error:
        cut = "protocol", str(error)
    if cut:
        exchange.error_kind, exchange.error_detail = cut
    health = Health()
    request = Request(0, "text", 5, asked)
    (record,) = build_records([(exchange, request)], dialect or EVERY[key], ClockPairs(), 0, health)
    return record, health.sample()


def ending(key: Key, *events: str, **more: Any) -> tuple[str, str, str]:
    """Return the state, error kind and error detail of a response with these events. Options as in `recorded`."""
    record, _ = recorded(key, *events, **more)
    return record.state, record.error_kind, record.error_detail
