"""An exact load tester for LLM inference servers. `from loadgen import Plan, run, compare, read, simulated`.

Names are looked up when they are used, so that `import loadgen` and `loadgen.runfile` load nothing else. One thing is
changed at import: Python finds `analysis`, `servers` and `workloads` beside this package before it looks into the
working directory or a script's folder, where a user may have others of these names.
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

from importlib.machinery import ModuleSpec, PathFinder  # noqa: E402

TYPE_CHECKING = False  # as typing has it, which takes ten times as long to import as all of this: Ctrl-C may come
if TYPE_CHECKING:
    from loadgen.api import Result, compare, read, run, run_async, simulated
    from loadgen.plan import Plan

_ROOT = __path__[0].removesuffix("/loadgen")
_SIBLINGS = ("analysis", "servers", "workloads")


class _Beside:
    """Finds the siblings in the folder of this package."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_ROOT]) if name in _SIBLINGS else None


for _name in _SIBLINGS:
    if (_held := sys.modules.get(_name)) is not None:
        from pathlib import Path  # not otherwise: Ctrl-C is understood when this package is imported

        if not any(Path(each).samefile(f"{_ROOT}/{_name}") for each in getattr(_held, "__path__", ())):
            raise ImportError(f"another module named {_name} was imported before: import loadgen first, or rename it")
sys.meta_path.insert(0, _Beside)

__all__ = ["Plan", "Result", "compare", "read", "run", "run_async", "simulated"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'loadgen' has no attribute {name!r}")
    from loadgen import api, plan

    return plan.Plan if name == "Plan" else getattr(api, name)


def __dir__() -> list[str]:
    return __all__
