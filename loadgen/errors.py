"""Exit codes, and base classes of the errors that end a command.

The exit code depends on the error:

- 2: the errors in this module, `loadgen.workloads.prompts.PromptError` and `loadgen.analysis.run.errors.RunFileError`.
- 3: errors about the tested server (`loadgen.servers.errors`).
- 2: those errors about the tested server that the plan has caused. The plan exceeds the server's limits, its endpoint
  gives misleading results in this server version, or the hosts file has a mistake.

A failed request does not raise an error. It is recorded as a Record with an error kind
(`loadgen.analysis.run.record.ERROR_KINDS`).
"""

from __future__ import annotations

from loadgen.analysis.run.errors import OutputError
from loadgen.workloads.errors import LoadgenError

__all__ = ["LoadgenError", "OpenFilesError", "OutputError", "PlanError", "PortsError"]

EXIT_OK = 0
EXIT_REQUESTS_FAILED = 1
EXIT_USAGE = 2
EXIT_SERVER = 3
EXIT_ASSERTION = 4
EXIT_CLIENT_LIMITED = 5
EXIT_INCONCLUSIVE = 6
EXIT_INTERRUPTED = 130


class PlanError(LoadgenError):
    """The plan or the command line is wrong. The message lists every mistake."""


class OpenFilesError(LoadgenError):
    """This machine does not allow a process to open the number of sockets that the plan needs."""


class PortsError(LoadgenError):
    """This machine has fewer local ports than the plan has concurrent requests."""
