"""The settings of a Plan as people write and keep them: plan files, the catalog of named workloads, command lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loadgen.errors import PlanError
from loadgen.plan import Plan, option_name, run_options
from servers.access import without_secrets
from servers.errors import read_toml
from workloads import workload
from workloads.syntax import WorkloadError

CATALOG = Path(workload.__file__).with_name("catalog")
"""Named workloads, a TOML file each: settings, a `summary`, and the `source` of its numbers."""


def read_plan(path: Path) -> dict[str, Any]:
    """The settings of a plan file (TOML, keys as the fields of Plan). Raises PlanError when it is not TOML."""
    try:
        return read_toml(path)
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{path} is not TOML: {error}", 'Write lines such as: arrivals = "poisson:20"') from error


def catalog_names() -> list[str]:
    """The named workloads: `paper-burst` first, the others in alphabetical order."""
    return sorted((file.stem for file in CATALOG.glob("*.toml")), key=lambda name: (name != "paper-burst", name))


def from_catalog(name: str) -> dict[str, Any]:
    """The settings of a named workload. Raises WorkloadError for a name that is not in the catalog."""
    if name not in (names := catalog_names()):
        raise WorkloadError(f"there is no workload {name!r} in the catalog", f"choose {', '.join(names)}")
    named = read_plan(CATALOG / f"{name}.toml")
    settings = {key: value for key, value in named.items() if key not in ("summary", "source")}
    return {"workload": "synthetic", "label": name} | settings


def command_of(plan: Plan) -> list[str]:
    """The command line that runs this plan: what differs from the defaults."""
    words = ["loadgen", "run"]
    for name in run_options(type(plan)):
        value, flag = getattr(plan, name), option_name(name)
        values = value if isinstance(value, tuple) else (value,)
        if value == type(plan).model_fields[name].get_default(call_default_factory=True, validated_data=vars(plan)):
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif name.endswith("_s"):
            words += [flag, "..".join(f"{end:.9f}".rstrip("0").rstrip(".") + "s" for end in values)]
        else:
            words += [text for each in values for text in (flag, str(each))]
    return list(without_secrets(words))
