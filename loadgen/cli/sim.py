"""`loadgen sim`: the simulated server, on its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Exit, Option

from loadgen.errors import EXIT_USAGE
from servers.kinds import any_of, simulated_kinds

if TYPE_CHECKING:
    from servers.simulated.config import SimulatedConfig

from loadgen.cli.options import seconds

SAME_NAME = (
    *("server", "host", "port", "model", "clock", "tokens_per_event", "speed", "gpu", "model_shape", "tensor_parallel"),
    *("max_concurrent_requests", "max_model_len", "eos_mean_tokens", "seed", "log"),
)
"""Options that are fields of the config as they are."""


def sim(
    server: Annotated[str, Option(help=f"Which server to be: {any_of(simulated_kinds())}.")],
    host: Annotated[
        str, Option(help="Address to listen on; other machines reach only what is not loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 takes any free one.")] = 0,
    model: Annotated[str, Option(help="Name under which the model is served.")] = "llama-2-7b",
    clock: Annotated[
        str, Option(help="When tokens leave: script (exactly as told) or batching (as an engine on a GPU would).")
    ] = "script",
    ttft: Annotated[str, Option(help="script: time to the first token.")] = "500ms",
    itl: Annotated[str, Option(help="script: time between two token events of a stream.")] = "20ms",
    jitter: Annotated[str, Option(help="script: each event is moved by up to so much, drawn from the seed.")] = "0",
    tokens_per_event: Annotated[int, Option(help="script: tokens that are due together.")] = 1,
    speed: Annotated[float, Option(help="How many times faster the clock runs.")] = 1.0,
    gpu: Annotated[str, Option(help="batching: the card.")] = "A800-80GB SXM",
    model_shape: Annotated[str, Option(help="batching: the model's shape.")] = "Llama-2-7B",
    tensor_parallel: Annotated[int, Option(help="batching: so many of these cards hold the model together.")] = 1,
    max_concurrent_requests: Annotated[
        int | None,
        Option(help="Requests at a time. TGI (128) and vLLM (none) reject past it, LightLLM (256) lets wait."),
    ] = None,
    max_model_len: Annotated[int, Option(help="Longest prompt plus output, in tokens.")] = 4096,
    eos_mean_tokens: Annotated[
        float | None, Option(help="tgi: answers end by themselves after so many tokens in the mean.")
    ] = None,
    api_key_env: Annotated[str | None, Option(help="Environment variable with the API key to ask for.")] = None,
    fault: Annotated[
        list[str] | None,
        Option(help="A fault, repeatable: reset@12:3,17 (these requests), stall=0.01 (a share), merged@4 (all)."),
    ] = None,
    seed: Annotated[int, Option(help="The same seed gives the same words, jitter and faults.")] = 0,
    log: Annotated[Path | None, Option(help="JSON Lines: every request with the instants of its sends.")] = None,
    until_stdin_closes: Annotated[bool, Option("--until-stdin-closes", hidden=True)] = False,
) -> None:
    """Be a vLLM, TGI or LightLLM server without a model: the same bytes, at times of your choosing.

    Prints `ready URL`, serves until SIGTERM or Ctrl-C, then says how late its tokens left.
    """
    told = locals()
    from servers.simulated.errors import SimulatedError

    try:
        summary = _serve(_config(told), until_stdin_closes=until_stdin_closes)
    except (SimulatedError, OSError) as problem:
        print(f"loadgen: {problem}", file=sys.stderr)
        raise Exit(EXIT_USAGE) from None
    _say(summary)


def _config(told: dict[str, Any]) -> SimulatedConfig:
    """The options as a config; most have the same name there."""
    from servers.simulated.config import SimulatedConfig
    from servers.simulated.faults import parse_rule

    values = {name: told[name] for name in SAME_NAME}
    return SimulatedConfig(
        **values,
        ttft_s=seconds(told["ttft"]),
        itl_s=seconds(told["itl"]),
        jitter_s=seconds(told["jitter"]),
        api_key=_api_key(told["api_key_env"]),
        faults=tuple(map(parse_rule, told["fault"] or ())),
    )


def _api_key(name: str | None) -> str:
    if name is None:
        return ""
    key = os.environ.get(name, "")
    if not key:
        raise BadParameter(f"the environment variable {name} is empty or not set")
    return key


def _serve(config: SimulatedConfig, *, until_stdin_closes: bool) -> dict[str, Any]:
    """Runs the server in an event loop of its own until it is told to stop."""
    import asyncio
    import contextlib
    import signal

    from servers.simulated.server import READY, new_loop, serve

    with contextlib.closing(new_loop()) as loop:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if until_stdin_closes:
            loop.add_reader(sys.stdin.fileno(), stop.set)
        ready = lambda url: print(f"{READY}{url}", flush=True)  # noqa: E731
        return loop.run_until_complete(serve(config, ready=ready, stop=stop))


def _say(summary: dict[str, Any]) -> None:
    late_ms = {name: late_ns / 1e6 for name, late_ns in summary["late_ns"].items()}
    late = ", ".join(f"{name} {value:.3f} ms" for name, value in late_ms.items())
    print(f"{summary['requests']} requests, {summary['events']} sends; late {late}")
    if summary["falling_behind"]:
        print("The simulated server did not keep up: its tokens left later than its clock wanted.")
