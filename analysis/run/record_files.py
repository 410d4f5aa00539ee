"""Files in which a worker stores the Records of a long run (--soak) during the run.

`records-<worker>-<number>.jsonl` contains Records in the order in which the requests ended. Later the file is
compressed to `records-<worker>-<number>.jsonl.gz`. These files stay in the folder of the run, next to `run.jsonl`.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from loadgen.workloads.input_files import open_input

COMPRESSED = ".gz"


def record_file(folder: Path, worker: int, number: int) -> Path:
    """Return the path of a file with Records of a worker. `number` counts the files of this worker, from 1."""
    return folder / f"records-{worker}-{number:06}.jsonl"


def record_files(folder: Path, worker: int | None = None) -> list[Path]:
    """Return the files of completed Records in a folder.

    If `worker` is given, only the files of this worker are returned. The files of a worker are in order, the oldest one
    first. If a file was compressed, only the compressed file is returned.
    """
    files = sorted(folder.glob(f"records-{'*' if worker is None else worker}-*.jsonl*"))
    names = {file.name for file in files}
    return [file for file in files if file.name.endswith((".jsonl", ".jsonl.gz")) and f"{file.name}.gz" not in names]


def plain_name(name: str) -> str:
    """Return the name that a file of Records had before it was compressed."""
    return name.removesuffix(COMPRESSED)


def worker_of(file: Path) -> int:
    """Return the number of the worker that wrote a file of Records."""
    return int(file.name.split("-")[1])


@contextmanager
def open_records(file: Path, *, pipes: bool = False) -> Iterator[IO[bytes]]:
    """Open a run file or a file of Records for reading. A file whose name ends in `.gz` is decompressed.

    If `file` does not exist, the file with `.gz` after its name is opened, because `file` may have been compressed in
    the meantime. `pipes` is True if `file` may be a pipe. Raises OSError if the file cannot be read.
    """
    try:
        opened = open_input(file, pipes=pipes)
    except FileNotFoundError:
        file = file.with_name(file.name + COMPRESSED)
        opened = open_input(file, pipes=pipes)
    with opened as stream:
        if not file.name.endswith(COMPRESSED):
            yield stream
            return
        with gzip.GzipFile(fileobj=stream) as content:
            yield cast("IO[bytes]", content)
