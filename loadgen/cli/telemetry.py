"""Options of everything that is read beside the load: the server's metrics, GPUs, memory."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from loadgen.cli.quantities import seconds

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
