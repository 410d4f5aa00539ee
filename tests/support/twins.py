"""Runs of a simulated server that batches, and the twin that `loadgen twin fit` makes of two of these runs."""

from __future__ import annotations

from pathlib import Path

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import burst, in_process
from tests.support.simulated import running

LOADS: dict[str, tuple[str, ...]] = {
    "burst": ("--n", "32"),
    "closed": ("--arrivals", "closed:2", "--n", "20", "--seed", "1"),
    "again": ("--n", "32"),
    "poisson": ("--arrivals", "poisson:10", "--n", "30", "--seed", "2"),
}
"""Options of each run, by the name of the run's folder."""


def fit_twin(folder: Path, *names: str) -> None:
    """Measure the loads `names` and fit a twin to the runs `burst` and `closed`.

    The twin is `twin.json`, its page `fit.html`, and the output of the command `told.txt`.
    """
    with running(SimulatedConfig(server="vllm", clock="batching", gpu="H100", model_shape="llama-3.1-8b")) as server:
        for name in names:
            (folder / name).mkdir()
            more = ("--url", server.url, "--output-tokens", "32", "--quiet")
            command = "run" if "--arrivals" in LOADS[name] else "burst"
            code, _, problems = burst(folder / name, *LOADS[name], *more, command=command)
            assert code in {0, 5}, problems
    code, out, problems = in_process(folder, "twin", "fit", "burst/run", "closed/run", "--page", "fit.html")
    assert code == 0, problems
    (folder / "told.txt").write_text(out)
