"""Exit codes, and base classes of the errors that end a command.

The exit code is 2 for the errors in this module, `loadgen.workloads.prompts.PromptError` and
`loadgen.analysis.run.errors.RunFileError`. The exit code is 3 for errors about the tested server
(`loadgen.servers.errors`), except for these three, whose exit code is 2:

- The plan exceeds the server's limits.
- The plan's endpoint gives misleading results in this server version.
- The hosts file has a mistake.

A failed request does not raise an error. It is recorded as a Record with an error kind
(`loadgen.analysis.run.record.ERROR_KINDS`).
"""

from __future__ import annotations

from loadgen.analysis.run.errors import OutputError
from loadgen.workloads.errors import LoadgenError

__all__ = ["LoadgenError", "OpenFilesError", "OutputError", "PlanError", "PortsError", "install_hint"]

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


def install_hint(extra: str) -> str:
    """Return the command that installs an optional dependency group of loadgen, such as `ui`.

    The command installs loadgen from the source of the current installation: a clone, a Git URL, a wheel or a package
    index. pip records this source in direct_url.json (https://peps.python.org/pep-0610).
    """
    import json
    from importlib import metadata  # takes 40 ms, which other commands save
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    origin = json.loads(metadata.distribution("llm-loadgen").read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        clone = Path(unquote(urlsplit(url).path))
        place = f"In {clone}" if clone.is_dir() else "In a clone of loadgen"
        option = "-e " if origin["dir_info"].get("editable") else ""
        return f"{place}: pip install {option}'.[{extra}]'"
    source = ""
    if "vcs_info" in origin:
        source = f" @ {origin['vcs_info']['vcs']}+{url}"
    elif url:
        source = f" @ {url}"
    return f"pip install 'llm-loadgen[{extra}]{source}'"
