"""Runs a measurement in one process, or in several processes that share the work.

Processes communicate through gloo between CPUs, and through NCCL between GPUs.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import distributed, multiprocessing

from loadgen.dissect import DissectError
from loadgen.errors import LoadgenError
from loadgen.servers.hardware import HardwareError

_T = TypeVar("_T")


def run_in_processes(measure: Callable[[Any], _T], argument: Any, count: int, device: str, threads: int | None) -> _T:
    """Call `measure(argument)` in `count` processes, and return the result of the first process.

    If `count` is 1, the current process makes the call. `measure` must be a function at module level, so that other
    processes can import it. `threads` is the number of torch threads per process. By default, the processes share the
    cores evenly. Raises DissectError if there are too few GPUs or a process ends early.
    """
    if device == "cuda" and count > torch.cuda.device_count():
        raise DissectError(
            f"{count} processes need as many GPUs, and torch sees {torch.cuda.device_count()}",
            "Choose fewer processes, or --device cpu.",
        )
    threads = threads or max(1, len(os.sched_getaffinity(0)) // count)
    if count == 1:
        return _run_here(measure, argument, device, threads)
    with TemporaryDirectory(prefix="loadgen-") as folder:
        arguments = (measure, argument, count, device, threads, folder)
        try:
            multiprocessing.spawn(_run_process, arguments, nprocs=count)
        except multiprocessing.ProcessRaisedException as problem:
            raise DissectError(f"a process ended early: {str(problem).strip()[-1500:]}") from None
        outcome = pickle.loads(Path(folder, "result").read_bytes())  # noqa: S301 - our own process wrote it
    if isinstance(outcome, Exception):
        raise outcome
    result: _T = outcome
    return result


def _run_here(measure: Callable[[Any], _T], argument: Any, device: str, threads: int) -> _T:
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return measure(argument)
    finally:
        torch.set_num_threads(previous_threads)
        if device == "cuda":  # the next measurement may use the same GPU from other processes
            gc.collect()
            torch.cuda.empty_cache()


def _run_process(
    rank: int,
    measure: Callable[[Any], Any],
    argument: Any,
    count: int,
    device: str,
    threads: int,
    folder: str,
) -> None:
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank)
    rendezvous = f"file://{folder}/rendezvous"
    backend = "nccl" if device == "cuda" else "gloo"
    device_id = torch.device(device, rank) if device == "cuda" else None  # NCCL connects at once if it is known
    distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=count, device_id=device_id)
    try:
        result = measure(argument)
    except (LoadgenError, HardwareError) as problem:
        result = problem
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo may still run, and a normal exit would then abort in C++
