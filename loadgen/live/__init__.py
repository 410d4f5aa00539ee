"""The progress of a run while it is measured: in the terminal, as plain lines, and as a local web page.

This package runs in the process that waits for the workers or in a separate process, but never in a worker.
"""
