"""Simulates machines with network namespaces: a server, a master, and worker machines with slow links to the master.

    server 10.77.0.1 ──── veth, no delay ──── master, worker machines
    master 10.77.9.1 ──── delay.py ────────── bench-1      5 ms each way
    master 10.77.9.1 ──── delay.py ────────── bench-2     20 ms each way

All machines live in one network and mount namespace, which exists as long as a `sleep` process of the test. Without
root, a user namespace is created too. A time namespace (time_namespaces(7)) can shift the CLOCK_MONOTONIC of a command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVER = "10.77.0.1"
MASTER = "10.77.9.1"
NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
"""Shell command that sets the host name to the machine's name and then runs the machine's command."""


class Network:
    """Simulated machines, and methods that run commands on them."""

    def __init__(self, holder: int, delays_ms: Mapping[str, int], spoiled: Path | None = None) -> None:
        user = [] if os.getuid() == 0 else ["--user", "--preserve-credentials"]
        self._inside = ["nsenter", "--target", str(holder), *user, "--mount", "--net", "--"]
        self._delays_ms = delays_ms
        self._environment = os.environ | ({} if spoiled is None else {"SPOILED": str(spoiled)})
        self._relay: subprocess.Popen[str] | None = None

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        """Interrupt the links between the master and the worker machines while the `with` block runs.

        The method stops the process that forwards the packets. Data that is sent during the interruption arrives later,
        at the latest when TCP retransmits it.
        """
        assert self._relay is not None
        self._relay.send_signal(signal.SIGSTOP)
        yield
        self._relay.send_signal(signal.SIGCONT)

    def start(self, machine: str, *command: str, ahead_s: int = 0, **options: object) -> subprocess.Popen[str]:
        """Start a command on a machine. The command's CLOCK_MONOTONIC is `ahead_s` seconds ahead of the real clock."""
        clock = ["--time", "--monotonic", str(ahead_s), "--fork", "--kill-child"] if ahead_s else []
        named = ["unshare", "--uts", *clock, "--", "sh", "-c", NAMED, machine]
        return subprocess.Popen(
            [*self._inside, "ip", "netns", "exec", machine, *named, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )

    def die(self, machine: str) -> None:
        """Kill all processes of a machine at once, as a power cut does."""
        found = self._run("ip", "netns", "pids", machine).split()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def build(self) -> subprocess.Popen[str]:
        """Create the machines and links. Return the process that delays packets (tests/support/delay.py)."""
        self._run("mount", "-t", "tmpfs", "tmpfs", "/run")
        for machine in ("server", "master", *self._delays_ms):
            self._run("ip", "netns", "add", machine)
            self._run("ip", "-n", machine, "link", "set", "lo", "up")
        self._run("ip", "-n", "server", "address", "add", f"{SERVER}/32", "dev", "lo")
        for number, machine in enumerate(("master", *self._delays_ms), 1):
            self._wire(machine, number)
        devices = [word for name, delay in self._delays_ms.items() for word in (f"m-{name}", f"w-{name}", str(delay))]
        command = [*self._inside, sys.executable, str(ROOT / "tests/support/delay.py"), *devices]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._environment)
        self._relay = relay
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n"
        for number, machine in enumerate(self._delays_ms, 1):
            self._join(machine, f"10.77.9.{number + 1}")
        return relay

    def _wire(self, machine: str, number: int) -> None:
        """Connect a machine to the server by a link without delay, with addresses in 10.77.NUMBER.0/24."""
        here, there = f"10.77.{number}.1", f"10.77.{number}.2"
        self._run("ip", "link", "add", f"s-{machine}", "type", "veth", "peer", "name", "load")
        self._place(f"s-{machine}", "server", here, there)
        self._place("load", machine, there, here)
        self._run("ip", "-n", machine, "route", "add", SERVER, "via", here)

    def _join(self, machine: str, address: str) -> None:
        """Connect a worker machine to the master by a link with a delay. `address` is the machine's new address."""
        self._place(f"m-{machine}", "master", MASTER, address)
        self._place(f"w-{machine}", machine, address, MASTER)

    def _place(self, device: str, machine: str, address: str, peer: str) -> None:
        self._run("ip", "link", "set", device, "netns", machine)
        self._run("ip", "-n", machine, "address", "add", address, "peer", peer, "dev", device)
        self._run("ip", "-n", machine, "link", "set", device, "up")

    def _run(self, *command: str) -> str:
        done = subprocess.run([*self._inside, *command], capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout


@contextlib.contextmanager
def network(delays_ms: Mapping[str, int], spoiled: Path | None = None) -> Iterator[Network]:
    """Run simulated machines: `server`, `master`, and one worker machine per name in `delays_ms`.

    `delays_ms` contains the delay of each worker machine's link to the master, in ms per direction. If `spoiled` is a
    file, these links lose and reorder data packets of the master. Packets that pass are written to this file
    (tests/support/delay.py).
    """
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    holder = subprocess.Popen(["unshare", *user, "--mount", "--net", "--", "sleep", "600"])
    _wait_for_its_namespaces(holder.pid)
    net = Network(holder.pid, delays_ms, spoiled)
    relay = None
    try:
        relay = net.build()
        yield net
    finally:
        for machine in ("server", "master", *delays_ms):
            with contextlib.suppress(AssertionError):
                net.die(machine)
        for process in (relay, holder):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdout:
                    process.stdout.close()


def _wait_for_its_namespaces(pid: int) -> None:
    deadline = time.monotonic() + 10
    while (Path(f"/proc/{pid}/comm").read_text().strip()) != "sleep":
        assert time.monotonic() < deadline
        time.sleep(0.01)
