"""How long a step of an engine takes on its hardware: tables of loadgen.servers.hardware.inference, made once, read
per step.

    step = max(kernels, launches) + fixed + sequences * per sequence

Kernels are those of `inference.step`: GEMMs by how many tokens pass, attention by what sequences hold, all-reduces.
An engine that launches its kernels one by one from Python keeps the GPU waiting where they are short: `launches`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from loadgen.servers.hardware.inference import Deployment, step
from loadgen.servers.simulated.scheduler import Batch

FINE, COARSE, SEQUENCES, TOKENS = 1024, 32, 8192, 65_536
"""Each number of sequences, or tokens, in a step up to the first; from there every so many, up to the last two."""
CONTEXTS = (*range(0, 8192, 256), *range(8192, 131_073, 4096))
"""Tokens that a decoding sequence holds; between two of them, a straight line."""
CHUNKS = (1, *range(16, 128, 16), *range(128, 2048, 32), *range(2048, 32_769, 256))
"""Tokens of a prompt, likewise."""
STEPS = 1 << 20
"""For how many steps a straight line holds."""
BEFORE, MANY = 4096, 64
"""What attention over prompts is a straight line in, how much each computed before, and how many: where it is read."""


class StepDurations(Protocol):
    """How long steps take."""

    def __call__(self, batch: Batch) -> int:
        """Of one step, in nanoseconds."""
        ...

    def decode_trend(self, decoding: int, context: int) -> tuple[float, float, int]:
        """Of a step that decodes so many sequences, which hold so much together: its seconds, how many more the next
        such step takes, and for how many steps that holds."""
        ...


@dataclass(frozen=True, slots=True)
class LinearStepTime:
    """Of an engine on hardware that nobody has described: what each step, sequence, prompt token, and token that a
    decoding sequence holds, adds."""

    step_s: float
    sequence_s: float
    token_s: float
    context_s: float

    def __call__(self, batch: Batch) -> int:
        if not (sequences := batch.prompts + batch.decoding):
            return 0
        host_s = self.step_s + self.sequence_s * sequences
        return round(1e9 * (host_s + self.token_s * batch.prompt_tokens + self.context_s * batch.context))

    def decode_trend(self, decoding: int, context: int) -> tuple[float, float, int]:
        took_s = self.step_s + self.sequence_s * decoding + self.context_s * context
        return took_s, self.context_s * decoding, STEPS


class StepTime:
    """The durations of a deployment's steps. `launch_s`: what an engine needs to launch the kernels of a layer, without
    which the GPU has nothing to do. Pure."""

    def __init__(self, deployment: Deployment, launch_s: float = 0.0) -> None:
        framework = deployment.framework
        self.deployment = deployment
        self._least_s = launch_s * deployment.model.layers
        self._step_s, self._sequence_s = framework.step_s, framework.sequence_s
        sizes, contexts = _sizes(SEQUENCES), np.array(CONTEXTS, float)
        decode = step(deployment, decoding=sizes[:, None], context=contexts[None, :])
        prefill = step(deployment, 1, tokens=_sizes(TOKENS))
        between = prefill.elementwise + prefill.all_reduce + prefill.layers
        self._decode_s: list[float] = (decode.gemm + decode.elementwise + decode.all_reduce + decode.layers)[
            :, 0
        ].tolist()
        self._attention_s = decode.attention
        self._prefill_s: list[float] = (prefill.gemm + between).tolist()
        # A step with prompts computes the output head for each sequence, and the table of prompts has it for one.
        gemm = prefill.gemm[: FINE + (SEQUENCES - FINE) // COARSE]
        self._heads_s: list[float] = (decode.gemm[:, 0] / framework.prefill_share - gemm).tolist()
        self._contexts: dict[int, list[float]] = {}
        chunks = np.array(CHUNKS, float)
        one, ahead = (step(deployment, 1, chunks, before=before).attention for before in (0, BEFORE))
        few, many = (step(deployment, MANY * times, chunks).attention for times in (1, 2))
        many_ahead = step(deployment, 2 * MANY, chunks, before=BEFORE).attention
        each = (many - few) / MANY
        self._prompts_s: list[list[float]] = [
            part.tolist()
            for part in (one, (ahead - one) / BEFORE, few - MANY * each, each, (many_ahead - many) / BEFORE / 2 / MANY)
        ]

    def __call__(self, batch: Batch) -> int:
        """Of one step, in nanoseconds."""
        if not batch.prompts:
            return round(1e9 * self.decode_trend(batch.decoding, batch.context)[0]) if batch.decoding else 0
        sequences = batch.prompts + batch.decoding
        kernels_s = _read(self._prefill_s, batch.prompt_tokens + batch.decoding) + _read(self._heads_s, sequences)
        kernels_s += self._prompt_attention_s(batch.prompts, batch.prompt_tokens, batch.pairs)
        if batch.decoding:
            kernels_s += self._context_s(batch.decoding, batch.context / batch.decoding)[0]
        return round(1e9 * (max(kernels_s, self._least_s) + self._step_s + self._sequence_s * sequences))

    def decode_trend(self, decoding: int, context: int) -> tuple[float, float, int]:
        attention_s, more_s, steps = self._context_s(decoding, context / decoding)
        kernels_s = _read(self._decode_s, decoding) + attention_s
        host_s = self._step_s + self._sequence_s * decoding
        if kernels_s < self._least_s:
            left = int((self._least_s - kernels_s) / more_s) if more_s > 0 else steps
            return self._least_s + host_s, 0.0, max(1, min(steps, left))
        return kernels_s + host_s, more_s, steps

    def _context_s(self, decoding: int, context: float) -> tuple[float, float, int]:
        """Attention, how much more of it for one more token in each sequence, and how many tokens ahead that holds."""
        if (row := self._contexts.get(decoding)) is None:
            index = min(_place(decoding), len(self._attention_s) - 1)
            row = self._contexts[decoding] = self._attention_s[index].tolist()
        index = min(bisect_right(CONTEXTS, context), len(CONTEXTS) - 1)
        begin, end = CONTEXTS[index - 1], CONTEXTS[index]
        more_s: float = (row[index] - row[index - 1]) / (end - begin)
        return float(row[index - 1] + more_s * (context - begin)), more_s, max(1, int(end - context))

    def _prompt_attention_s(self, prompts: int, tokens: int, pairs: int) -> float:
        """As of so many equal prompts: their mean length, and as much computed before as makes the pairs right."""
        each = tokens / prompts
        before = max(0.0, pairs / tokens - (each + 1) / 2)
        index = min(bisect_right(CHUNKS, each), len(CHUNKS) - 1)
        begin, end = CHUNKS[index - 1], CHUNKS[index]
        share = (each - begin) / (end - begin)
        parts: list[float] = [part[index - 1] + share * (part[index] - part[index - 1]) for part in self._prompts_s]
        one, ahead, launch, many, many_ahead = parts
        return max(one + before * ahead, launch + prompts * (many + before * many_ahead))


def _sizes(most: int) -> Any:
    return np.array([*range(1, FINE + 1), *range(FINE + COARSE, most + 1, COARSE)], float)


def _place(size: int) -> int:
    """Where a number of sequences or tokens stands, rounded up."""
    return size - 1 if size <= FINE else FINE - 1 - (FINE - size) // COARSE


def _read(table: list[float], size: int) -> float:
    """Of a table by such numbers; past its end in proportion."""
    index = _place(size)
    return table[index] if index < len(table) else table[-1] * (index + 1) / len(table)
