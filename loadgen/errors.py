"""What can go wrong before or beside the requests, and the exit codes.

All of these exit with 2, as do loadgen.workloads.prompts.PromptError and loadgen.analysis.run.errors.RunFileError;
errors about the server under test (loadgen.servers.errors) exit with 3, but with 2 where the plan asks for more than
its limits, or for an endpoint that is known to mislead in its version, or where the hosts file is wrong. A failed
request never raises: it becomes a Record with a kind (loadgen.analysis.run.record.ERROR_KINDS).
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
    """The plan or the command line is wrong; the message lists every mistake."""


class OpenFilesError(LoadgenError):
    """This machine does not allow as many sockets as the plan needs."""


class PortsError(LoadgenError):
    """This machine has fewer local ports than the plan has requests in flight at once."""
