"""The run file format, with its writer and its readers. A run file holds one record per request."""
