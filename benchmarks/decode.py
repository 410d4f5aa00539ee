"""Measures the time per event to split a response body and to decode its events, for the usual stream of each dialect.

    python benchmarks/decode.py
    python benchmarks/decode.py --tiny     # one small pass, as the tests run it

The fastest of many passes is printed, because other programs can only lengthen a pass. A client decodes while other
responses arrive. With 1000 streams at 50 events per second, at most 20 us remain for each event.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from time import perf_counter_ns

from loadgen.servers.backends import BACKENDS
from loadgen.servers.wire.sse import split_events

VLLM = (
    b'data: {"id":"cmpl-9789ecc7bb6be2ab","object":"text_completion","created":1795245662,"model":"m","choices":[{'
    b'"index":0,"text":" rilo","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[971]}]}\n\n'
)
CHAT = (
    b'data: {"id":"chatcmpl-8fcb3af09d733775","object":"chat.completion.chunk","created":1795245623,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" rilo"},"logprobs":null,"finish_reason":null}]}\n\n'
)
TGI = (
    b'data: {"index":1,"token":{"id":311,"text":" to","logprob":-0.2,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
)
LIGHTLLM = (
    b'data:{"token": {"id": 382, "text": " cu", "logprob": -1.5, "special": false, "count_output_tokens": 1, '
    b'"prompt_tokens": 4}, "generated_text": null, "finished": false, "finish_reason": null, "details": null}\n\n'
)
SGLANG = (
    b'data: {"text":" kawe","output_ids":[939],"meta_info":{"id":"fc8f1aaca41e499dbd657b3b6a9256c8",'
    b'"finish_reason":null,"prompt_tokens":4,"weight_version":"default","num_retractions":0,"queue_time":0.0003926230001525255,'
    b'"reasoning_tokens":0,"completion_tokens":1,"cached_tokens":3,"dp_rank":null}}\n\n'
)
RESPONSES = (
    b'event: response.output_text.delta\ndata: {"content_index":0,"delta":" rilo","item_id":"msg_8fcb3af09d733775",'
    b'"logprobs":[],"output_index":0,"sequence_number":7,"type":"response.output_text.delta"}\n\n'
)
MESSAGES = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
    b'"text":" rilo"}}\n\n'
)
EVENTS = {
    ("vllm", "completions"): VLLM,
    ("vllm", "chat"): CHAT,
    ("tgi", "generate"): TGI,
    ("lightllm", "generate"): LIGHTLLM,
    ("sglang", "generate"): SGLANG,
    ("openai", "chat"): CHAT,
    ("openai", "responses"): RESPONSES,
    ("openai", "messages"): MESSAGES,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="8 events, 2 passes")
    events, passes = (8, 2) if parser.parse_args(arguments).tiny else (128, 300)
    print(f"us per event, {events} events per answer, best of {passes}")
    print(f"{'dialect':<20} {'split':>7} {'with keep-alives':>17} {'decode':>7}")
    for key, event in EVENTS.items():
        body = event * events
        payloads = split_events(body)[0]
        dialect = BACKENDS[key[0]].dialects[key[1]]
        assert sum(dialect.decode(payloads).tokens) >= 1
        usual = _us_per_event(lambda body=body: split_events(body), events, passes)
        exact = _us_per_event(lambda body=b":\n\n" + body: split_events(body), events, passes)
        decode = _us_per_event(lambda dialect=dialect, payloads=payloads: dialect.decode(payloads), events, passes)
        print(f"{'/'.join(key):<20} {usual:>7.2f} {exact:>17.2f} {decode:>7.2f}")


def _us_per_event(run: Callable[[], object], events: int, passes: int) -> float:
    best = min(_ns(run) for _ in range(passes))
    return best / events / 1000


def _ns(run: Callable[[], object]) -> int:
    start = perf_counter_ns()
    run()
    return perf_counter_ns() - start


if __name__ == "__main__":
    main()
