"""`loadgen sim`: the simulated server, on its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from typer import BadParameter, Option

from loadgen.cli.options import seconds
from servers.kinds import any_of, simulated_kinds


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
    hardware: Annotated[
        Path | None, Option(help="batching: a TOML file with more cards and models, as docs/simulated.md says.")
    ] = None,
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
) -> None:
    """Be a vLLM, TGI or LightLLM server without a model: the same bytes, at times of your choosing.

    Prints `ready URL`, serves until SIGTERM or Ctrl-C, then says how late its tokens left.
    """
    values = locals()
    from servers.simulated import StartError
    from servers.simulated.config import SimulatedConfig
    from servers.simulated.faults import parse_rule
    from servers.simulated.server import run

    times: dict[str, Any] = {f"{name}_s": seconds(values.pop(name)) for name in ("ttft", "itl", "jitter")}
    key, rules = _api_key(values.pop("api_key_env")), values.pop("fault") or ()
    config = SimulatedConfig(**values, **times, api_key=key, faults=tuple(map(parse_rule, rules)))
    try:
        summary = run(config)
    except OSError as problem:
        raise StartError(str(problem)) from None
    late = ", ".join(f"{name} {late_ns / 1e6:.3f} ms" for name, late_ns in summary["late_ns"].items())
    print(f"{summary['requests']} requests, {summary['events']} sends; late {late}")
    if summary["falling_behind"]:
        print("The simulated server did not keep up: its tokens left later than its clock wanted.")


def _api_key(name: str | None) -> str:
    if name is None:
        return ""
    key = os.environ.get(name, "")
    if not key:
        raise BadParameter(f"the environment variable {name} is empty or not set")
    return key
