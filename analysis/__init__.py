"""What it means: metrics, statistics and reports."""
