"""`loadgen burst`: the main job. Every option is a field of the Plan; the help texts are the documentation."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from loadgen.cli import options
from loadgen.cli.assertions import Assertions, Goodput, Junit
from loadgen.cli.distributed import BIND, JOIN_TIMEOUT_S, Bind, Distributed, ExpectWorkers, JoinTimeout, spread_of
from loadgen.cli.output import output_of
from loadgen.cli.run import drive


def burst(
    server: Annotated[str, Option(help=f"Which server answers: {options.SERVERS}.")],
    n: Annotated[int, Option("--n", help="How many requests, all sent at once.")] = 1000,
    url: options.Url = None,
    endpoint: options.Endpoint = None,
    model: options.Model = None,
    input_tokens: options.InputTokens = None,
    output_tokens: options.OutputTokens = None,
    seed: options.Seed = None,
    workers: options.Workers = None,
    timeout_s: options.Timeout = None,
    warmup: options.Warmup = None,
    repeats: options.Repeats = None,
    tokenizer: options.Tokenizer = None,
    api_key_env: options.ApiKeyEnv = None,
    ca_file: options.CaFile = None,
    insecure: options.Insecure = None,
    stamps: options.Stamps = None,
    metrics_every_s: options.MetricsEvery = None,
    dcgm_url: options.DcgmUrl = None,
    gpu: options.Gpu = None,
    server_pid: options.ServerPid = None,
    real: options.Real = None,
    force: options.Force = None,
    speed: options.Speed = None,
    label: Annotated[str, Option(help="A word for the run's folder and report.")] = "burst",
    platform: options.Platform = None,
    out: options.Out = None,
    distributed: Distributed = False,
    expect_workers: ExpectWorkers = 0,
    bind: Bind = BIND,
    join_timeout_s: JoinTimeout = JOIN_TIMEOUT_S,
    assertions: Assertions = None,
    goodput: Goodput = None,
    junit: Junit = None,
    report: options.Report = True,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Send N prompts of exactly the same length all at once and report what came back.

    Exit codes: 0 all complete, 1 some failed or were truncated and no --assert speaks of it, 2 usage, 3 server not
    reachable or not the one named, 4 an --assert failed, 5 the client was the limit, 130 interrupted.
    """
    given = locals()
    from loadgen.plan import Plan, plan_of

    output = output_of(given)
    plan = plan_of(**{name: value for name, value in given.items() if name in Plan.model_fields and value is not None})
    drive(plan, out, output, report=report, spread=spread_of(given))
