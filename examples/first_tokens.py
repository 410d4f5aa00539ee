"""Reads a run file and prints when first tokens arrived, and how late the client read them.

python examples/first_tokens.py runs/20260101T120000Z-tgi-burst
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from loadgen.analysis.run.runfile import read

run = read(Path(sys.argv[1]))
complete = [record for record in run.records if record.state == "complete" and record.sent_ns is not None]
if not complete:
    sys.exit(f"none of {len(run.records)} requests was complete")

first_token_s = sorted((record.chunk_ns[0] - (record.sent_ns or 0)) / 1e9 for record in complete)
late_ms = max(record.late_ns_max for record in complete) / 1e6

print(f"{run.header.server['name']}: {len(complete)} of {len(run.records)} requests complete")
print(
    f"first token after {first_token_s[0]:.3f} s (fastest), {median(first_token_s):.3f} s (median), "
    f"{first_token_s[-1]:.3f} s (slowest)"
)
print(f"read at most {late_ms:.3f} ms after the kernel received it")
