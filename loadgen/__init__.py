"""An exact load tester for LLM inference servers.

The public API is `Plan`, `Result`, `run`, `run_async`, `read`, `compare` and `simulated`. Each name is imported on
first use, so `import loadgen` loads no other module.
"""

import os
import sys
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]


def _interrupted(*_: object) -> None:
    os.write(2, b"loadgen: interrupted\n")
    os._exit(130)


# `python -m loadgen` and the command `loadgen` import this module before they run __main__.py. Ctrl-C in that time must
# not print a traceback. For the same reason this module does not import `__future__`, which would read another file.
_is_command = (sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__) or (
    os.path.basename("".join(sys.argv[:1])) == __name__  # noqa: PTH119 - importing pathlib would take 10 ms
)
if _is_command and getsignal(SIGINT) is default_int_handler:
    signal(SIGINT, _interrupted)

TYPE_CHECKING = False  # importing typing would take ten times as long as the rest of this module
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
