"""The run file format, its writer and its readers. A run file holds one record per request."""
