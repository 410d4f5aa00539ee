"""Generates the requests of a load test: their content, and the times at which they are sent."""
