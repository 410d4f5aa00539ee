"""Sends one burst to each of two servers from Python. Prints figures and slowest requests, and compares the servers.

pip install -e '.[notebook]'            # pandas for the table of slowest requests, plotly for the chart
python3 examples/notebook.py            # uses two simulated servers
"""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

from loadgen import Plan, compare, run, simulated

folder = Path(mkdtemp())
results = []
for ttft_s in (0.05, 0.1):
    with simulated("vllm", ttft_s=ttft_s, itl_s=0.01) as url:
        plan = Plan(server="vllm", url=url, n=40, input_tokens=64, output_tokens=16)
        results.append(run(plan, out=folder / f"ttft-{ttft_s}"))

for result in results:
    summary = result.summary
    print(f"{summary.requests.complete} of {summary.requests.planned} complete, client {summary.client.verdict}")
    print(f"TTFT p50 {summary.latency.ttft.p50:.3f} s, p90 {summary.latency.ttft.p90:.3f} s")
print("Slowest first tokens, in seconds:")
print(results[0].frame().nlargest(3, "ttft_s")[["request", "ttft_s", "e2e_s"]])
for row in compare(*results).rows:
    form = {"s": "{:.4g} s", "per second": "{:.4g} /s", "share": "{:.2%}"}[row.unit]
    a, b = ("-" if value is None else form.format(value) for value in (row.a, row.b))
    print(f"{row.figure:20} A {a:12} B {b:12} {row.verdict}")
print("Chart:", results[0].figure("ttft").layout.title.text)  # in a notebook, write the figure alone to draw it
print("Report:", results[0].report())
