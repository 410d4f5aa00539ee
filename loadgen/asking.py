"""What a run asks: the Requests of a plan, exact by the server's own count, drawn in order of id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from loadgen.errors import PlanError
from loadgen.load import Load
from loadgen.plan import ANSWERS, Plan
from servers.dialects.base import Dialect
from servers.tokenize import ServerTokenizer
from workloads import arrivals, lengths, workload
from workloads.material import Order, material, requests, warm_up
from workloads.request import Request
from workloads.tokenizer import load as load_tokenizer
from workloads.traces import Trace


@dataclass(frozen=True, slots=True)
class Asked:
    """The Requests of a run."""

    requests: Callable[[], Iterator[Request]]
    """Draws them anew, the same ones each time."""
    warmup: Sequence[Request]
    """Other Requests of the same kind, with ids below zero."""
    what: str
    """How many, and how long."""
    how: str
    """How the length was made exact."""


def asked_of(plan: Plan, load: Load, dialect: Dialect, server: ServerTokenizer) -> Asked:
    """Prepare everything that needs the server's tokenizer.

    Raises PlanError when a file holds fewer prompts than the plan needs, PromptError, WorkloadError or ServerError.
    """
    order = _order(plan, load)
    local = load_tokenizer(plan.tokenizer) if plan.tokenizer else None
    made = material(order, token_ids=dialect.token_ids, local=local, server=server)
    draw = partial(requests, order, made)
    if isinstance(order.workload, workload.Dataset) and load.count is not None:
        there = sum(1 for _ in islice(draw(), load.count))
        if there < load.count:
            raise PlanError(
                f"{order.workload.path} holds {there} prompts, and {load.count} requests are to be sent",
                f"Ask for fewer: --n {there}",
            )
    count = "prompts" if load.count is None else f"{load.count} prompts"
    return Asked(draw, tuple(warm_up(order, made)), f"{count} of {plan.lengths[0]} tokens", made.how)


def _order(plan: Plan, load: Load) -> Order:
    asked = workload.parse(plan.workload)
    if isinstance(asked, workload.MultiTurn):
        raise PlanError(
            f"--workload {plan.workload}: the turns of a session follow its answers, and a run sends requests that are "
            "known beforehand",
            "Choose another workload, such as sharegpt:FILE, which sends the first question of each dialogue.",
        )
    named = arrivals.parse(plan.arrivals)
    return Order(
        asked,
        lengths.parse(str(plan.input_tokens)),
        None if plan.output_tokens == ANSWERS else lengths.parse(str(plan.output_tokens)),
        plan.seed,
        n=load.count,
        warmup=plan.warmup,
        trace=named if isinstance(named, Trace) else None,
    )
