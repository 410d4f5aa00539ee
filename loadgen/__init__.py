"""An exact load tester for LLM inference servers. `from loadgen import Plan, run, compare, read, simulated`.

Names are looked up when they are used, so that `import loadgen` and `loadgen.runfile` load nothing else. One thing is
changed at import: Python finds `analysis`, `servers` and `workloads` beside this package before it looks into the
working directory or a script's folder, where a user may have others of these names.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadgen.api import Result, compare, read, run, run_async, simulated
    from loadgen.plan import Plan

_ROOT = Path(__file__).parents[1]
_SIBLINGS = ("analysis", "servers", "workloads")


class _Beside:
    """Finds the siblings in the folder of this package."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_ROOT)]) if name in _SIBLINGS else None


for _name in _SIBLINGS:
    _held = getattr(sys.modules.get(_name), "__path__", [""])
    if _name in sys.modules and not any(Path(each).samefile(_ROOT / _name) for each in _held if each):
        raise ImportError(f"another module named {_name} was imported before: import loadgen first, or rename yours")
sys.meta_path.insert(0, _Beside)

__all__ = ["Plan", "Result", "compare", "read", "run", "run_async", "simulated"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'loadgen' has no attribute {name!r}")
    from loadgen import api, plan

    return plan.Plan if name == "Plan" else getattr(api, name)


def __dir__() -> list[str]:
    return __all__
