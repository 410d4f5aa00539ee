"""Answers three questions about a run, each with pandas and with SQL in DuckDB.

pip install -e '.[parquet,notebook]' duckdb
loadgen export runs/20260101T120000Z-tgi-burst --parquet tables
python examples/questions.py tables
"""

from __future__ import annotations

import sys
from pathlib import Path

import duckdb
import pandas as pd

folder = Path(sys.argv[1])
requests = pd.read_parquet(folder / "requests.parquet")
chunks = pd.read_parquet(folder / "chunks.parquet")
sql = duckdb.connect()
for name in ("requests", "chunks"):
    sql.execute(f"create view {name} as from '{folder / name}.parquet'")

# %% 1. Does a request wait longer the later it was sent? Median TTFT of each tenth of the queue.
complete = requests[(requests.phase == "measured") & (requests.state == "complete")].sort_values("sent_ns")
tenth = [position * 10 // len(complete) + 1 for position in range(len(complete))]
by_pandas = complete.groupby(tenth).ttft_s.median().round(10)
by_duckdb = sql.sql("""
    with queue as (
        select ttft_s, (row_number() over (order by sent_ns) - 1) * 10 // count(*) over () + 1 as tenth
        from requests where phase = 'measured' and state = 'complete')
    select tenth, round(median(ttft_s), 10) as ttft_s from queue group by tenth order by tenth
""").df()
print("1. Median TTFT by tenth of the queue, s")
print(pd.DataFrame({"pandas": by_pandas, "DuckDB": by_duckdb.set_index("tenth").ttft_s}).to_string())

# %% 2. When did the server stall? The longest gaps between chunks, and the number of streams that waited at that time.
longest = chunks.nlargest(3, "gap_ns")[["request", "at_ns", "gap_ns"]]
waiting = [
    int(((chunks.at_ns > end - gap) & (chunks.at_ns - chunks.gap_ns <= end - gap)).sum())
    for end, gap in zip(longest.at_ns, longest.gap_ns, strict=True)
]
by_duckdb = sql.sql("""
    with longest as (from chunks order by gap_ns desc, at_ns limit 3)
    select longest.request, longest.gap_ns, count(*) as waiting from longest join chunks
        on chunks.at_ns > longest.at_ns - longest.gap_ns
        and chunks.at_ns - chunks.gap_ns <= longest.at_ns - longest.gap_ns
    group by all order by longest.gap_ns desc
""").df()
print("\n2. Longest gaps in ms, and the number of streams between two chunks when the gap began")
print(
    pd.DataFrame({"gap": longest.gap_ns.to_numpy() / 1e6, "pandas": waiting, "DuckDB": by_duckdb.waiting}).to_string()
)

# %% 3. How many tokens arrived in each second?
second = chunks.at_ns // 1_000_000_000
by_pandas = chunks.groupby(second).tokens.sum()
by_duckdb = sql.sql("""
    select at_ns // 1000000000 as second, sum(tokens)::bigint as tokens from chunks group by second order by second
""").df()
print("\n3. Output tokens per second of the run")
print(pd.DataFrame({"pandas": by_pandas, "DuckDB": by_duckdb.set_index("second").tokens}).to_string())
