"""Comparing runs: is B another than A, by how much, and what can be told from so many samples."""
