"""Every option that names a file refuses what is no file, before anything is sent, and reads pipes."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, in_process, loadgen
from tests.support.simulated import running

BURST = ("burst", "--server", "vllm", "--n", "2", "--out", "run")
COMMANDS = [
    (*BURST, "--input-tokens", "empirical:FILE"),
    (*BURST, "--output-tokens", "max:empirical:FILE"),
    *((*BURST, "--workload", f"{kind}:FILE") for kind in ("sharegpt", "alpaca", "jsonl", "multi-turn")),
    ("run", "--server", "vllm", "--arrivals", "trace:FILE", "--out", "run"),
    (*BURST, "--tokenizer", "FILE"),
    (*BURST, "--ca-file", "FILE"),
    (*BURST, "--extra-body", "@FILE"),
    ("run", "FILE"),
    ("plan-capacity", "--rate", "1", "FILE"),
    ("simulate", "--twin", "FILE"),
    ("ui", "--server", "vllm", "--headless", "--run-time", "1s", "--locustfile", "FILE"),
    ("sweep", "FILE"),
    ("matrix", "FILE"),
    ("report", "FILE"),
    ("compare", "FILE", "FILE"),
    ("export", "FILE", "--csv", "csv"),
    ("limits", "--hardware", "FILE"),
    ("twin", "check", "FILE", "run"),
    ("servers", "status", "--hosts", "FILE"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[-2:]))
def test_a_device_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Exit code 2, and a message that names the path and says that it is a device. No run is begun."""
    code, out, err = in_process(tmp_path, *(word.replace("FILE", "/dev/zero") for word in words))
    assert code == 2, (out, err)
    assert "/dev/zero" in err
    assert "it is a device" in " ".join(err.split())
    assert not (tmp_path / "run").exists()


def test_files_of_a_run_folder_that_are_no_files(tmp_path: Path) -> None:
    """A pipe or a device in a run folder that somebody sent does not stop `loadgen report`, which says what it is."""
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "run.jsonl")
    code, _, err = in_process(tmp_path, "report", "run")
    assert (code, "run.jsonl: it is a pipe; name a regular file" in err) == (2, True), err


def _to_pipe(pipe: Path, text: str) -> None:
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=(text,), daemon=True).start()


def test_two_workers_read_the_same_pipe(tmp_path: Path) -> None:
    """Both workers draw from everything that came through a pipe, also where the run has no count of requests."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        common = ("--server", "vllm", "--url", simulated.url, "--workers", "2", "--no-report", "--output-tokens", "2")
        _to_pipe(tmp_path / "lengths", "".join(f"{number}\n" for number in range(30, 40)))
        words = ("burst", *common, "--n", "40", "--seed", "1", "--out", "one", "--input-tokens", "empirical:lengths")
        loadgen(tmp_path, *words)
        (tmp_path / "file").write_text("".join(f"{number}\n" for number in range(30, 40)))
        words = ("burst", *common, "--n", "40", "--seed", "1", "--out", "two", "--input-tokens", "empirical:file")
        loadgen(tmp_path, *words)
        prompts = "".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(30))
        _to_pipe(tmp_path / "prompts", prompts)
        words = ("run", *common, "--arrivals", "closed:4", "--duration", "30s", "--out", "three")
        loadgen(tmp_path, *words, "--workload", "jsonl:prompts")
    runs = [runfile.read(tmp_path / name).records for name in ("one", "two", "three")]
    drawn = [sorted((record.id, record.prompt_tokens_asked) for record in records) for records in runs]
    assert [number for number, _ in drawn[0]] == [*range(40)]
    assert drawn[0] == drawn[1]
    assert [number for number, _ in drawn[2]] == [*range(30)]
