"""Entry point of `python -m loadgen` and of the command `loadgen`."""

from __future__ import annotations

import gc
import os

# Importing the module `signal` takes 6 ms, and Ctrl-C in that time would print a traceback.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]

import loadgen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Run the command `loadgen`. Ctrl-C ends the process with exit code 130, even while modules are being imported."""
    _open_standard_streams()
    if getsignal(SIGINT) in (default_int_handler, loadgen._interrupted):  # keep a handler that ignores SIGINT
        signal(SIGINT, _interrupted)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # searching for plugins would take 20 ms
    gc.set_threshold(100_000)  # imports create few reference cycles, and searching for them would take 12 ms
    from loadgen.cli import main as command

    command()


def _open_standard_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed.

    Otherwise the next file or socket that is opened would get the descriptor 0, 1 or 2, and printed text would be
    written to it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open returns the lowest free descriptor


def _interrupted(_number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":  # it may swallow or replace an exception
            os.write(2, b"loadgen: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
