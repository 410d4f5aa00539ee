"""Reads runs and computes metrics, statistics, comparisons and reports."""
