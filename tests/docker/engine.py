#!/usr/bin/env python3
"""Run a command with a Docker engine: the one that answers, or else one that is made for it.

    python3 tests/docker/engine.py COMMAND...

The engine is made of Debian packages in `.docker-engine`: a minute the first time, a few seconds afterwards. It runs in
namespaces of its own (network, mounts, processes), so this machine's network, mounts and packages stay as they are but
for mmdebstrap, and it ends with the command. It reaches the network through slirp4netns, a TCP/IP stack of user space.
Nothing is pulled from a registry: what the images are based on is made of Debian packages too. `rm -r .docker-engine`
removes all of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".docker-engine"
ENGINE, PYTHON = HOME / "engine", HOME / "python"
"""Root folders: what the engine runs in, and the image that stands for Docker's `python`."""
SUITES = {
    # The first suite whose Prometheus is a version 3.
    ENGINE: (
        "forky",
        "docker.io,docker-cli,docker-compose,docker-buildx,iptables,slirp4netns,prometheus,busybox-static",
    ),
    PYTHON: (
        "bookworm",
        "python3,python3-venv,ca-certificates,dash,bash,coreutils,sed,grep,findutils,libc-bin,libstdc++6",
    ),
}
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
CGROUP = f"loadgen-test-docker-{os.getpid()}"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0

START = """
set -e
cd {root}
mount --bind . .
cd {root}
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /sys/fs/cgroup sys/fs/cgroup
mount --rbind /dev dev
mount --bind {tmp} tmp
mount -t tmpfs tmpfs run
mkdir -p run/shared old var/lib/docker
mount --bind {shared} run/shared
mount --bind {data} var/lib/docker
ip link set lo up
pivot_root . old
exec /usr/bin/busybox sh -c '/usr/bin/busybox umount -l /old
exec /usr/sbin/dockerd --host unix:///run/shared/docker.sock --exec-root /run/docker --pidfile /run/docker.pid \
    --ip6tables=false --cgroup-parent /{cgroup}'
"""
"""Within the new namespaces: the engine's folder becomes `/`, and dockerd process 1. Models lie in /tmp, as outside."""


class SetupError(Exception):
    """No engine can be made here; the message says what to do about it."""


def main(command: Sequence[str]) -> int:
    """The exit code of the command."""
    if answers(os.environ):
        return subprocess.call(command)
    try:
        check_machine()
        HOME.mkdir(exist_ok=True)
        with (HOME / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another run of this clone ends first
            make_roots()
            with running() as (inside, environment):
                make_images(environment)
                return subprocess.call([*inside, *command], env=environment)
    except SetupError as error:
        print(f"test-docker: no Docker engine answers, and none can be made here: {error}", file=sys.stderr)
        return 1


def answers(environment: Mapping[str, str]) -> bool:
    """Whether a Docker engine and Compose answer."""
    calls = (["docker", "version"], ["docker", "compose", "version"])
    with suppress(FileNotFoundError):
        return not any(subprocess.call(call, env=environment, **SILENT) for call in calls)
    return False


def check_machine() -> None:
    """Raises SetupError unless this machine lets one be made."""
    if sys.platform != "linux" or not shutil.which("apt-get"):
        raise SetupError("that needs Debian or Ubuntu. Start Docker (Engine 25 or later, Compose 2.24 or later).")
    if os.geteuid() != 0:
        raise SetupError("that needs root. Start Docker, or run `sudo make test-docker`.")
    if not Path("/dev/net/tun").exists():
        raise SetupError("there is no /dev/net/tun. In a container, run it with --privileged.")
    missing = [name for name in ("mmdebstrap", "ip", "unshare") if not shutil.which(name)]
    if missing:
        packages = ("mmdebstrap", "debian-archive-keyring", "iproute2", "util-linux")
        run("apt-get", "-q", "update")
        run("apt-get", "-q", "install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *packages)


def make_roots() -> None:
    """Both root folders, unless this very recipe has made them."""
    for folder, (suite, packages) in SUITES.items():
        finish = finish_engine if folder == ENGINE else finish_python
        recipe = f"{suite} {packages} {inspect.getsource(make_roots)} {inspect.getsource(finish)}"
        stamp, stamp_file = hashlib.sha256(recipe.encode()).hexdigest(), folder / "made-from.sha256"
        if stamp_file.exists() and stamp_file.read_text() == stamp:
            continue
        print(f"{folder}: making it of Debian packages ...", flush=True)
        began_s = time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        valid = 'Acquire::Check-Valid-Until "false"'  # mirrors may be frozen
        run(
            "mmdebstrap",
            "--quiet",
            "--variant=extract",
            f"--aptopt={valid}",
            f"--include={packages}",
            suite,
            str(folder),
        )
        for name in ("proc", "sys", "run", "tmp", "root", "etc"):
            (folder / name).mkdir(exist_ok=True)
        for name in ("bin", "sbin", "lib", "lib64"):  # what the package base-files would bring
            if not (folder / name).exists():
                (folder / name).symlink_to(f"usr/{name}")
        (folder / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
        (folder / "etc/group").write_text("root:x:0:\ndocker:x:999:\nnogroup:x:65534:\n")
        if (Path("/") / CERTIFICATES).exists():
            (folder / CERTIFICATES).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path("/") / CERTIFICATES, folder / CERTIFICATES)
        finish(folder)
        stamp_file.write_text(stamp)
        print(f"{folder}: made in {time.monotonic() - began_s:.0f} s", flush=True)


def finish_engine(folder: Path) -> None:
    """What the packages would have set up; and a runtime hook that lets reservations of GPUs succeed."""
    (folder / "usr/sbin/iptables").symlink_to("xtables-nft-multi")
    (folder / "etc/resolv.conf").write_text("nameserver 10.0.2.3\n")  # slirp4netns passes it on
    script(folder / "usr/bin/nvidia-container-runtime-hook", "#!/usr/bin/busybox sh\nexit 0\n")
    plugins = HOME / "config/cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    for name in ("docker-compose", "docker-buildx"):
        (plugins / name).unlink(missing_ok=True)
        (plugins / name).symlink_to(folder / "usr/libexec/docker/cli-plugins" / name)


def finish_python(folder: Path) -> None:
    (folder / "usr/bin/python").symlink_to("python3")
    for name in ("doc", "man", "locale"):
        shutil.rmtree(folder / "usr/share" / name, ignore_errors=True)
    for name in ("apt", "dpkg"):
        shutil.rmtree(folder / "var/lib" / name, ignore_errors=True)


@contextmanager
def running() -> Iterator[tuple[list[str], dict[str, str]]]:
    """The engine, up; the words that run a command in its network, and the environment that leads there."""
    shared, data = HOME / "run", HOME / "data"
    for folder in (shared, data):
        folder.mkdir(exist_ok=True)
    (shared / "docker.sock").unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "DOCKER_CONTEXT"}
    environment |= {"DOCKER_HOST": f"unix://{shared}/docker.sock", "DOCKER_CONFIG": str(HOME / "config")}
    environment |= {"PATH": f"{ENGINE}/usr/bin-docker:{environment['PATH']}", "TEST_DOCKER_ENGINE": "made"}
    client = ENGINE / "usr/bin-docker"  # that folder's other programs are for another system
    client.mkdir(exist_ok=True)
    if not (client / "docker").exists():
        (client / "docker").symlink_to("../bin/docker")
    paths = {"root": ENGINE, "shared": shared, "data": data, "tmp": "/tmp"}  # where pytest puts its folders
    start = START.format(cgroup=CGROUP, **{name: shlex.quote(str(path)) for name, path in paths.items()})
    log, helpers = (HOME / "dockerd.log").open("wb"), list[subprocess.Popen[bytes]]()
    try:
        words = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--propagation=private", "sh", "-c"]
        helpers.append(helper([*words, start], log))
        began_s = time.monotonic()
        while not (children := children_of(helpers[0].pid)) or not answers(environment):
            if helpers[0].poll() is not None or time.monotonic() - began_s > START_TIMEOUT_S:
                raise SetupError(f"dockerd does not start; the end of {log.name}:\n{last_words(Path(log.name))}")
            time.sleep(0.2)
        libraries = ENGINE / "usr/lib" / f"{os.uname().machine}-linux-gnu"
        loader = [str(next(ENGINE.glob("usr/lib*/ld-linux-*.so*"))), "--library-path", str(libraries)]
        slirp = [*loader, str(ENGINE / "usr/bin/slirp4netns"), "--configure", "--mtu=65520", "--disable-host-loopback"]
        helpers.append(helper([*slirp, children[0], "tap0"], log))
        yield ["nsenter", f"--net=/proc/{children[0]}/ns/net"], environment
    finally:
        for each in reversed(helpers):
            each.kill()  # its child is process 1 of all others, so they end too
            each.wait()
        log.close()
        remove_cgroups()


def helper(words: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """A process that the kernel kills should this one be (PR_SET_PDEATHSIG)."""
    return subprocess.Popen(
        words,
        stdout=log,
        stderr=log,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # noqa: PLW1509 - there are no threads
    )


def children_of(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return []


def remove_cgroups() -> None:
    """Those of the containers, which outlive them."""
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    for top in Path("/sys/fs/cgroup").rglob(CGROUP):
        for folder in sorted((top, *(each for each in top.rglob("*") if each.is_dir())), reverse=True):
            while folder.exists() and time.monotonic() < deadline_s:
                with suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.1)  # its processes are on their way out


def make_images(environment: dict[str, str]) -> None:
    """Under the names that Dockerfile and docker-compose.yml ask for: a slim Python, and Debian's Prometheus."""
    python = found(r"^ARG (PYTHON)=(\S+)", "Dockerfile")
    prometheus = found(r"prom/prometheus:\$\{(PROMETHEUS_TAG):-([^}]+)", "docker-compose.yml")
    stamp = (PYTHON / "made-from.sha256").read_text()
    known = ["docker", "image", "inspect", "--format", "{{.Comment}}", f"python:{python}"]
    if subprocess.run(known, env=environment, capture_output=True, text=True, check=False).stdout.strip() != stamp:
        words = ["docker", "import", f"--message={stamp}", "-", f"python:{python}"]
        with subprocess.Popen(["tar", "-C", str(PYTHON), "-c", "."], stdout=subprocess.PIPE) as archive:
            subprocess.run(words, stdin=archive.stdout, env=environment, check=True, stdout=subprocess.DEVNULL)
    context = HOME / "prometheus"
    context.mkdir(exist_ok=True)
    shutil.copy(ENGINE / "usr/bin/prometheus", context)
    script(
        context / "wget", "#!/usr/bin/python3\nimport sys, urllib.request as u\nu.urlopen(sys.argv[-1], timeout=5)\n"
    )
    (context / "Dockerfile").write_text(
        f'FROM python:{python}\nCOPY prometheus wget /usr/bin/\nWORKDIR /prometheus\nENTRYPOINT ["prometheus"]\n'
    )
    build = ["docker", "build", "--quiet", f"--tag=prom/prometheus:{prometheus}", str(context)]
    subprocess.run(build, env=environment, check=True, stdout=subprocess.DEVNULL)


def found(pattern: str, file: str) -> str:
    """The default that a variable has in a file of the repository."""
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert match, f"{file} has no {pattern}"
    return match[2]


def script(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def run(*command: str) -> None:
    """Raises SetupError with its last words when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise SetupError(f"this failed (exit code {done.returncode}):\n  {shlex.join(command)}\n{words}")


def last_words(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-15:])


SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
