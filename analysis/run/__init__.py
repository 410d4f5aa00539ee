"""The run file: its records, its lines, its writer and its readers."""
