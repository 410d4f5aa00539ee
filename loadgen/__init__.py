"""An exact load tester for LLM inference servers. `from loadgen import Plan, run, compare, read, simulated`.

Names are looked up when they are used, so that `import loadgen` and `loadgen.runfile` load nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadgen.api import Result, compare, read, run, run_async, simulated
    from loadgen.plan import Plan

__all__ = ["Plan", "Result", "compare", "read", "run", "run_async", "simulated"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'loadgen' has no attribute {name!r}")
    from loadgen import api, plan

    return plan.Plan if name == "Plan" else getattr(api, name)


def __dir__() -> list[str]:
    return __all__
