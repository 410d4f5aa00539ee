"""The command `hardware`: what GPUs, and GPUs that do not exist yet, bring for a model. No server is contacted."""

from __future__ import annotations

from typing import Annotated

from typer import Option, Typer

from loadgen.cli import TYPER_DEFAULTS
from loadgen.errors import PlanError

hardware = Typer(
    no_args_is_help=True,
    help="Compare GPUs, real or hypothetical, for a model. No server is contacted.",
    **TYPER_DEFAULTS,
)


@hardware.callback()
def _group() -> None:
    """Make `sweep` a subcommand. Without a callback, typer would merge a single subcommand into the group."""


@hardware.command()
def sweep(
    gpu: Annotated[str, Option(help="GPU to start from.")] = "A100",
    model: Annotated[str, Option(help="Model, such as llama-2-70b, or a Hugging Face config.json.")] = "llama-2-70b",
    tp: Annotated[int, Option(min=1, help="GPUs that share each layer (tensor parallel).")] = 8,
) -> None:
    """Compute the expected time per output token of a GPU.

    Exit codes: 0 computed, 2 usage error.
    """
    from loadgen.servers.hardware import HardwareError
    from loadgen.servers.hardware.roofline import compute_limits, make_deployment
    from loadgen.servers.hardware.throughput_model import Load

    try:
        result = compute_limits(make_deployment(gpu, model, "bf16", tp, 1, "vllm"), Load(512, 128, 1))
    except HardwareError as error:
        raise PlanError(str(error)) from None
    print(f"{result.gpu}: {1000 * result.expected.tpot_s:.2f} ms per output token")
