"""Run folders: exclusive claims, unique default names, and free disk space.

A command claims its folder before it contacts the server and holds the claim until all results are written. The claim
is a locked file in the folder. The kernel releases the lock when the process ends, so a killed command does not block
other commands.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from loadgen.errors import OutputError

LOCK_NAME = ".loadgen.lock"
LOCK_WAIT_S = 3.0
"""Time in seconds to wait for the lock of a killed command. Its workers hold the lock until they notice that the
command has been killed."""
LOCK_POLL_S = 0.05
ATTEMPTS_LIMIT = 1_000
"""Maximum number of attempts to lock a file that other commands keep creating and removing."""
NAMES_LIMIT = 10_000
RUNS = Path("runs")
"""Parent of all run folders that have a default name."""


class FolderClaim:
    """An exclusive claim on a folder. No other loadgen command writes to the folder while the claim is held.

    Creating the lock file (O_EXCL) and locking it (flock) are atomic, on NFS too. If the file system does not support
    locks, the process that created the file holds the claim.
    """

    def __init__(self, folder: Path, *, must_be_empty: bool = True, wait_s: float = 0.0) -> None:
        """Claim `folder` for this command, and create it if necessary.

        If another command holds the folder, wait up to `wait_s` seconds. Raises OutputError if the folder is then still
        in use, or if it cannot be written. With `must_be_empty`, also raises OutputError if the folder contains files.
        """
        self._folder = folder
        self._lock = folder / LOCK_NAME
        try:
            self._created = _missing_folders(folder)
            if must_be_empty and not self._lock.exists() and _holds_files(folder):
                raise _not_empty(folder)
            self._file = self._acquire(time.monotonic() + wait_s)
        except OSError as error:
            raise _cannot_make(folder, error) from error
        if must_be_empty and _holds_files(folder):
            self.release()
            raise _not_empty(folder)
        with suppress(OSError):  # the text is for people only, and the disk may be full
            os.ftruncate(self._file, 0)
            owner = f"process {os.getpid()} on {platform.node()}, since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            os.pwrite(self._file, owner.encode(), 0)

    def release(self) -> None:
        """Release the folder. Folders that the claim created are removed if they are empty."""
        if self._file < 0:
            return
        with suppress(OSError):
            self._lock.unlink()  # unlink before unlocking: a waiting process then notices the new file and retries
        os.close(self._file)
        self._file = -1
        with suppress(OSError):  # a folder that is not empty stays
            for folder in self._created:
                folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _acquire(self, until_s: float) -> int:
        """Lock the lock file and return its file descriptor.

        If another command holds the lock, try again until `time.monotonic()` reaches `until_s`. Then raise OutputError.
        """
        problem: OSError = BlockingIOError(errno.EBUSY, os.strerror(errno.EBUSY))
        for _ in range(ATTEMPTS_LIMIT):
            try:
                file, created = self._open()
            except (FileNotFoundError, FileExistsError) as error:
                # Another command has just removed the lock file or the empty folder. If it removed the folder during
                # `mkdir`, `mkdir` failed because the folder existed, although the folder is gone now.
                if isinstance(error, FileExistsError) and self._folder.exists() and not self._folder.is_dir():
                    raise
                problem = error
                continue
            locked = _locked(file, created=created)
            while not locked and time.monotonic() < until_s:
                time.sleep(LOCK_POLL_S)
                locked = _locked(file, created=created)
            if locked and _is_still_there(file, self._lock):
                return file
            owner = os.pread(file, 200, 0).decode(errors="replace")
            os.close(file)
            if not locked:
                raise OutputError(
                    f"another loadgen is writing to {self._folder}{f' ({owner})' if owner else ''}.",
                    "Wait until it ends, or name another folder with --out: no run is overwritten.",
                )
        raise problem

    def _open(self) -> tuple[int, bool]:
        """Open the lock file. Return its file descriptor, and True if this process created the file."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            return os.open(self._lock, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        return os.open(self._lock, flags), False


@contextmanager
def run_folder(out: Path | None, server: str, label: str) -> Iterator[Path]:
    """Yield the folder of a run: `out` if it is given, otherwise a new folder with a default name."""
    if out is not None:
        yield out
        return
    with new_folder(RUNS, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{server}-{label}") as folder:
        yield folder


@contextmanager
def new_folder(parent: Path, name: str) -> Iterator[Path]:
    """Create and yield a new folder: `name`, or `name-2`, `name-3`, ... if that name is taken.

    If the folder is still empty at the end, it is removed. Raises OutputError if the folder cannot be created.
    """
    created = _missing_folders(parent)
    folder = _make_new(parent, name)
    try:
        yield folder
    finally:
        with suppress(OSError):  # a folder that is not empty stays
            for path in (folder, *created):
                path.rmdir()


def check_room(folder: Path, bytes_needed: int) -> None:
    """Raise OutputError if the disk of this folder has fewer than `bytes_needed` bytes free."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OutputError(f"cannot use {folder}: {error.strerror}", "Name another folder with --out.") from error
    if free < bytes_needed:
        raise OutputError(
            f"{folder}: this run needs about {bytes_needed / 1e6:,.1f} MB, but only {free / 1e6:,.1f} MB are free. "
            "Nothing was sent.",
            "Free some space, or name a folder on another disk with --out.",
        )


def _make_new(parent: Path, name: str) -> Path:
    """Create and return the first of the folders `name`, `name-2`, `name-3`, ... that does not exist yet.

    mkdir is atomic, so two commands never get the same folder.
    """
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except OSError as error:
            # The name is taken, or another command has just removed the parent, which was empty.
            retry = isinstance(error, FileNotFoundError) or (isinstance(error, FileExistsError) and parent.is_dir())
            if not retry or number == NAMES_LIMIT:
                raise _cannot_make(folder, error) from error
        else:
            return folder
        number += 1


def _missing_folders(folder: Path) -> list[Path]:
    """Return the folders that must be created so that `folder` exists: those of `folder` and its parents that are
    missing.

    The innermost folder comes first.
    """
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _holds_files(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return any(path.name != LOCK_NAME for path in folder.iterdir())
    return False


def _cannot_make(folder: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot create {folder}: {error.strerror}", "Name a writable folder with --out.")


def _not_empty(folder: Path) -> OutputError:
    return OutputError(f"{folder} exists and is not empty.", "Name a new folder with --out: no run is overwritten.")


def _locked(file: int, *, created: bool) -> bool:
    """Try to lock an open file without waiting. Return True if this process now holds the lock, otherwise False.

    `created` is True if this process has created the file. On a file system without locks, this function returns
    `created`: the process that created the file counts as the holder of the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        return created
    return True


def _is_still_there(file: int, path: Path) -> bool:
    """Return True if `path` still refers to the open file.

    The previous owner may have removed the lock file before this process locked it.
    """
    try:
        return os.path.samestat(os.fstat(file), path.stat(follow_symlinks=False))
    except OSError:
        return False
