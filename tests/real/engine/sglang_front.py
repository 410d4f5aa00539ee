"""SGLang's own HTTP layer, tokenizer, scheduler and detokenizer, with a forward pass of known duration.

    LD_LIBRARY_PATH=.engine/sglang/stub .engine/sglang/bin/python tests/real/engine/sglang_front.py \\
        --model-path .engine/model --port P --token-log FILE ...

Takes SGLang's own options, and `--token-log FILE`. Replaced is only the model's forward pass: a prefill takes
PREFILL_S_PER_TOKEN per new prompt token, a decode step takes DECODE_STEP_S, and the tokens are random. Requests with
log probabilities, a grammar or a logit bias still run the real model.

The token log has one JSON line per finished request: `id`, `prompt_tokens`, `output_tokens`, `cached_tokens`, and
`token_s`, the Unix time in seconds at which the scheduler handed each output token to the detokenizer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

PREFILL_S_PER_TOKEN = 20e-6
DECODE_STEP_S = 10e-3
RANDOM_TOKENS = (300, 2000)
"""Range of the random token ids: whole words of the model's vocabulary, no special tokens."""


class TimedForward:
    """Replaces TpModelWorker.forward_batch_generation by a pause and random tokens."""

    def __init__(self, real: Any, result_type: Any) -> None:
        self.real = real
        self.result_type = result_type
        self.last_end = 0.0

    def __call__(self, worker: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        if needs_the_model(batch):
            return self.real(worker, batch, *arguments, **options)
        import torch
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        start = time.perf_counter()
        if batch.forward_mode.is_extend():
            end = start + PREFILL_S_PER_TOKEN * batch.extend_num_tokens
        elif 0 < start - self.last_end < DECODE_STEP_S:
            # On a GPU, the scheduler's own work overlaps with the step before. So a step that follows another one at
            # once lasts DECODE_STEP_S from the end of that step.
            end = max(start, self.last_end + DECODE_STEP_S)
        else:
            end = start + DECODE_STEP_S
        tokens = torch.randint(*RANDOM_TOKENS, (len(batch.reqs),), dtype=torch.int64)
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        self.last_end = time.perf_counter()
        return self.result_type(logits_output=LogitsProcessorOutput(next_token_logits=None), next_token_ids=tokens)


def needs_the_model(batch: Any) -> bool:
    sampling = batch.sampling_info
    restricted = sampling is not None and (sampling.grammars is not None or sampling.logit_bias is not None)
    return bool(batch.return_logprob or restricted)


class TokenLog:
    """Wraps SchedulerOutputStreamer.stream_output and logs the time of every output token."""

    def __init__(self, real: Any, path: str) -> None:
        self.real = real
        self.file = Path(path).open("a", buffering=1)  # noqa: SIM115 -- open until the process ends
        self.token_s: dict[str, list[float]] = {}

    def __call__(self, streamer: Any, requests: Any, *arguments: Any, **options: Any) -> Any:
        now = time.time()
        for request in requests:
            if request is not None:
                self.note(request, now)
        return self.real(streamer, requests, *arguments, **options)

    def note(self, request: Any, now: float) -> None:
        times = self.token_s.setdefault(request.rid, [])
        times.extend([now] * (len(request.output_ids) - len(times)))
        if not request.finished():
            return
        del self.token_s[request.rid]
        line = {
            "id": request.rid,
            "prompt_tokens": len(request.origin_input_ids),
            "output_tokens": len(request.output_ids),
            "cached_tokens": request.cached_tokens,
            "token_s": times,
        }
        self.file.write(json.dumps(line) + "\n")


def run_scheduler(token_log: str, *arguments: Any, **options: Any) -> Any:
    """Run SGLang's scheduler process with the timed forward pass and the token log."""
    from sglang.srt.managers import tp_worker
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.managers.scheduler_components import output_streamer

    # Functions, because a callable object in a class would not receive the instance.
    timed = TimedForward(tp_worker.TpModelWorker.forward_batch_generation, tp_worker.GenerationBatchResult)

    def forward_batch_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        return timed(self, *args, **kwargs)

    tp_worker.TpModelWorker.forward_batch_generation = forward_batch_generation
    if token_log:
        log = TokenLog(output_streamer.SchedulerOutputStreamer.stream_output, token_log)

        def stream_output(self: Any, *args: Any, **kwargs: Any) -> Any:
            return log(self, *args, **kwargs)

        output_streamer.SchedulerOutputStreamer.stream_output = stream_output
    return run_scheduler_process(*arguments, **options)


def main() -> None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    arguments, token_log = sys.argv[1:], ""
    if "--token-log" in arguments:
        index = arguments.index("--token-log")
        token_log = arguments[index + 1]
        del arguments[index : index + 2]
    load_plugins()
    try:
        launch_server(prepare_server_args(arguments), run_scheduler_process_func=partial(run_scheduler, token_log))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
