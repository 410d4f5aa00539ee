"""Commands of --at during a run: the shell gets the original text, the run stores none of its secrets."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import start, wait_for
from tests.support.simulated import running

KEY, TYPED = "sk-soak-0123456789", "tok3n-that-is-typed"


def test_commands_run_during_the_load(tmp_path: Path) -> None:
    """The command runs as it was written. Neither the API key that it prints nor the secret that it contains is
    stored. A command that was not due before the end is a note of the report."""
    done = tmp_path / "done"
    command = f"echo $LOADGEN_API_KEY; TOKEN={TYPED}; echo ${{#TOKEN}} $TOKEN; echo $TOKEN > part; mv part {done}"
    with running(SimulatedConfig(server="vllm", ttft_s=0.01, itl_s=0.001)) as server:
        load = (
            "--url",
            server.url,
            "--rate",
            "20",
            "--duration",
            "10m",
            "--output-tokens",
            "4",
            "--input-tokens",
            "16",
        )
        commands = ("--at", "100ms", command, "--at", "9m", "echo never")
        process = start(tmp_path, *load, *commands, command="run", LOADGEN_API_KEY=KEY)
        wait_for(done.exists, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert done.read_text() == f"{TYPED}\n"
    [record] = runfile.read(tmp_path / "run").commands
    assert record.command.startswith("echo $LOADGEN_API_KEY; TOKEN=***; echo ")
    assert record.output == f"***\n{len(TYPED)} ***\n"
    assert record.at_ns >= 100_000_000
    note = "The command of --at 540s did not run: the run ended before it was due"
    assert note in json.loads((tmp_path / "run" / "summary.json").read_text())["run"]["notes"]
    assert f"{note}." in " ".join(out.split())
    stored = "".join(file.read_text() for file in (tmp_path / "run").glob("*.json*"))
    assert TYPED not in stored + out + err
    assert KEY not in stored + out + err
    assert not list((tmp_path / "run").glob("part-*"))
