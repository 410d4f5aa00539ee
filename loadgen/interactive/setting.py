"""What an interactive run is set to: which server answers, and what is asked of it. The start form changes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from loadgen import host
from loadgen.errors import PlanError
from loadgen.plan import Plan, plan_of
from loadgen.prepare import longest_of, prompts_of, schedule_of
from servers.count import connect as tokenizer_of
from servers.find import dialect_on, of_version
from servers.kinds.base import Dialect, ServerFacts
from servers.wire.connection import Target, target_of, tls_context
from workloads import workload
from workloads.material import Prompts
from workloads.request import Request

TEXTS = 2_000
"""Prompts built beforehand where the server takes text only; after them the first comes again."""
WEEK_S = 7 * 86_400
SIMULATED_STREAMS = 4_000
SIMULATED_LENGTH = 32_768
CHOSEN = ("input_tokens", "output_tokens", "workload", "seed")
"""What the start form may change."""


def interactive_plan(options: Mapping[str, Any]) -> Plan:
    """The Plan of these options (names as the Plan's fields). Raises PlanError that names every mistake."""
    known = {name: value for name, value in options.items() if name in Plan.model_fields and value is not None}
    return plan_of(**{**known, "arrivals": "closed:1", "n": None, "duration_s": WEEK_S, "workers": 1})


@dataclass(slots=True)
class EndpointPrompts:
    """The Requests for one endpoint, without end."""

    asked: Prompts
    draw: Iterator[Request]
    how: str


@dataclass(slots=True)
class Setting:
    """The server and the prompts of the runs of this process. One for all users."""

    plan: Plan
    facts: ServerFacts
    target: Target
    headers: Mapping[str, str]
    say: Callable[[str], None]
    dialects: dict[str, Dialect] = field(default_factory=dict)
    prompts: dict[str, EndpointPrompts] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=count)

    def dialect(self, endpoint: str | None) -> Dialect:
        """The server's dialect on an endpoint, as its version speaks it.

        Raises EndpointError where it has none, VersionError where it is known to mislead there and nobody forced it.
        """
        found = dialect_on(self.plan.server, endpoint or self.plan.endpoint)
        if found.endpoint not in self.dialects:
            self.dialects[found.endpoint] = of_version(found, self.facts, self.say, force=self.plan.force)
        return self.dialects[found.endpoint]

    def request(self, dialect: Dialect, prompt: str | None, output_tokens: int) -> Request:
        """The next Request for this endpoint, or one with a prompt of its own; it has no id yet."""
        if prompt is None:
            return next(self.prompts_for(dialect).draw)
        return Request(0, prompt, 0, output_tokens)

    def numbered(self, request: Request) -> Request:
        """The same Request with an id of its own."""
        return replace(request, id=next(self.ids))

    def prompts_for(self, dialect: Dialect) -> EndpointPrompts:
        """Built at first use, which asks the server to count. Raises PromptError, PlanError, WorkloadError."""
        if dialect.endpoint not in self.prompts:
            self.prompts[dialect.endpoint] = self._built(dialect)
        return self.prompts[dialect.endpoint]

    def changed(self, plan: Plan) -> Setting:
        """The same server, asked something else; ids start again at 0."""
        return replace(self, plan=plan, prompts={}, ids=count())

    def begun_again(self) -> Setting:
        """The same server asked the same, from the first prompt and id 0 on."""
        prompts = {name: replace(each, draw=_endless(each.asked)) for name, each in self.prompts.items()}
        return replace(self, prompts=prompts, ids=count())

    def _built(self, dialect: Dialect) -> EndpointPrompts:
        own_texts = workload.parse(self.plan.workload)
        ids = dialect.token_ids and not isinstance(own_texts, workload.Dataset)
        plan = self.plan
        if not ids and not isinstance(own_texts, workload.Dataset):
            plan = plan.model_copy(update={"n": TEXTS})
        access = {
            "api_key": os.environ.get(plan.api_key_env) or None,
            "verify": tls_context(plan.ca_file, plan.insecure),
        }
        with tokenizer_of(self.facts, dialect.endpoint, **access) as server:  # type: ignore[arg-type]
            asked = prompts_of(plan, schedule_of(plan), dialect, server)
        how = asked.how if ids else f"{asked.how}; repeated from the first after the last"
        return EndpointPrompts(asked, _endless(asked), how)


def _endless(asked: Prompts) -> Iterator[Request]:
    while True:
        empty = True
        for request in asked.requests():
            empty = False
            yield request
        if empty:
            raise PlanError("the workload holds no prompt", "Name another file.")


def find(plan: Plan, stack: ExitStack, say: Callable[[str], None]) -> Setting:
    """Find the server as `loadgen burst` does; the built-in simulated one lives as long as `stack`.

    Raises servers.errors.ServerError.
    """
    from servers.find import check_limits, resolve

    access = tls_context(plan.ca_file, plan.insecure)
    api_key = os.environ.get(plan.api_key_env) or None
    facts = resolve(plan.server, plan.url, os.environ, real=plan.real, api_key=api_key, verify=access)
    if facts is None:
        facts = _simulated(plan, stack, say)
    else:
        check_limits(facts, 1, longest_of(plan.input_tokens), longest_of(plan.output_tokens))
    facts = replace(facts, model=plan.model or facts.model)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return Setting(plan, facts, target_of(facts.url, access), headers, say)


def _simulated(plan: Plan, stack: ExitStack, say: Callable[[str], None]) -> ServerFacts:
    from servers.find import probe
    from servers.simulated.config import SimulatedConfig
    from servers.simulated.server import spawn

    say(f"SIMULATED {plan.server} (none runs here, --url names one; clock x{plan.speed:g})")
    host.allow_open_files(SIMULATED_STREAMS)
    config = SimulatedConfig(
        server=plan.server,
        clock="batching",
        speed=plan.speed,
        max_concurrent_requests=SIMULATED_STREAMS,
        max_model_len=SIMULATED_LENGTH,
        seed=plan.seed,
    )
    return probe(stack.enter_context(spawn(config)), plan.server)
