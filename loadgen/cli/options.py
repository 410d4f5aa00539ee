"""The options that `burst` and `run` share. Each is a field of the Plan of that name; None leaves it at its default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from loadgen.cli.quantities import seconds, span
from servers.kinds import KINDS, any_of

SERVERS = any_of(KINDS)

N = Annotated[int | None, Option("--n", help="How many requests; or sessions, where these are asked.")]
Arrivals = Annotated[
    str | None,
    Option(
        help="When requests are due: burst, burst:N/T, constant:R, poisson:R, gamma:R,cv=C, ramp:A..B/T, "
        "steps:R1@T1,R2@T2,..., closed:N[,think=S] or trace:FILE."
    ),
]
Duration = Annotated[
    float | None, Option("--duration", parser=seconds, metavar="T", help="Nothing is due later than this.")
]
Workload = Annotated[
    str | None,
    Option(
        help="What is asked: synthetic, shared-prefix:groups=G,tokens=P, sharegpt:FILE, jsonl:FILE, "
        "multi-turn:turns=K (sessions), ..."
    ),
]
InputTokens = Annotated[
    str | None,
    Option(
        help="Prompt lengths, exact by the server's own tokenizer: a number (512 by default), uniform:A..B, "
        "lognormal:mean=M,cv=C, empirical:FILE, ..."
    ),
]
OutputTokens = Annotated[str | None, Option(help="Tokens to generate, likewise; 128 by default.")]
Warmup = Annotated[int | None, Option(help="Requests to send before the clock starts; in no figure.")]
MaxInFlight = Annotated[int | None, Option(help="Past it a request that is due is dropped, and counted.")]
Window = Annotated[Any, Option("--window", parser=span, metavar="T..T", help="What the figures are of; else chosen.")]
Url = Annotated[
    str | None,
    Option(
        help="Where it is, such as http://127.0.0.1:8002. Without it: LOADGEN_<SERVER>_URL, then the port that "
        "docker-compose.yml publishes, then the built-in simulated server."
    ),
]
Endpoint = Annotated[str | None, Option(help="completions, chat or generate; the server's native one by default.")]
Model = Annotated[str | None, Option(help="Model name to ask for; the server's first one by default.")]
Seed = Annotated[int | None, Option(help="The same seed gives byte-identical requests and due instants.")]
Workers = Annotated[int | None, Option(help="Processes that share the load.")]
Timeout = Annotated[
    float | None,
    Option("--timeout", parser=seconds, metavar="T", help="After which one request is given up; 600s by default."),
]
Repeats = Annotated[int | None, Option(help="Run it so often, each time with the next seed: see docs.")]
Tokenizer = Annotated[Path | None, Option(help="A tokenizer.json to build prompts with.")]
ApiKeyEnv = Annotated[
    str | None, Option(help="Environment variable that holds the API key; LOADGEN_API_KEY by default.")
]
CaFile = Annotated[Path | None, Option(help="Certificate authorities for https, in PEM.")]
Insecure = Annotated[bool | None, Option("--insecure", help="Do not check certificates.")]
Stamps = Annotated[
    str | None, Option(help="kernel, or user: what the figures would be without the kernel's receive stamps.")
]
MetricsEvery = Annotated[
    float | None,
    Option(
        "--metrics-every",
        parser=seconds,
        metavar="T",
        help="How often the server's /metrics, GPUs and memory are read during the run: 1s by default, and at most; "
        "0 is never.",
    ),
]
DcgmUrl = Annotated[
    str | None, Option(help="A DCGM exporter on the server's machine, such as http://gpu-host:9400, for its GPUs.")
]
Gpu = Annotated[
    bool | None,
    Option("--gpu/--no-gpu", help="Read this machine's GPUs through NVML; by default when the server is on it."),
]
ServerPid = Annotated[
    list[int] | None,
    Option(help="A server process on this machine, whose memory is read with that of its children; repeatable."),
]
Real = Annotated[bool | None, Option("--real", help="Never fall back to the simulated server.")]
Force = Annotated[bool | None, Option("--force", help="Measure a version of a server that is known to mislead.")]
Speed = Annotated[
    float | None, Option(help="How many times faster the built-in simulated server's clock runs; 5 by default.")
]
Label = Annotated[str | None, Option(help="A word for the run's folder and report.")]
Platform = Annotated[str | None, Option(help="What the server runs on, such as A800; stands by its name.")]
Out = Annotated[Path | None, Option(help="Folder for this run; must be new. Default: runs/<time>-<server>-<label>.")]
Report = Annotated[bool, Option("--report/--no-report", help="Write report.html.")]
AsJson = Annotated[bool, Option("--json", help="Print summary.json and nothing else.")]
Quiet = Annotated[bool, Option("--quiet", help="Print nothing but errors.")]
