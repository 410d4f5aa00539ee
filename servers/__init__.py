"""The servers under test: protocols, transport, telemetry, launching and simulation."""
