"""Starts modules of loadgen in new interpreters, which ignore the Python files of the working directory.

`python -m` searches the working directory for modules first. A user's own `attr.py` there would replace the library of
the same name. `own_process` therefore returns a command that starts this file with the option -P, and this file runs
the requested module.
"""

from __future__ import annotations

import sys
from pathlib import Path


def own_process(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of loadgen, such as `loadgen.api`, in a new interpreter."""
    return [sys.executable, "-P", __file__, module, *arguments]


if __name__ == "__main__":
    import runpy  # only the new process needs it

    root = str(Path(__file__).absolute().parents[2])  # the folder that contains the package `loadgen`
    if root not in sys.path:
        sys.path.insert(0, root)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
