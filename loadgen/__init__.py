"""An exact load tester for LLM inference servers. `from loadgen import Plan, run, compare, read, simulated`.

Names are looked up when they are used, so that `import loadgen` loads nothing else.
"""

from __future__ import annotations

import os
import sys
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]


def _interrupted(*_: object) -> None:
    os.write(2, b"loadgen: interrupted\n")
    os._exit(130)


# With `python -m loadgen` Python is still looking for our __main__.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__ and getsignal(SIGINT) is default_int_handler:
    signal(SIGINT, _interrupted)

TYPE_CHECKING = False  # importing typing takes ten times as long as this module, and Ctrl-C may come in that time
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
