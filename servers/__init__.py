"""Servers under test: protocols, transport, telemetry, launching, and the simulated servers."""
