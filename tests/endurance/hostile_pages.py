"""Cases of servers whose pages outside the load are odd: models, versions, token counts, metrics, TLS and addresses."""

from __future__ import annotations

import gzip
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import trustme

from tests.endurance.hostile_judge import ALL, BURST, EITHER, MEASURED, REFUSED, SERVER, Case
from tests.endurance.hostile_server import (
    CLOSE,
    HANG,
    MODELS,
    RESET,
    SECRET,
    VLLM_PAGES,
    Behaviour,
    Reply,
    page,
    reply,
)

CARD = {"id": "m", "object": "model", "owned_by": "someone"}
LIST = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"x"}]}'
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

MODEL_LISTS: dict[str, Reply] = {
    "an empty list": page([]),
    "null": page(None),
    "an empty object": page({}),
    "data of null": page({"data": None}),
    "data without models": page({"object": "list", "data": []}),
    "data as an object": page({"data": {"m": {}}}),
    "data as text": page({"data": "m"}),
    "names alone": page({"data": ["m", "n"]}),
    "a list of names": page(["m", "n"]),
    "a list of cards": page([CARD]),
    "a card of null": page({"data": [None, CARD]}),
    "a card without a name": page({"data": [{}]}),
    "a name of null": page({"data": [{"id": None}]}),
    "a name that is a number": page({"data": [{"id": 7}]}),
    "a name that is a list": page({"data": [{"id": ["m"]}]}),
    "an empty name": page({"data": [{"id": ""}]}),
    "a name of white space": page({"data": [{"id": " \n"}]}),
    "a name with line ends and escapes": page({"data": [{"id": "m\r\nX: y\x1b[2J\u202e"}]}),
    "a name with half a surrogate pair": page(b'{"data":[{"id":"\\ud800"}]}'),
    "a name of 100 kB": page({"data": [{"id": "m" * 100_000}]}),
    "a name with slashes and dots": page({"data": [{"id": "../../etc/passwd"}]}),
    "the API key as a name": page({"data": [{"id": SECRET}]}),
    "models in models": page({"models": [{"name": "m"}]}),
    "lists in lists": page({"data": [[CARD]]}),
    "data in data": page({"data": {"data": [CARD]}}),
    "the field data twice": page(b'{"data":[],"data":[{"id":"m"}]}'),
    "5,000 models": page({"data": [{"id": f"m{index}"} for index in range(5_000)]}),
    "nested 100,000 deep": page(b'{"data":' + b"[" * 100_000),
    "NaN as a limit": page(b'{"data":[{"id":"m","max_model_len":NaN}]}'),
    "a limit of 0": page({"data": [{**CARD, "max_model_len": 0}]}),
    "a negative limit": page({"data": [{**CARD, "max_model_len": -1}]}),
    "a limit of 10^30": page({"data": [{**CARD, "max_model_len": 10**30}]}),
    "a limit as text": page({"data": [{**CARD, "max_model_len": "4096"}]}),
    "a limit with a fraction": page({"data": [{**CARD, "max_model_len": 4096.5}]}),
    "a limit of true": page({"data": [{**CARD, "max_model_len": True}]}),
    "a limit in a list": page({"data": [{**CARD, "max_model_len": [4096]}]}),
    "an owner of null": page({"data": [{"id": "m", "owned_by": None}]}),
    "an owner that is a number": page({"data": [{"id": "m", "owned_by": 3}]}),
    "a byte order mark": page(b"\xef\xbb\xbf" + LIST),
    "UTF-16": page(LIST.decode().encode("utf-16")),
    "a web page": page(b"<html><title>Welcome</title></html>", "200 OK", "Content-Type: text/html"),
    "JSON Lines": page(LIST + b"\n" + LIST),
    "gzip": page(gzip.compress(LIST), "200 OK", "Content-Encoding: gzip"),
    "gzip without saying so": page(gzip.compress(LIST)),
    "gzip that is cut off": page(gzip.compress(LIST)[:30], "200 OK", "Content-Encoding: gzip"),
    "gzip that grows to a gigabyte": page(gzip.compress(b" " * (1 << 30), 1), "200 OK", "Content-Encoding: gzip"),
    "brotli": page(b"\x1b\x0e", "200 OK", "Content-Encoding: br"),
    "a byte at a time": reply(JSON + b"Content-Length: %d\r\n\r\n" % len(LIST), *[bytes([byte]) for byte in LIST]),
    "no length, then FIN": reply(JSON + b"\r\n" + LIST, ending=CLOSE),
    "no length, then silence": reply(JSON + b"\r\n" + LIST, ending=HANG),
    "a length that is too large": reply(JSON + b"Content-Length: 9999\r\n\r\n" + LIST, ending=CLOSE),
    "a length that is too small": reply(JSON + b"Content-Length: 9\r\n\r\n" + LIST),
    "a length that is negative": reply(JSON + b"Content-Length: -5\r\n\r\n" + LIST, ending=CLOSE),
    "a length that is not a number": reply(JSON + b"Content-Length: many\r\n\r\n" + LIST, ending=CLOSE),
    "200 headers": reply(JSON + b"X-Flood: a\r\n" * 200 + b"Content-Length: %d\r\n\r\n" % len(LIST) + LIST),
    "early hints": reply(b"HTTP/1.1 103 Early Hints\r\n\r\n" + JSON + b"Content-Length: %d\r\n\r\n" % len(LIST) + LIST),
    "HTTP/1.0": reply(b"HTTP/1.0 200 OK\r\n\r\n" + LIST, ending=CLOSE),
    "HTTP/0.9": reply(LIST, ending=CLOSE),
    "HTTP/2": reply(b"\0\0\x12\x04\0\0\0\0\0" + b"\0" * 18, ending=CLOSE),
    "a reset": reply(ending=RESET),
    "a reset within the body": reply(JSON + b"Content-Length: 99\r\n\r\n" + LIST[:20], ending=RESET),
    "silence": reply(ending=HANG),
    "TLS": reply(b"\x15\x03\x01\0\2\2\x16", ending=CLOSE),
    "a redirect to another host": page(b"", "301 Moved", "Location: http://other.invalid/v1/models"),
    "401 with a challenge": page(b"", "401 Unauthorized", "WWW-Authenticate: Bearer"),
    "403 in HTML": page(b"<html><h1>Forbidden</h1></html>", "403 Forbidden"),
    "500 with a traceback": page(b"Traceback of the server: KeyError", "500 Oh"),
    "503 with Retry-After 0": page(b"", "503 Busy", "Retry-After: 0"),
    "204": page(b"", "204 No Content"),
    "999": page(b"", "999 Odd"),
}
COUNTS: dict[str, object] = {
    "null": None,
    "a list": [],
    "an empty object": {},
    "a count of null": {"count": None},
    "a negative count": {"count": -1},
    "a count of 0": {"count": 0},
    "a count as text": {"count": "8"},
    "a count with a fraction": {"count": 8.5},
    "a count of true": {"count": True},
    "a count of 10^30": {"count": 10**30},
    "a count in a list": {"count": [8]},
    "tokens of null": {"count": 8, "tokens": None},
    "tokens as text": {"count": 8, "tokens": "x"},
    "tokens as names": {"count": 1, "tokens": ["a"]},
    "negative tokens": {"count": 1, "tokens": [-1]},
    "no tokens": {"count": 0, "tokens": []},
    "tokens of 10^30": {"count": 1, "tokens": [10**30]},
    "always one token": {"count": 1, "tokens": [1]},
    "an error": {"error": {"message": "boom"}},
    "token strings": {"count": 2, "tokens": [1, 2], "token_strs": ["a", None]},
}
VERSIONS: dict[str, object] = {
    "null": None,
    "a list": [],
    "text": "0.11.0",
    "a version of null": {"version": None},
    "a version that is a number": {"version": 0.11},
    "an empty version": {"version": ""},
    "a version of 100 kB": {"version": "9" * 100_000},
    "a version of digits that are not ASCII": {"version": "\u0660.\u0661\u0661"},
    "a version of huge numbers": {"version": "9" * 5_000 + ".1"},
    "a version in a list": {"version": ["0.11.0"]},
    "a development version": {"version": "0.11.1.dev3+g12.d20260101"},
    "a version with escapes": {"version": "0.11\x1b[2J"},
}
METRICS: dict[str, bytes] = {
    "an empty page": b"",
    "binary": bytes(range(256)) * 9,
    "JSON": b'{"a": 1}',
    "a web page": b"<html>",
    "comments only": b"# HELP x y\n# TYPE x gauge\n",
    "NaN and infinities": b"vllm:num_requests_running NaN\nvllm:generation_tokens_total -Inf\n",
    "negative counters": b"vllm:generation_tokens_total -5\nvllm:prompt_tokens_total -1e300\n",
    "no line end": b"vllm:num_requests_running 1",
    "a value past any number": b"vllm:num_requests_running 1e999\n",
    "a value of 5,000 digits": b"vllm:num_requests_running " + b"9" * 5_000 + b"\n",
    "labels that never close": b'vllm:num_requests_running{model="m 1\n',
    "labels with escapes": b'vllm:num_requests_running{model="a\\"b\\n\x1b[2J"} 1\n',
    "the same line 1,000 times": b"vllm:num_requests_running 1\n" * 1_000,
    "names in UTF-8": '{"vllm:läuft"} 1\n'.encode(),
    "no value": b"vllm:num_requests_running\n",
    "timestamps": b"vllm:num_requests_running 1 99999999999999999999\n",
    "exemplars": b'vllm:x_bucket{le="1"} 1 # {trace="a"} 0.5\n# EOF\n',
    "buckets in disorder": b"".join(
        b'vllm:time_to_first_token_seconds_bucket{le="%b"} %d\n' % bucket
        for bucket in ((b"+Inf", 1), (b"0.1", 9), (b"x", 2))
    ),
    "CR LF": b"vllm:num_requests_running 1\r\nvllm:num_requests_waiting 2\r\n",
    "UTF-16": "vllm:num_requests_running 1\n".encode("utf-16"),
    "the API key": b"# " + SECRET.encode() + b"\n",
    "hexadecimal values": b"vllm:num_requests_running 0x10\n",
    "a page of 20 MB": b"# " + b"x" * 20_000_000 + b"\n",
}
TGI_INFO: dict[str, object] = {
    "null": None,
    "a list": [],
    "an empty object": {},
    "a model of null": {"model_id": None, "version": "3.3.6"},
    "limits as text": {
        "model_id": "m",
        "version": "3.3.6",
        "max_input_tokens": "1024",
        "max_total_tokens": "2048",
        "max_concurrent_requests": "x",
    },
    "negative limits": {
        "model_id": "m",
        "version": "3.3.6",
        "max_input_tokens": -1,
        "max_total_tokens": -2,
        "max_concurrent_requests": -3,
    },
    "a version of null": {"model_id": "m", "version": None, "router": "text-generation-router"},
    "huge limits": {
        "model_id": "m",
        "version": "3.3.6",
        "max_input_tokens": 10**30,
        "max_total_tokens": 10**30,
        "max_concurrent_requests": 10**30,
        "router": "text-generation-router",
    },
    "a model that is a list": {"model_id": ["m"], "version": "3.3.6", "router": "text-generation-router"},
}


def vllm(version: object = None, count: Reply | None = None, **pages: Reply) -> Behaviour:
    """Return a server that names itself vLLM."""
    changed = {"/version": page(version)} if version is not None else {}
    counted = {"/tokenize": count} if count else {}
    return Behaviour(pages=VLLM_PAGES | changed | counted | pages)


def pages() -> Iterator[Case]:
    """Yield every case."""
    for name, answer in MODEL_LISTS.items():
        yield Case(f"models: {name}", BURST, EITHER | REFUSED, server=Behaviour(pages={"/v1/models": answer}))
    named = (*BURST, "--model", "m")
    for name in (
        "null",
        "names alone",
        "a card without a name",
        "silence",
        "500 with a traceback",
        "a redirect to another host",
    ):
        yield Case(
            f"models with --model: {name}",
            named,
            EITHER | REFUSED,
            server=Behaviour(pages={"/v1/models": MODEL_LISTS[name]}),
        )
    for name, value in COUNTS.items():
        yield Case(f"token counts: {name}", BURST, EITHER | REFUSED, server=vllm(count=page(value)))
    for name, answer in {
        "500": page(b"", "500 Oh"),
        "a web page": page(b"<html>"),
        "404": page(b"", "404 No"),
        "a reset": reply(ending=RESET),
        "silence": reply(ending=HANG),
        "429": page(b"", "429 Busy"),
        "401": page(b"", "401 No"),
    }.items():
        yield Case(f"token counts: {name}", BURST, EITHER | REFUSED, server=vllm(count=answer))
    for name, value in VERSIONS.items():
        yield Case(f"version: {name}", BURST, EITHER | REFUSED, server=vllm(version=[] if value is None else value))
    often = ("run", *BURST[1:], "--rate", "3", "--metrics-every", "1s")
    for name, content in METRICS.items():
        answer = page(content, "200 OK", "Content-Type: text/plain; version=0.0.4")
        yield Case(f"metrics: {name}", often, MEASURED, ALL, server=vllm(**{"/metrics": answer}))
    for name, answer in {
        "500": page(b"x", "500 Oh"),
        "a reset": reply(ending=RESET),
        "silence": reply(ending=HANG),
        "gzip": page(gzip.compress(b"vllm:num_requests_running 1\n"), "200 OK", "Content-Encoding: gzip"),
        "a redirect": page(b"", "302 Found", "Location: /m"),
    }.items():
        yield Case(f"metrics: {name}", often, MEASURED, ALL, server=vllm(**{"/metrics": answer}))
    for name, value in TGI_INFO.items():
        yield Case(
            f"TGI's /info: {name}",
            BURST,
            EITHER | REFUSED,
            server=Behaviour(pages={"/info": page(value), "/v1/models": MODELS}),
        )
        yield Case(
            f"TGI's /info with --server: {name}",
            (*BURST, "--server", "tgi"),
            EITHER | REFUSED,
            server=Behaviour(pages={"/info": page(value), "/v1/models": MODELS}),
        )
    yield from _tls()
    yield from _addresses()


def _context(
    host: str = "127.0.0.1", *, expired: bool = False, newest: ssl.TLSVersion | None = None, client: bool = False
) -> ssl.SSLContext:
    """Return the TLS settings of a server."""
    authority = trustme.CA()
    until = datetime.now(UTC) - timedelta(days=1) if expired else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host, not_after=until).configure_cert(context)
    if newest:
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, newest
    if client:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _tls() -> Iterator[Case]:
    """Yield cases of certificates and versions of TLS."""
    insecure = (*BURST, "--insecure")
    yield Case("TLS: an unknown authority", BURST, SERVER, says="--ca-file", server=Behaviour(tls=_context))
    yield Case("TLS: an unknown authority, not checked", insecure, MEASURED, ALL, server=Behaviour(tls=_context))
    yield Case("TLS: an expired certificate", BURST, SERVER, server=Behaviour(tls=lambda: _context(expired=True)))
    yield Case(
        "TLS: an expired certificate, not checked",
        insecure,
        MEASURED,
        ALL,
        server=Behaviour(tls=lambda: _context(expired=True)),
    )
    yield Case("TLS: another host's certificate", BURST, SERVER, server=Behaviour(tls=lambda: _context("other.test")))
    yield Case(
        "TLS: only version 1.1", insecure, SERVER, server=Behaviour(tls=lambda: _context(newest=ssl.TLSVersion.TLSv1_1))
    )
    yield Case(
        "TLS: only version 1.2",
        insecure,
        MEASURED,
        ALL,
        server=Behaviour(tls=lambda: _context(newest=ssl.TLSVersion.TLSv1_2)),
    )
    yield Case(
        "TLS: a client certificate is required", insecure, SERVER, server=Behaviour(tls=lambda: _context(client=True))
    )
    for name, answer in {
        "closed": reply(ending=CLOSE),
        "reset": reply(ending=RESET),
        "cut off": reply(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ndata:", ending=CLOSE),
    }.items():
        yield Case(f"TLS: a response is {name}", insecure, frozenset({1}), server=Behaviour(answer, tls=_context))


def _addresses() -> Iterator[Case]:
    """Yield cases of addresses at which no server answers, and of URLs that are none."""

    def at(url: str) -> tuple[str, ...]:
        return tuple(url if word == "{url}" else word for word in BURST)

    for url in (
        "http://no-such-host.invalid:8000",
        "http://127.0.0.1:1",
        "https://127.0.0.1:1",
        "http://[::1]:1",
        "http://localhost:1",
        "http://127.1:1",
        "http://2130706433:1",
        "http://0.0.0.0:1",
    ):
        yield Case(f"address: {url}", at(url), SERVER)
    odd = (
        "",
        " ",
        "http://",
        "http:///v1",
        "http://:80",
        "http://127.0.0.1:",
        "http://127.0.0.1:0",
        "http://127.0.0.1:-1",
        "http://127.0.0.1:65536",
        "http://127.0.0.1:8.0",
        "http://127.0.0.1:٨٠",
    )
    odd += (
        "127.0.0.1",
        "localhost",
        "//127.0.0.1:1",
        "ws://127.0.0.1:1",
        "unix:///tmp/x",
        "file:///etc/passwd",
        "javascript:1",
        "http://[::1",
        "http://[g::1]:1",
        "http://[fe80::1%25lo]:1",
        "http://a..b:1",
    )
    odd += (
        f"http://user:{SECRET}@127.0.0.1:1",
        f"http://127.0.0.1:1/?api_key={SECRET}",
        "http://127.0.0.1:1/#x",
        "http://127.0.0.1:1/a b",
        "http://127.0.0.1:1/\t",
        "http://127.0.0.1:1/é",
        "http://127.0.0.1:1/%zz",
        "http://😀:1",
        "http://xn--a:1",
    )
    odd += (
        "http://" + "a" * 64 + ".com:1",
        "http://127.0.0.1:1/" + "a" * 100_000,
        "http://127.0.0.1:1,http://127.0.0.1:2",
        "HTTP://127.0.0.1:1",
        "http://-a:1",
        "http://a_b:1",
        "http://*:1",
        "http://127.0.0.1\\@x:1",
    )
    for url in odd:
        yield Case(f"URL: {url[:40]!r}".replace(SECRET[:8], "KEY"), at(url), REFUSED)
