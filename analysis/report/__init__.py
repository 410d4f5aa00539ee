"""The report: one or several Runs as one self-contained HTML page."""
