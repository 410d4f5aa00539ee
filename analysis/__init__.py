"""Analysis of runs: reads run files and computes metrics, statistics, comparisons and reports."""
