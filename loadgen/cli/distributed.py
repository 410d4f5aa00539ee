"""Options of a run over several machines, which `burst` and `run` share, and the command of the other machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from loadgen.cli.options import seconds

if TYPE_CHECKING:
    from loadgen.distributed.master import MachinePlan


def _option(*names: str, **more: Any) -> Any:
    return Option(*names, rich_help_panel="Distributed", **more)


Distributed = Annotated[
    bool, _option("--distributed", help="Split the run over machines on which `loadgen worker` runs.")
]
ExpectWorkers = Annotated[
    int, _option(help="With --distributed: worker machines to wait for; --workers processes run on each.")
]
Bind = Annotated[
    str,
    _option(
        metavar="HOST[:PORT]",
        help="With --distributed: where to listen for them. Other than this machine's loopback only with a token in "
        "LOADGEN_TOKEN.",
    ),
]
JoinTimeout = Annotated[
    float,
    _option("--join-timeout", parser=seconds, metavar="T", help="With --distributed: how long to wait for them."),
]
BIND = "127.0.0.1:5557"
JOIN_TIMEOUT_S = 600.0


def spread_of(distributed: bool, expect_workers: int, bind: str, join_timeout_s: float) -> MachinePlan | None:
    """How the run is spread by these options, or None for a run on this machine. Raises PlanError, DistributedError."""
    if not distributed:
        return None
    from loadgen.distributed.master import MachinePlan
    from loadgen.distributed.protocol import address_of
    from loadgen.errors import PlanError

    if expect_workers < 1:
        raise PlanError("--expect-workers is missing", "Say how many machines will run `loadgen worker`.")
    return MachinePlan(expect_workers, address_of(bind, "--bind"), join_timeout_s)


def worker(
    master: Annotated[str, Option(metavar="HOST[:PORT]", help="Where `loadgen burst --distributed` runs.")],
    out: Annotated[Path, Option(help="Folder in which part files lie until the master has them.")] = Path("runs"),
    stay: Annotated[bool, Option("--stay", help="Take part in one run after the other.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Take part in a run over several machines: prepare a share, start when all do, send back what was recorded.

    The token of the master has to be in LOADGEN_TOKEN, and the server's API key where it was on the master. Exit codes:
    0 everything delivered, or not needed; 2 usage, not let in, called off or not delivered; 3 server not reachable from
    here or not the one named; 130 interrupted.
    """
    from loadgen.cli.output import Output
    from loadgen.distributed.protocol import address_of
    from loadgen.distributed.worker import serve

    output = Output(as_json=False, quiet=quiet)
    with output.progress(None) as display:
        code = serve(address_of(master, "--master"), out, stay=stay, say=output.say, on_progress=display.show)
    raise Exit(code)
