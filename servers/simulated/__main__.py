"""Runs a simulated server as the child process that `loadgen.servers.simulated.process` starts."""

from loadgen.servers.simulated.server import child

child()
