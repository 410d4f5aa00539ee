"""Moved to analysis.frame (Frame.span_ns)."""

from analysis.frame import Frame


def window_ns(frame: Frame) -> tuple[float, float] | None:
    """The window's ends."""
    return frame.span_ns
