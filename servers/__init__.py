"""Whom we ask: dialects, transport, probes and the simulated servers."""
