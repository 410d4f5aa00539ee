"""`loadgen burst`: the main job. Every option is a field of the Plan; the help texts are the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from loadgen.cli.assertions import Assertions, Goodput, Junit
from loadgen.cli.distributed import BIND, JOIN_TIMEOUT_S, Bind, Distributed, ExpectWorkers, JoinTimeout, asked_of
from loadgen.cli.output import output_of
from loadgen.cli.quantities import seconds
from loadgen.cli.run import SERVERS, drive
from loadgen.cli.telemetry import DcgmUrl, Gpu, MetricsEvery, ServerPid


def burst(
    server: Annotated[str, Option(help=f"Which server answers: {SERVERS}.")],
    n: Annotated[int, Option("--n", help="How many requests, all sent at once.")] = 1000,
    url: Annotated[
        str | None,
        Option(
            help="Where it is, such as http://127.0.0.1:8002. Without it: LOADGEN_<SERVER>_URL, then the port that "
            "docker-compose.yml publishes, then the built-in simulated server."
        ),
    ] = None,
    endpoint: Annotated[
        str | None, Option(help="completions, chat or generate; the server's native one by default.")
    ] = None,
    model: Annotated[str | None, Option(help="Model name to ask for; the server's first one by default.")] = None,
    input_tokens: Annotated[str, Option(help="Prompt length, exact by the server's own tokenizer.")] = "512",
    output_tokens: Annotated[str, Option(help="Tokens to generate per request.")] = "128",
    seed: Annotated[int, Option(help="The same seed gives byte-identical requests.")] = 0,
    workers: Annotated[int, Option(help="Processes that share the burst.")] = 1,
    timeout_s: Annotated[
        float, Option("--timeout", parser=seconds, metavar="T", help="After which one request is given up.")
    ] = 600.0,
    warmup: Annotated[int, Option(help="Requests to send before the clock starts; in no figure.")] = 0,
    repeats: Annotated[int, Option(help="Run it so often, each time with the next seed: see docs.")] = 1,
    tokenizer: Annotated[Path | None, Option(help="A tokenizer.json to build prompts with.")] = None,
    api_key_env: Annotated[
        str, Option(help="Environment variable that holds the API key, where one is needed.")
    ] = "LOADGEN_API_KEY",
    ca_file: Annotated[Path | None, Option(help="Certificate authorities for https, in PEM.")] = None,
    insecure: Annotated[bool, Option("--insecure", help="Do not check certificates.")] = False,
    stamps: Annotated[str, Option(help="kernel, or user: figures without the kernel's receive stamps.")] = "kernel",
    metrics_every_s: MetricsEvery = None,
    dcgm_url: DcgmUrl = None,
    gpu: Gpu = None,
    server_pid: ServerPid = None,
    real: Annotated[bool, Option("--real", help="Never fall back to the simulated server.")] = False,
    force: Annotated[bool, Option("--force", help="Measure a version of a server that is known to mislead.")] = False,
    speed: Annotated[float, Option(help="How many times faster the built-in simulated server's clock runs.")] = 5.0,
    label: Annotated[str, Option(help="A word for the run's folder and report.")] = "burst",
    platform: Annotated[str, Option(help="What the server runs on, such as A800; stands by its name.")] = "",
    out: Annotated[
        Path | None, Option(help="Folder for this run; must be new. Default: runs/<time>-<server>-<label>.")
    ] = None,
    distributed: Distributed = False,
    expect_workers: ExpectWorkers = 0,
    bind: Bind = BIND,
    join_timeout_s: JoinTimeout = JOIN_TIMEOUT_S,
    assertions: Assertions = None,
    goodput: Goodput = None,
    junit: Junit = None,
    report: Annotated[bool, Option("--report/--no-report", help="Write report.html.")] = True,
    as_json: Annotated[bool, Option("--json", help="Print summary.json and nothing else.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Send N prompts of exactly the same length all at once and report what came back.

    Exit codes: 0 all complete, 1 some failed or were truncated and no --assert speaks of it, 2 usage, 3 server not
    reachable or not the one named, 4 an --assert failed, 5 the client was the limit, 130 interrupted.
    """
    given = locals()
    from loadgen.plan import Plan, plan_of

    output = output_of(given)
    plan = plan_of(**{name: value for name, value in given.items() if name in Plan.model_fields and value is not None})
    spread = asked_of(distributed, expect_workers, bind, join_timeout_s)
    drive(plan, out, output, report=report, spread=spread)
