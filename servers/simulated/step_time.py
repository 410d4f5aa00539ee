"""Predicts the duration of an engine step on given hardware, from tables that are computed once.

    step = max(kernels, launches) + fixed + sequences * per_sequence + workers

- `kernels`: GPU time, from `loadgen.servers.hardware.inference.predict_step`. GEMM and all-reduce times depend on the
  number of tokens in the step. Attention time depends on the number of tokens that each sequence already has.
- `launches`: time to launch the kernels one by one from Python. If kernels take less time than their launches, the GPU
  waits. A CUDA graph launches all kernels of a decode step at once. Engines with CUDA graphs therefore have launch
  times only in steps with prompts (`prompt_launch_s` of the framework).
- `fixed`: time on the host per step.
- `per_sequence`: time on the host per sequence in the step.
- `workers`: time on the host to send the batch to the worker processes of tensor parallelism and to collect their
  results (`HostTime`). The GPUs wait for it. Engines with one GPU, and engines of 2024 and later, do not have it.

Under pipeline parallelism, the sequences of a step are divided into one micro-batch per stage. `kernels` is the time
that the largest micro-batch needs for all stages, and the time to send its activations from stage to stage.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from loadgen.servers.hardware.inference import Deployment, predict_step
from loadgen.servers.simulated.scheduler import Batch

# Tables by number of sequences or tokens have every size up to FINE_LIMIT, and from there every COARSE_STEP-th size.
FINE_LIMIT = 1024
COARSE_STEP = 32
MAX_SEQUENCES = 8192
MAX_TOKENS = 65_536

CONTEXT_GRID = (*range(0, 8192, 256), *range(8192, 131_073, 4096))
"""Sizes of a decoding sequence in tokens for which attention is computed. Between these sizes, the attention time is
interpolated linearly."""
CHUNK_GRID = (1, *range(16, 128, 16), *range(128, 2048, 32), *range(2048, 32_769, 256))
"""Sizes of a prompt chunk in tokens for which attention is computed. Between these sizes, the attention time is
interpolated linearly."""

# Prompt attention is linear in the number of earlier tokens and in the number of prompts. The slopes are computed at:
SAMPLE_BEFORE = 4096
SAMPLE_PROMPTS = 64

MAX_TREND_STEPS = 1 << 20
"""Number of steps that `StepDurations.decode_trend` returns if the durations stay linear for ever."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Time on the host that grows with the batch of a step.

        seconds = step_s + sequence_s * sequences + token_s * tokens

    `sequences` is the number of prompts and decoding sequences in the batch. `tokens` is the number of prompt tokens
    in the step plus the number of tokens that the decoding sequences hold.
    """

    step_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0

    def plus(self, other: HostTime, count: int) -> HostTime:
        """Return the sum of this time and `count` times the other time."""
        return HostTime(
            self.step_s + count * other.step_s,
            self.sequence_s + count * other.sequence_s,
            self.token_s + count * other.token_s,
        )


NO_TIME = HostTime()


class StepDurations(Protocol):
    """A predictor for the durations of engine steps."""

    def __call__(self, batch: Batch) -> int:
        """Return the duration of a step in ns."""
        ...

    def decode_trend(self, decoding: int, context: int) -> tuple[float, float, int]:
        """Return the durations of consecutive decode steps as three numbers: first, growth and steps.

        Step `i`, counted from 0, takes `first + i * growth` seconds. This holds for the first `steps` steps. `decoding`
        is the number of sequences, and `context` is the total number of their tokens before the first step.
        """
        ...


@dataclass(frozen=True, slots=True)
class LinearStepTime:
    """Predicts the step durations of an engine on unknown hardware with a linear model.

        step = step_s + sequence_s * sequences + token_s * prompt_tokens + context_s * context.

    All coefficients are in seconds. `sequences` is the number of prompts and decoding sequences in the step, and
    `context` is the total number of tokens of the decoding sequences.
    """

    step_s: float
    sequence_s: float
    token_s: float  # per prompt token
    context_s: float  # per token that a decoding sequence holds

    def __call__(self, batch: Batch) -> int:
        sequences = batch.prompts + batch.decoding
        if not sequences:
            return 0
        host_s = self.step_s + self.sequence_s * sequences
        return round(1e9 * (host_s + self.token_s * batch.prompt_tokens + self.context_s * batch.context))

    def decode_trend(self, decoding: int, context: int) -> tuple[float, float, int]:
        duration_s = self.step_s + self.sequence_s * decoding + self.context_s * context
        return duration_s, self.context_s * decoding, MAX_TREND_STEPS


class StepTime:
    """Predicts the step durations of a deployment from its hardware. A step is one run of the model over a batch.

    `launch_s` is the time to launch the kernels of one layer. The kernels of a layer therefore take at least
    `launch_s`. In steps with prompts, `prompt_launch_s` of the deployment replaces `launch_s` if it is larger.
    `workers` is the time to exchange the batch and its results with worker processes.
    """

    def __init__(self, deployment: Deployment, launch_s: float = 0.0, workers: HostTime = NO_TIME) -> None:
        framework = deployment.framework
        self.deployment = deployment
        self._stages = deployment.pipeline
        self._hop_s, self._hop_token_s = _hop_times(deployment)
        self._min_kernels_s = launch_s * deployment.model.layers
        self._min_prompt_kernels_s = max(launch_s, deployment.prompt_launch_s) * deployment.model.layers
        step_s, sequence_s = deployment.host_s
        self._host = HostTime(step_s, sequence_s).plus(workers, 1)
        deployment = replace(deployment, framework=replace(framework, prompt_launch_s=0.0))  # kernels alone
        sizes = _table_sizes(MAX_SEQUENCES)
        contexts = np.array(CONTEXT_GRID, float)
        deployment = replace(deployment, pipeline=1)  # the tables are those of one micro-batch
        decode = predict_step(deployment, decoding=sizes[:, None], context=contexts[None, :])
        decode_s = decode.gemm + decode.elementwise + decode.all_reduce + decode.layers
        self._decode_s: list[float] = decode_s[:, 0].tolist()
        self._groups = deployment.attention_data
        # One table for each number of attention groups among which the prompts of a step are divided: 1, 2, 4, ...
        self._prefill_s: list[list[float]] = []
        for power in range(self._groups.bit_length()):
            prefill = predict_step(deployment, 1 << power, tokens=_table_sizes(MAX_TOKENS) / (1 << power))
            prefill_s = prefill.gemm + (prefill.elementwise + prefill.all_reduce + prefill.layers)
            self._prefill_s.append(prefill_s.tolist())
        # A step with prompts computes the output head for each sequence. `_prefill_s` contains it for one sequence.
        prefill_gemm_s = prefill.gemm[: FINE_LIMIT + (MAX_SEQUENCES - FINE_LIMIT) // COARSE_STEP]
        self._heads_s: list[float] = (decode.gemm[:, 0] / framework.prefill_share - prefill_gemm_s).tolist()
        self._decode_attention_s = decode.attention
        self._attention_rows: dict[int, list[float]] = {}  # rows of `_decode_attention_s` as lists, on first use
        self._prompt_attention = _prompt_attention_tables(deployment)

    def __call__(self, batch: Batch) -> int:
        """Return the predicted duration in ns of an engine step that processes `batch`."""
        if not batch.prompts:
            return round(1e9 * self.decode_trend(batch.decoding, batch.context)[0]) if batch.decoding else 0
        sequences = batch.prompts + batch.decoding
        stages = min(self._stages, batch.prompts)  # among which the prompts are divided
        prompts = -(-batch.prompts // stages)
        prompt_tokens = -(-batch.prompt_tokens // stages)
        decoding = -(-batch.decoding // self._stages)
        power = min(self._groups, prompts).bit_length() - 1
        rows = prompt_tokens + -(-(decoding << power) // self._groups)  # so that each group has its share of both
        kernels_s = _look_up(self._prefill_s[power], rows)
        kernels_s += _look_up(self._heads_s, prompts + decoding)
        kernels_s += self._prompt_attention_s(prompts, prompt_tokens, batch.pairs // stages)
        kernels_s += self._hops_s(prompt_tokens + decoding)
        if decoding:
            kernels_s += self._attention_trend(decoding, batch.context / batch.decoding)[0]
        host_s = self._host_s(sequences, batch.prompt_tokens + batch.context)
        return round(1e9 * (max(kernels_s, self._min_prompt_kernels_s) + host_s))

    def decode_trend(self, decoding: int, context: int) -> tuple[float, float, int]:
        sequences = -(-decoding // self._stages)
        attention_s, growth_s, steps = self._attention_trend(sequences, context / decoding)
        kernels_s = _look_up(self._decode_s, sequences) + attention_s + self._hops_s(sequences)
        host_s = self._host_s(decoding, context)
        host_growth_s = self._host.token_s * decoding
        if kernels_s < self._min_kernels_s:  # constant until the kernels take longer than their launches
            constant_steps = int((self._min_kernels_s - kernels_s) / growth_s) if growth_s > 0 else steps
            return self._min_kernels_s + host_s, host_growth_s, max(1, min(steps, constant_steps))
        return kernels_s + host_s, growth_s + host_growth_s, steps

    def _host_s(self, sequences: int, tokens: int) -> float:
        """Return the time in seconds on the host for a step with `sequences` sequences that hold `tokens` tokens."""
        host = self._host
        return host.step_s + host.sequence_s * sequences + host.token_s * tokens

    def _hops_s(self, tokens: int) -> float:
        """Return the time in seconds to send the activations of `tokens` tokens through all pipeline stages."""
        return self._hop_s + self._hop_token_s * tokens

    def _attention_trend(self, decoding: int, context: float) -> tuple[float, float, int]:
        """Return the attention times of consecutive decode steps as three numbers: first, growth and steps.

        Step `i`, counted from 0, takes `first + i * growth` seconds. This holds for the first `steps` steps. `decoding`
        is the number of sequences, and `context` is the mean number of tokens per sequence before the first step.
        """
        row = self._attention_rows.get(decoding)
        if row is None:
            row_index = min(_table_index(decoding), len(self._decode_attention_s) - 1)
            row = self._decode_attention_s[row_index].tolist()
            self._attention_rows[decoding] = row
        index = min(bisect_right(CONTEXT_GRID, context), len(CONTEXT_GRID) - 1)
        start = CONTEXT_GRID[index - 1]
        end = CONTEXT_GRID[index]
        growth_s: float = (row[index] - row[index - 1]) / (end - start)
        return float(row[index - 1] + growth_s * (context - start)), growth_s, max(1, int(end - context))

    def _prompt_attention_s(self, prompts: int, tokens: int, pairs: int) -> float:
        """Return the time in seconds that a step needs for the attention of its prompts.

        - `prompts` is the number of prompts in the step.
        - `tokens` is the number of prompt tokens that the step computes, over all prompts.
        - `pairs` is the number of pairs of tokens. Each token of the step forms a pair with itself and with every
          earlier token of its prompt.

        All prompts are assumed to be equally long. For each prompt, this step then computes `chunk` tokens, and earlier
        steps have computed `before` tokens:

            chunk = tokens / prompts
            before = pairs / tokens - (chunk + 1) / 2
        """
        chunk = tokens / prompts
        before = max(0.0, pairs / tokens - (chunk + 1) / 2)
        index = min(bisect_right(CHUNK_GRID, chunk), len(CHUNK_GRID) - 1)
        start = CHUNK_GRID[index - 1]
        share = (chunk - start) / (CHUNK_GRID[index] - start)
        values: list[float] = [
            table[index - 1] + share * (table[index] - table[index - 1]) for table in self._prompt_attention
        ]
        one, one_growth, constant, per_prompt, growth_per_prompt = values
        return max(one + before * one_growth, constant + prompts * (per_prompt + before * growth_per_prompt))


def _hop_times(deployment: Deployment) -> tuple[float, float]:
    """Return the time in seconds to send activations through all pipeline stages: (constant part, part per token)."""
    start_s = float(deployment.hops_s(0.0))
    return start_s, float(deployment.hops_s(deployment.model.hidden * 2.0)) - start_s


def _prompt_attention_tables(deployment: Deployment) -> list[list[float]]:
    """Return five tables that predict the attention time of a step with prompts, in seconds.

    A step computes a part of each prompt. The size of this part in tokens is a value of CHUNK_GRID, and each table has
    one entry per size. Earlier tokens are the tokens of a prompt that previous steps have computed.

    If the step has one prompt:

    1. The time without earlier tokens.
    2. The additional time per earlier token.

    If the step has many prompts:

    3. The part of the time that does not depend on the number of prompts.
    4. The time per prompt.
    5. The additional time per prompt and earlier token.
    """
    chunks = np.array(CHUNK_GRID, float)
    one = predict_step(deployment, 1, chunks, before=0).attention
    one_with_context = predict_step(deployment, 1, chunks, before=SAMPLE_BEFORE).attention
    many = predict_step(deployment, SAMPLE_PROMPTS, chunks).attention
    twice_as_many = predict_step(deployment, 2 * SAMPLE_PROMPTS, chunks).attention
    many_with_context = predict_step(deployment, 2 * SAMPLE_PROMPTS, chunks, before=SAMPLE_BEFORE).attention
    per_prompt = (twice_as_many - many) / SAMPLE_PROMPTS
    tables = (
        one,
        (one_with_context - one) / SAMPLE_BEFORE,
        many - SAMPLE_PROMPTS * per_prompt,
        per_prompt,
        (many_with_context - twice_as_many) / SAMPLE_BEFORE / 2 / SAMPLE_PROMPTS,
    )
    return [table.tolist() for table in tables]


def _table_sizes(maximum: int) -> Any:
    """Return the sizes for which the tables of this module have an entry, up to `maximum`, as an array of floats.

    A size is a number of tokens or of sequences.
    """
    return np.array([*range(1, FINE_LIMIT + 1), *range(FINE_LIMIT + COARSE_STEP, maximum + 1, COARSE_STEP)], float)


def _table_index(size: int) -> int:
    """Return the index of the table entry for `size`, or for the next larger size that has an entry."""
    return size - 1 if size <= FINE_LIMIT else FINE_LIMIT - 1 - (FINE_LIMIT - size) // COARSE_STEP


def _look_up(table: list[float], size: int) -> float:
    """Return the entry of `table` for a step with `size` sequences or tokens.

    If `size` exceeds the largest size in the table, the last entry is scaled up in proportion to `size`.
    """
    index = _table_index(size)
    return table[index] if index < len(table) else table[-1] * (index + 1) / len(table)
