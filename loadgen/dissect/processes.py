"""Several processes that share the work: gloo between CPUs, NCCL between GPUs."""

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

_Result = TypeVar("_Result")


def run_in_processes(
    work: Callable[[Any], _Result], asked: Any, count: int, device: str, threads: int | None
) -> _Result:
    """What `work`, a function of a module, makes of `asked` in the first of so many processes that each do it."""
    if device == "cuda" and count > torch.cuda.device_count():
        raise DissectError(
            f"{count} processes need as many GPUs, and torch sees {torch.cuda.device_count()}",
            "Choose fewer, or --device cpu.",
        )
    each = threads or max(1, len(os.sched_getaffinity(0)) // count)
    if count == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(each)
        try:
            return work(asked)
        finally:
            torch.set_num_threads(before)
            if device == "cuda":  # the next may run in processes of their own, on the same GPU
                gc.collect()
                torch.cuda.empty_cache()
    with TemporaryDirectory(prefix="loadgen-") as folder:
        arguments = (work, asked, count, device, each, folder)
        try:
            multiprocessing.spawn(_one, arguments, nprocs=count)
        except multiprocessing.ProcessRaisedException as problem:
            raise DissectError(f"a process ended early: {str(problem).strip()[-1500:]}") from None
        result = pickle.loads(Path(folder, "found").read_bytes())  # noqa: S301 - our own process wrote it
    if isinstance(result, Exception):
        raise result
    answer: _Result = result
    return answer


def _one(rank: int, work: Callable[[Any], Any], asked: Any, count: int, device: str, threads: int, folder: str) -> None:
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank)
    meeting, backend = f"file://{folder}/meeting", "nccl" if device == "cuda" else "gloo"
    where = torch.device(device, rank) if device == "cuda" else None  # one GPU each, connected at once
    distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=count, device_id=where)
    try:
        result = work(asked)
    except (LoadgenError, HardwareError) as problem:
        result = problem
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo may still run, and C++ aborts an interpreter that ends meanwhile
