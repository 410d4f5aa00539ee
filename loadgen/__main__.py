"""`python -m loadgen`, and the command `loadgen`."""

from __future__ import annotations

import gc
import os

# The module signal takes 6 ms to import, in which Ctrl-C would be a traceback.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]

import loadgen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """The command line, which Ctrl-C ends with 130 from its first import on."""
    _open_standard_streams()
    if getsignal(SIGINT) in (default_int_handler, loadgen._interrupted):  # not where it is ignored
        signal(SIGINT, _interrupted)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # none is wanted, and looking for them takes 20 ms
    gc.set_threshold(100_000)  # what is imported has few cycles, and looking for them takes 12 ms
    from loadgen.cli import main as command

    command()


def _open_standard_streams() -> None:
    """Open /dev/null for standard streams that are closed. Otherwise the next file or socket would get their number,
    and what is printed would end up in it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number


def _interrupted(_number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":  # which may take an exception for another one
            os.write(2, b"loadgen: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
