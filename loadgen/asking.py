"""What a run asks: the Requests of a plan, exact by the server's own count, drawn in order of id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from loadgen.errors import PlanError
from loadgen.load import Load
from loadgen.plan import ANSWERS, Plan
from servers.count import ServerTokenizer
from servers.kinds.base import Dialect
from workloads import arrivals, lengths, workload
from workloads.material import Order, conversations, material, requests, warm_up
from workloads.request import Request
from workloads.sessions import Conversation
from workloads.tokenizer import load as load_tokenizer
from workloads.traces import Trace


@dataclass(frozen=True, slots=True)
class Asked:
    """The Requests of a run."""

    requests: Callable[[], Iterator[Request]]
    """Draws them anew, the same ones each time. Empty where there are sessions."""
    conversations: Callable[[], Iterator[Conversation]] | None
    """Draws the sessions anew, where the workload is of sessions."""
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
    warmup = tuple(warm_up(order, made))
    count = "" if load.count is None else f"{load.count} "
    if isinstance(order.workload, workload.MultiTurn):
        sessions = partial(conversations, order, made, chat=dialect.endpoint == "chat")
        if order.workload.path is not None:
            _check_enough(order.workload.path, "sessions", sessions(), load)
        return Asked(lambda: iter(()), sessions, warmup, f"{count}sessions, {plan.lengths[0]} tokens a turn", made.how)
    draw = partial(requests, order, made)
    if isinstance(order.workload, workload.Dataset):
        _check_enough(order.workload.path, "prompts", draw(), load)
    return Asked(draw, None, warmup, f"{count}prompts of {plan.lengths[0]} tokens", made.how)


def _check_enough(path: Path, what: str, drawn: Iterator[object], load: Load) -> None:
    if load.count is None:
        return
    there = sum(1 for _ in islice(drawn, load.count))
    if there < load.count:
        raise PlanError(f"{path} holds {there} {what}, and {load.count} are to be sent", f"Ask for fewer: --n {there}")


def _order(plan: Plan, load: Load) -> Order:
    asked = workload.parse(plan.workload)
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
