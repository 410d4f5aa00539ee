"""What went wrong, concluded from what Docker and the servers print, and what to do about it.

Each table is read from the top; the first pattern that is found wins. Wording was taken from the sources and issue
trackers of Docker, Compose, the NVIDIA container toolkit, PyTorch, vLLM, TGI and LightLLM.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Finding(NamedTuple):
    """A known failure."""

    pattern: str
    """Regular expression, small and capital letters alike."""
    what: str
    """What it means; groups of the pattern are filled in."""
    hint: str
    """What to do."""


_TAKEN = (
    "`ss -ltnp` there says by whom: end it (loadgen servers down), or move the server with VLLM_PORT, TGI_PORT or "
    "LIGHTLLM_PORT in the host's env"
)
DOCKER = (
    Finding(
        r"unknown command: docker compose|'compose' is not a docker command|unknown shorthand flag: '\w+' in -\w"
        r"|unknown flag: --(?:short|file)",
        "the Compose plugin of Docker is missing",
        "install it (package docker-compose-plugin), or start without Docker: --launch process",
    ),
    Finding(
        r'context "([^"]+)": context not found|context "([^"]+)" does not exist',
        "there is no Docker context {0}",
        'make it with `docker context create {0} --docker host=ssh://USER@HOST`, or name docker = "ssh://USER@HOST"',
    ),
    Finding(
        r"stderr=.*(Permission denied \([^)]*\)|Host key verification failed)",
        "ssh does not let us in: {0}",
        "log in once by hand (`ssh USER@HOST docker version`): a key is needed, and the host's key must be known",
    ),
    Finding(
        r"stderr=(?:ssh: )?(.*(?:Connection refused|timed out|Could not resolve hostname|No route to host).*)",
        "the host cannot be reached by ssh: {0}",
        "check the name under `docker` in the hosts file, and that `ssh USER@HOST` works",
    ),
    Finding(
        r"command \[ssh .*exit status \d+.*stderr=(.*)",
        "Docker on the host does not answer through ssh: {0}",
        "`ssh USER@HOST docker version` must work: install Docker there, and let that user use it (group docker)",
    ),
    Finding(
        r"permission denied while trying to connect to the docker (?:daemon|API)",
        "this user may not use Docker",
        "add the user to the group docker (`sudo usermod -aG docker $USER`, then log in again)",
    ),
    Finding(
        r"Cannot connect to the Docker daemon|Is the docker daemon running|error during connect",
        "no Docker engine answers",
        "start it (`sudo systemctl start docker`), or name another host: --host",
    ),
    Finding(
        r"could not select device driver|unknown or invalid runtime name: nvidia|nvidia-container-cli: "
        r".*initiali[sz]ation|nvidia-container-runtime.*not found|failed to discover GPU|AMD CDI spec not found",
        "Docker there has no GPU runtime",
        "install the NVIDIA Container Toolkit on the GPU host, run "
        "`sudo nvidia-ctk runtime configure --runtime=docker` and restart Docker; "
        "`docker run --rm --gpus all ubuntu nvidia-smi` must work",
    ),
    Finding(
        r"nvidia-container-cli: device error: (.*?unknown device)|unresolvable CDI devices (\S+)",
        "the GPU asked for is not there: {0}",
        "look at `nvidia-smi -L` on the host and name the GPU under `gpus` in the hosts file",
    ),
    Finding(
        r"(?:Bind for |listen tcp4? |failed to bind host port (?:for )?|exposing port TCP )"
        r"((?:\d+\.){3}\d+:\d+|\[[0-9a-f:]+\]:\d+).*?"
        r"(?:port is already allocated|address already in use)",
        "the port {0} is taken on that host",
        _TAKEN,
    ),
    Finding(
        r"port is already allocated|address already in use",
        "the port is taken on that host",
        _TAKEN,
    ),
    Finding(
        r"cannot assign requested address",
        "the host has not the address that its ports should be bound to",
        "set BIND in the host's env to an address that the machine has itself",
    ),
    Finding(
        r"manifest for (\S+) not found|manifest unknown|pull access denied for (\S+?),|failed to resolve reference "
        r'"([^"]+)".*not found|No such image: (\S+)',
        "there is no image {0}",
        "set another tag in the host's env (VLLM_TAG, TGI_TAG, LIGHTLLM_TAG), or load the image with `docker load`",
    ),
    Finding(
        r"(?:dial tcp|lookup|Get \"https://)[^\n]*(?:i/o timeout|no such host|connection refused"
        r"|TLS handshake timeout)",
        "the registry of the image cannot be reached from that host",
        "give the host a way out or a registry mirror, or load the image there with `docker load`",
    ),
    Finding(
        r"external volume \"?([\w.-]+)\"? not found|no such volume: ([\w.-]+)",
        "the volume {0} with the models is missing on that host",
        "name the folder as model_dir in the hosts file, or make the volume: "
        "docker volume create --opt type=none --opt o=bind --opt device=/srv/models {0}",
    ),
    Finding(
        r"no such file or directory[^\n]*mount|failed to mount local volume: mount ([^:]+):",
        "the model folder is missing on that host: {0}",
        "model_dir in the hosts file names a folder of that host, not of this machine",
    ),
    Finding(
        r"no space left on device",
        "the disk of that host is full",
        "`docker system df` there shows what images and volumes take",
    ),
    Finding(
        r"required variable (\S+) is missing a value",
        "docker-compose.yml wants {0}",
        "put it into the host's env in the hosts file",
    ),
    Finding(
        r"no such service: (\S+)",
        "docker-compose.yml has no service {0}",
        "name the right file with --file",
    ),
)
"""What `docker` and `docker compose` print when they fail."""

LOGS = (
    Finding(
        r"CUDA out of memory|OutOfMemoryError|Free memory on device|No available memory for the cache blocks"
        r"|not enough (?:gpu )?memory|CUDA error: out of memory|KV cache is needed, which is larger than the available"
        r"|estimated maximum model length is",
        "the GPU has not enough free memory for this model",
        "look for other processes with nvidia-smi, start one server per GPU, or choose a smaller model or MAX_LENGTH",
    ),
    Finding(
        r"No CUDA GPUs are available|Failed to infer device type|Found no NVIDIA driver|no CUDA-capable device",
        "the server finds no GPU",
        "check nvidia-smi, and the NVIDIA Container Toolkit where it runs in a container",
    ),
    Finding(
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"
        r"|forward compatibility was attempted|requirement error: unsatisfied condition: cuda",
        "the GPU driver of that host is too old for this version of the server",
        "update the driver, or choose an older image with VLLM_TAG, TGI_TAG or LIGHTLLM_TAG",
    ),
    Finding(
        r"address already in use",
        "its port is taken",
        "`ss -ltnp` says by whom; end that, or choose another with --port",
    ),
    Finding(
        r"No module named '?([\w.]+)",
        "that Python environment misses a module: {0}",
        "name the Python that has the server installed: --python PATH",
    ),
    Finding(
        r"unrecognized arguments: (.*)|unexpected argument '([^']+)'",
        "this version of the server does not know {0}",
        "leave the option out, or use another version of the server",
    ),
    Finding(
        r"not a valid model identifier|HFValidationError|Repository Not Found|does not appear to have a file named"
        r"|config\.json.*not (?:found|exist)|No such file or directory: '([^']*config\.json)'|LocalEntryNotFoundError"
        r"|Invalid repository ID or local directory",
        "the model is not where the server looks",
        "compose: --model names a folder of the volume with the models; process: a folder, or a name on the Hub",
    ),
    Finding(
        r"GatedRepoError|401 Client Error|Access to model .* is restricted",
        "the model may only be downloaded with a token",
        "download it beforehand, or set HF_TOKEN in the environment",
    ),
    Finding(
        r"Bus error|No space left on device.*(?:shm|psm_)|unable to (?:open|allocate) shared memory",
        "its shared memory is too small",
        "raise shm_size in docker-compose.yml",
    ),
)
"""What the servers print into their logs when they do not come up."""


def find(text: str, table: Sequence[Finding]) -> tuple[str, str] | None:
    """What happened and what to do, or None for something that is in no line of the table."""
    for finding in table:
        if found := re.search(finding.pattern, text, re.IGNORECASE):
            group = next((each for each in found.groups() if each), "").strip()
            return finding.what.replace("{0}", group).rstrip(" :"), finding.hint.replace("{0}", group or "NAME")
    return None


def tail(text: str, lines: int = 25) -> str:
    """The last lines of a log, without empty ones, each cut to a length that can be read."""
    kept = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(line if len(line) <= 400 else line[:400] + " ..." for line in kept[-lines:])
