"""What happens below the server: modules, operators and training steps, each timed on this machine.

    found.py        what was measured: raw seconds, FLOPs and bytes; `loadgen.dissect.inference_report` makes tables and a page
    of it machine.py      the device, and the bounds that its operators are held against
    watch.py        every operator that torch dispatches: which module's, how long, how much work
    inference.py    one step of a model of real shape and random weights
    techniques.py   how a training step saves time or memory, by the names of arXiv 2311.03687
    training.py     one training step, its time by phase and its memory by kind
    processes.py    several processes that share the work

It needs the extra `dissect` (torch, transformers, peft), which nothing else imports; this file and found.py do without.
"""

from __future__ import annotations

from importlib.util import find_spec

from loadgen.errors import LoadgenError


class DissectError(LoadgenError):
    """What was asked for is not installed, or cannot be done on this device."""


def check_installed(*modules: str) -> None:
    """Raises DissectError, which says how to install what is missing."""
    if missing := [module for module in modules if find_spec(module) is None]:
        raise DissectError(
            f"loadgen dissect needs {', '.join(missing)}",
            "Install it: pip install 'llm-loadgen[dissect]' (without a GPU, first: pip install torch "
            "--index-url https://download.pytorch.org/whl/cpu).",
        )
