"""What a run's telemetry is read from: the server's own metrics, GPUs, memory; and why something is not."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from loadgen.engine.sampler import Sampler, bursts_of
from loadgen.errors import PlanError
from loadgen.plan import Plan
from servers.telemetry import NotMeasuredError, Source
from servers.telemetry.machine import Dcgm, HostMemory, Nvml, on_this_machine
from servers.telemetry.prometheus import ServerMetrics

ELSEWHERE = "the server is not on this machine"
Opening = Callable[[], Source]


def sampler_of(
    plan: Plan, server: Mapping[str, Any], due_ns: Sequence[int] | None, *, api_key: str | None, verify: ssl.SSLContext
) -> Sampler:
    """The sampler of a run against `server` (ServerFacts as the header has them).

    What is missing by default is noted. Raises PlanError when something is missing that the plan asks for.
    """
    if not plan.metrics_every_s:
        return Sampler(
            {}, 0.0, not_measured=dict.fromkeys(("server", "gpu", "host"), "switched off: --metrics-every 0")
        )
    metrics = partial(ServerMetrics, server["url"], server["name"], api_key=api_key, verify=verify)
    here = on_this_machine(server["url"])
    openings: dict[str, Opening] = {
        "server": metrics,
        "gpu": _gpu(plan, verify, here=here, simulated=server["simulated"]),
        "host": _host(plan, server.get("pids", ()), here=here),
    }
    sources: dict[str, Source] = {}
    missing: dict[str, str] = {}
    for name, opening in openings.items():
        try:
            sources[name] = opening()
        except NotMeasuredError as error:
            missing[name] = str(error)
    _demand(plan, missing)
    return Sampler(sources, plan.metrics_every_s, bursts_of(due_ns), missing)


def _gpu(plan: Plan, verify: ssl.SSLContext, *, here: bool, simulated: bool) -> Opening:
    if plan.dcgm_url:
        return partial(Dcgm, plan.dcgm_url, verify=verify)
    if plan.gpu or (plan.gpu is None and here and not simulated):
        return Nvml
    if plan.gpu is False:
        return partial(_missing, "switched off: --no-gpu")
    why = "the server is simulated and uses none" if simulated else f"{ELSEWHERE}: --dcgm-url reads its GPUs"
    return partial(_missing, why)


def _host(plan: Plan, pids: Sequence[int], *, here: bool) -> Opening:
    if plan.server_pid or here:
        return partial(HostMemory, (*pids, *plan.server_pid))
    return partial(_missing, ELSEWHERE)


def _missing(why: str) -> Source:
    raise NotMeasuredError(why)


def _demand(plan: Plan, missing: Mapping[str, str]) -> None:
    """What was asked for by name must be there."""
    asked = {
        "gpu": "--dcgm-url" if plan.dcgm_url else "--gpu" if plan.gpu else "",
        "host": "--server-pid" if plan.server_pid else "",
    }
    lines = [f"{option}: {missing[name]}" for name, option in asked.items() if option and name in missing]
    if lines:
        raise PlanError(
            "\n".join(lines), "Nothing was sent. Without these options the run goes on without the figures."
        )
