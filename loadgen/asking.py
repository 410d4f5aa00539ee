"""What a run asks: the Requests of a plan, exact by the server's own count, drawn in order of id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadgen.load import Load
from loadgen.plan import Plan
from servers.dialects.base import Dialect
from servers.tokenize import ServerTokenizer
from workloads.prompts import make_prompts
from workloads.request import Request
from workloads.tokenizer import load as load_tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """The Requests of a run."""

    requests: Callable[[], Iterator[Request]]
    """Draws them anew, the same ones each time."""
    warmup: Sequence[Request]
    """Other Requests of the same kind, with ids below zero."""
    how: str
    """How many, how long, and how that was made exact."""


def asked_of(plan: Plan, load: Load, dialect: Dialect, server: ServerTokenizer) -> Asked:
    """Prepare everything that needs the server's tokenizer. Raises PromptError, WorkloadError or ServerError."""
    local = load_tokenizer(plan.tokenizer) if plan.tokenizer else None
    assert isinstance(plan.input_tokens, int)
    assert isinstance(plan.output_tokens, int)
    assert load.count is not None
    inp, outp = plan.input_tokens, plan.output_tokens
    prompts = make_prompts(
        load.count + plan.warmup, inp, plan.seed, token_ids=dialect.token_ids, local=local, server=server
    )
    drawn: list[str | tuple[int, ...]] = list(prompts.prompts)
    requests = [Request(index, prompt, inp, outp) for index, prompt in enumerate(drawn[: load.count])]
    warmup = [Request(-1 - index, prompt, inp, outp) for index, prompt in enumerate(drawn[load.count :])]
    return Asked(lambda: iter(requests), warmup, f"{load.count} prompts of {inp} tokens ({prompts.how})")
