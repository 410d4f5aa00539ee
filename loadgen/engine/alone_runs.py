"""Runs each class of traffic of a plan by itself, before the run with all classes together (`--alone`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.errors import PlanError

if TYPE_CHECKING:
    from loadgen.analysis.run.runfile import Footer
    from loadgen.engine.resolve_server import Say
    from loadgen.plan import Plan

ALONE_SEEDS = 1_000_003
"""Difference between the seed of a run and the seed of its classes alone. Seeds of repeats lie close together."""


def check_alone(plan: Plan, option: str) -> None:
    """Raise PlanError if the classes of a plan cannot be run by themselves. `option` names the option in messages."""
    if not plan.traffic:
        raise PlanError(
            f"{option} runs classes of traffic by themselves, but the plan has no [[traffic]] tables",
            f"Write the classes into the plan, or leave {option} out.",
        )
    if plan.repeats > 1:
        raise PlanError(f"{option} cannot be used with --repeats", "Leave one of them out.")


def run_alone(
    plan: Plan, folder: Path, run_class: Callable[[Plan, Path], Footer], say: Say | None = None
) -> dict[str, str] | None:
    """Run each class of traffic alone, before the run with all classes. `folder` is the folder of the run with all
    classes.

    The function `run_class` makes each run. It takes the plan of one class, and the folder for the run of this class.
    This folder is `FOLDER-alone/CLASS`, where FOLDER is the path of `folder`.

    Return the folder of each class, relative to `folder`. Return None if one of these runs was interrupted.

    These runs use a different seed than the run with all classes. With the same seed, the prompts of the run with all
    classes would already be in the server's prefix cache. The commands of --at run only in the run with all classes.
    """
    result = {}
    for number, table in enumerate(plan.traffic, 1):
        name = table["name"]
        if say is not None:
            say(f"class {number} of {len(plan.traffic)} alone: {name}")
        alone = plan.replaced(only_class=name, seed=plan.seed + ALONE_SEEDS, objectives=(), goodput=(), at=())
        subfolder = Path(f"{folder.name}-alone", name)
        if run_class(alone, folder.parent / subfolder).interrupted:
            return None
        result[name] = str(Path("..", subfolder))
    if say is not None:
        say("all classes together")
    return result
