"""Splits the requests of a run over several models or LoRA adapters: `--model a=70,b=30`.

The model of a request depends only on the seed and on the id of the request, so the same seed always gives the same
split. The choices are independent, so the numbers of requests per model have a multinomial distribution. All requests
of a session go to the model of the session's first request.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import msgspec
from msgspec.structs import replace

from loadgen.workloads.random_streams import random_stream
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import WorkloadError, format_number, parse_number

SYNTAX = "a=70,b=30"
MODELS_LIMIT = 64
WEIGHT_LIMIT = 1_000_000
_SHARE = re.compile(r"(.+)=([\d.]+)%?")


class ModelMix(msgspec.Struct, frozen=True):
    """Models and their weights. `str()` returns the text of the option, such as `a=70,b=30`."""

    models: tuple[str, ...]
    weights: tuple[Fraction, ...]
    """Weight of each model. A model gets the share weight / sum of all weights."""

    def with_model(self, seed: int, request: Request) -> Request:
        """Return the request with a randomly chosen model, or unchanged if it names a model itself."""
        if request.model:
            return request
        number = request.id if request.session is None else request.session
        return replace(request, model=self.choose(seed, number))

    def choose(self, seed: int, number: int) -> str:
        """Return the model for a request or session. The seed and `number` determine the choice.

        `number` is the id of the request, or of the first request of the session.
        """
        limits = _limits(self.weights)
        point = random_stream(seed, f"model/{number}")() * limits[-1]
        return self.models[min(bisect_right(limits, point), len(self.models) - 1)]

    def __str__(self) -> str:
        pairs = zip(self.models, self.weights, strict=True)
        return ",".join(f"{model}={format_number(weight)}" for model, weight in pairs)


@lru_cache
def _limits(weights: tuple[Fraction, ...]) -> list[float]:
    """Return the cumulative weights, one per model. For example, the weights 70, 20 and 10 become 70, 90 and 100."""
    return list(accumulate(map(float, weights)))


@lru_cache  # a user of `loadgen ui` looks at the split for each request
def parse(text: str) -> ModelMix | None:
    """Parse the text of `--model`. Return None if the text is the name of a single model.

    A text with `=` is a mix of models with weights. Raises WorkloadError if a part of the mix is invalid.
    """
    if "=" not in text:
        return None
    models: list[str] = []
    weights: list[Fraction] = []
    for part in text.split(","):
        match = _SHARE.fullmatch(part.strip())
        if match is None:
            raise WorkloadError(f"{part.strip()!r} is not a model with a weight", f"write {SYNTAX}")
        model = match[1].strip()
        if model in models:
            raise WorkloadError(f"the model {model!r} is named twice", "name each model once")
        models.append(model)
        weights.append(parse_number(match[2], f"the weight of {model}", Fraction(1, 10**6), WEIGHT_LIMIT))
    if not 2 <= len(models) <= MODELS_LIMIT:
        hint = f"write --model {models[0]}" if len(models) == 1 else f"name at most {MODELS_LIMIT}"
        raise WorkloadError(f"a mix has 2 to {MODELS_LIMIT} models, not {len(models)}", hint)
    return ModelMix(tuple(models), tuple(weights))
