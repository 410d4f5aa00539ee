"""Runs against servers whose answers are spoiled: what is recorded must be what an oracle makes of the same bytes.

PYTHONPATH=. python tests/endurance/hostile.py [SEED] [CASES per dialect]

loadgen run ──> spoiler, with TLS or without ──> simulated server
                └── passes on what is asked of it, and spoils each answer of tokens as tests/endurance/spoil.py draws
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

import trustme

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn
from loadgen.workloads.request import number_of_wire_id
from tests.endurance import spoil
from tests.support.command import prepare_forks, start

KEYS = [("vllm", "completions"), ("tgi", "generate"), ("lightllm", "generate"), ("openai", "chat")]
ASKED = 8
OWN_HEADERS = {"host", "content-length", "connection"}


@dataclass
class Spoiler:
    """What it did."""

    url: str = ""
    raw: dict[int, tuple[str, spoil.Spoiled]] = field(default_factory=dict)
    """By request: the name of its case, and what was sent."""
    again: list[str] = field(default_factory=list)
    """Cases behind which a connection was used once more although nobody could tell what comes on it."""


@contextlib.contextmanager
def spoiling(url: str, seed: str, tls: ssl.SSLContext | None) -> Iterator[Spoiler]:
    """A server in front of the one at `url`."""
    spoiler, stopped = Spoiler(), threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        scheme = "https" if tls else "http"
        spoiler.url = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
        listening.settimeout(0.05)

        def accept() -> None:
            while not stopped.is_set():
                with contextlib.suppress(TimeoutError):
                    sock, _ = listening.accept()
                    threading.Thread(target=talk, args=(sock,), daemon=True).start()

        def talk(sock: socket.socket) -> None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(60)
                with tls.wrap_socket(sock, server_side=True) if tls else sock as inner:
                    _Talk(spoiler, inner, url, seed).run()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield spoiler
        finally:
            stopped.set()
            thread.join()


class _Talk:
    """One connection of a client."""

    def __init__(self, spoiler: Spoiler, sock: socket.socket, url: str, seed: str) -> None:
        self._spoiler, self._sock, self._seed = spoiler, sock, seed
        self._host = url.removeprefix("http://")
        self._dirty = ""

    def run(self) -> None:
        while asked := _asked(self._sock):
            method, path, headers, body = asked
            number = headers.get("x-request-id", "")
            if self._dirty:
                self._spoiler.again.append(self._dirty)
            behind = http.client.HTTPConnection(self._host, timeout=30)
            own = {name: value for name, value in headers.items() if name not in OWN_HEADERS}
            behind.request(method, path, body, own)
            answer = behind.getresponse()
            data = answer.read()
            behind.close()
            kind = answer.headers["Content-Type"] or "text/plain"
            if not number[-1:].isdigit() or not kind.startswith("text/event-stream"):
                fields = f"HTTP/1.1 {answer.status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
                self._sock.sendall(fields.encode() + data)
            elif not self._spoil(number_of_wire_id(number), data):
                return

    def _spoil(self, number: int, data: bytes) -> bool:
        """Whether the connection goes on."""
        name, random = spoil.drawn(self._seed, number)
        case = spoil.SPOILS[name](random, spoil.payloads_of(data))
        self._spoiler.raw[number] = name, case
        for piece in _pieces(random, case.raw):
            self._sock.sendall(piece)
            time.sleep(random.choice((0, 0, 0.001)))
        if case.ending == spoil.RESET:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if isinstance(self._sock, ssl.SSLSocket):
                socket.socket(fileno=self._sock.detach()).close()  # without the words of TLS for it
                return False
        if case.ending == spoil.HANG:
            while asked := _asked(self._sock):  # on a connection whose answer had ended after all
                self._spoiler.raw[number_of_wire_id(asked[2]["x-request-id"])] = "hung", spoil.Spoiled(b"", spoil.HANG)
        if case.surplus:
            time.sleep(0.05)
            if select.select([self._sock], [], [], 0)[0]:
                return False  # too late: it has asked for more
            self._sock.sendall(case.surplus)
            if b"close" in case.surplus:
                return False
        if case.surplus or name.startswith("bytes behind"):
            self._dirty = name
        return case.ending == spoil.KEEP


def _asked(sock: socket.socket) -> tuple[str, str, dict[str, str], bytes] | None:
    received = b""
    while b"\r\n\r\n" not in received:
        if not (piece := sock.recv(65_536)):
            return None
        received += piece
    top, _, body = received.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += sock.recv(65_536)
    method, path, _ = first.split(" ")
    return method, path, headers, body


def _pieces(random: Random, raw: bytes) -> Iterator[bytes]:
    """As one, cut in a few places, or the beginning or the end byte by byte."""
    few = [random.randrange(len(raw) + 1) for _ in range(random.randint(0, 12))]
    drip = random.choice((range(min(60, len(raw))), range(max(0, len(raw) - 60), len(raw))))
    places = [0, *sorted(random.choice((few, few, drip, ()))), len(raw)]
    for begin, end in pairwise(places):
        if begin < end:
            yield raw[begin:end]


def ordeal(
    folder: Path, seed: str, key: tuple[str, str], cases: int, *, tls: bool
) -> tuple[int, list[str], Counter[str]]:
    """One run of so many cases: how many there were, what was lost, and how they ended."""
    server, endpoint = key
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    config = SimulatedConfig(server="vllm" if server == "openai" else server, ttft_s=0.001, itl_s=0.0005)
    words = ["--server", server, "--endpoint", endpoint, "--n", str(cases), "--arrivals", "constant:60"]
    words += ["--input-tokens", "8", "--output-tokens", str(ASKED), "--timeout", "2", *(["--insecure"] if tls else [])]
    words += ["--lengths", "approximate"] if server == "openai" else []
    with spawn(config) as url, spoiling(url, seed, context if tls else None) as spoiler:
        process = start(folder, "--url", spoiler.url, *words, command="run")
        _, err = process.communicate(timeout=100)
    if not (folder / "run" / "run.jsonl").exists():
        return cases, [f"exit code {process.returncode}, no run: {err[-400:]}"], Counter()
    lost = [f"exit code {process.returncode}: {err[-400:]}"] if process.returncode not in {1, 5} else []
    lost += [f"traceback: {err[-800:]}"] if "Traceback" in err else []
    lost += [f"a connection was used again behind: {name}" for name in spoiler.again]
    run = runfile.read(folder / "run")
    lost += [f"request {number} has no record" for number in set(range(cases)) - {each.id for each in run.records}]
    footer = run.footer
    ended = 0
    if footer is not None:
        ended = footer.complete + footer.truncated + footer.failed + (footer.rejected or 0)
    if len(run.records) != cases or ended != cases:
        lost.append(f"{cases} requests, {len(run.records)} records, {footer}")
    for record in run.records:
        name, case = spoiler.raw.get(record.id, ("", None))
        if case is None:
            lost.append(f"request {record.id} was never answered: {record.state} {record.error_detail}")
            continue
        whole = spoil.proven(server, endpoint, case.raw, closed=case.ending != spoil.HANG, asked=ASKED)
        complete = record.state == "complete"
        if (complete and not whole) or (case.harmless and not complete):
            lost.append(
                f"{name} ({record.id}): {record.state} ({record.error_detail}), and it was {whole=}: {case.raw[:300]!r}"
            )
    return cases, lost, Counter(record.state for record in run.records)


def main(seed: str = "2026", cases: str = "140") -> None:
    """Every dialect, with TLS and without: cases, survived, lost."""
    total, lost, ended = 0, list[str](), Counter[str]()
    for tls in (False, True):
        for key in KEYS:
            with tempfile.TemporaryDirectory() as folder:
                done = ordeal(Path(folder), f"{seed}/{key}/{tls}", key, int(cases), tls=tls)
            total, ended = total + done[0], ended + done[2]
            lost += (found := [f"{' '.join(key)}{' TLS' if tls else ''}: {each}" for each in done[1]])
            print(f"{' '.join(key):>20}{' TLS' if tls else '    '}: {done[0]} cases, {len(found)} lost", flush=True)
    print(f"{len(spoil.SPOILS)} ways, {total} cases, {total - len(lost)} survived, {len(lost)} lost; {dict(ended)}")
    print(*lost, sep="\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    prepare_forks()
    main(*sys.argv[1:])
