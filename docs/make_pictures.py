"""Takes the screenshots of reports, comparisons, a matrix, `loadgen limits`, `loadgen hardware` and `loadgen ui`.

    python docs/make_pictures.py          # needs Chromium and the extra `ui`; takes six minutes

The first run is a burst on the built-in vLLM. The second is a Poisson load with prompts of many lengths on a simulated
LightLLM that rejects some requests and breaks off some responses. The comparison has three bursts on each of two GPUs.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, Error, Page, sync_playwright

PICTURES = Path(__file__).parent / "pictures"
MATRIX = Path(__file__).parent.parent / "examples/paper/simulated.toml"
LOADGEN = [sys.executable, "-m", "loadgen"]
BURST = ["burst", "--simulated", "--n", "1000", "--output-tokens", "64", "--quiet"]
SWEEP = [
    *("sweep", "--server", "vllm", "--model", "llama-3.1-8b", "--duration", "2min", "--quiet"),
    *("--objective", "ttft.p99 < 500ms", "--objective", "tpot.p99 < 50ms"),
]
COMPUTED = {
    "limits": ["limits", "--model", "llama-2-70b", "--tp", "8"],
    "technology": ["hardware", "sweep"],
    "factors": ["hardware", "compare", "A100", "B200", "--for", "training", "--model", "gpt-3-175b"],
    "bounds": ["hardware", "bounds", "--gpus", "V100,A100,H100,B200", "--batch", "64", "--context", "2048"],
}
"""Commands of the hardware model, by the name of their page. They need no server."""
LOAD = [
    *("run", "--server", "lightllm", "--arrivals", "poisson:30", "--n", "600", "--quiet", "--seed", "3"),
    *("--input-tokens", "uniform:100..3000", "--output-tokens", "uniform:20..100", "--warmup", "5"),
    *("--assert", "ttft.p99 < 1s", "--assert", "itl.p50 < 30ms", "--assert", "complete >= 99%"),
]
FAULTS = ["--clock", "batching", "--speed", "4", "--fault", "cut=0.005", "--fault", "503=0.01", "--seed", "2"]


class Picture(NamedTuple):
    """A screenshot of one part of a report, or of its first screen if `part` is empty.

    `width` and `height` are the size of the browser window in pixels, `scheme` is `light` or `dark`.
    """

    name: str
    run: str
    part: str
    width: int = 1100
    scheme: str = "light"
    height: int = 900


ALL = (
    Picture("answer", "burst", "#answer"),
    Picture("latency", "burst", "#latency"),
    Picture("prompts", "load", "#waiting"),
    Picture("gaps", "load", "#gaps figure"),
    Picture("course", "load", "#course"),
    Picture("timeline", "burst", "#timeline"),
    Picture("closer", "burst", "#timeline figure"),
    Picture("percentiles", "burst", "#percentiles"),
    Picture("objectives", "load", "#objectives"),
    Picture("compare", "compare", "#comparison", 1200),
    Picture("index", "index", "body", 1500),
    Picture("phone", "load", "", 360, "dark", 780),
    Picture("report", "burst", "", 1280),
    Picture("matrix", "matrix", "", 1280),
    Picture("limits", "limits", "#roofline"),
    Picture("technology", "technology", "figure:has(#chart-parts-0-0)", 720),
    Picture("factors", "factors", "figure:has(#chart-factors-0)", 720),
    Picture("bounds", "bounds", "figure:has(#chart-grid-prefill)", 720),
    Picture("frontier", "frontier", "figure:has(#chart-frontier)"),
)


def main() -> None:
    """Make all runs and take all screenshots."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        runs = {name: Path(folder) / name for name in ("burst", "load")}
        subprocess.run([*LOADGEN, *BURST, "--out", runs["burst"]], check=False)
        with simulated("--server", "lightllm", *FAULTS) as url:
            subprocess.run([*LOADGEN, *LOAD, "--url", url, "--out", runs["load"]], check=False)
        pages = {name: run / "report.html" for name, run in runs.items()} | compared(Path(folder))
        subprocess.run([*LOADGEN, "matrix", MATRIX, "--quiet", "--out", f"{folder}/matrix"], check=False)
        pages["matrix"] = Path(folder) / "matrix/matrix.html"
        pages["frontier"] = swept(Path(folder))
        pages |= computed(Path(folder))
        system = shutil.which("chromium-headless-shell") or shutil.which("chromium")  # else Playwright's own build
        browser = playwright.chromium.launch(executable_path=system, args=["--no-sandbox"])
        for picture in ALL:
            page = browser.new_page(
                viewport={"width": picture.width, "height": picture.height},
                color_scheme="dark" if picture.scheme == "dark" else "light",
            )
            page.goto(pages[picture.run].as_uri())
            take(page, picture)
            page.close()
        take_interactive(browser, Path(folder))
        browser.close()


def computed(folder: Path) -> dict[str, Path]:
    """Run the commands of the hardware model. Return their pages by name."""
    pages = {name: folder / f"{name}.html" for name in COMPUTED}
    for name, command in COMPUTED.items():
        subprocess.run([*LOADGEN, *command, "--page", pages[name]], check=True, stdout=subprocess.DEVNULL)
    return pages


def compared(folder: Path) -> dict[str, Path]:
    """Run two groups of bursts. Return the page of their comparison and the index of the runs."""
    for name, gpu in (("before", "RTX 3090"), ("after", "RTX 4090")):
        with simulated("--server", "vllm", "--clock", "batching", "--speed", "2", "--gpu", gpu) as url:
            burst = ["burst", "--server", "vllm", "--n", "100", "--repeats", "3", "--warmup", "8", "--label", "card"]
            subprocess.run(
                [*LOADGEN, *burst, "--url", url, "--quiet", "--out", f"runs/{name}"], check=False, cwd=folder
            )
    subprocess.run(
        [*LOADGEN, "compare", "--html", "compare.html", "runs/before", "runs/after"], check=False, cwd=folder
    )
    subprocess.run([*LOADGEN, "report", "runs"], check=False, cwd=folder)
    return {"compare": folder / "compare.html", "index": folder / "runs/index.html"}


def swept(folder: Path) -> Path:
    """Sweep two GPU types in virtual time, one of them also as a pair of GPUs. Return the frontier page."""
    sweeps = [("L40S", "1"), ("H100", "1"), ("H100", "2")]
    for gpu, tensor in sweeps:
        sweep = [*SWEEP, "--virtual", gpu, "--tp", tensor, "--out", f"{gpu}-{tensor}"]
        subprocess.run([*LOADGEN, *sweep], check=False, cwd=folder)
    page = ["--out", "frontier.html", "--quiet"]
    subprocess.run([*LOADGEN, "report", *map("-".join, sweeps), *page], check=False, cwd=folder)
    return folder / "frontier.html"


def take(page: Page, picture: Picture) -> None:
    """Open the folded sections, draw all charts, and save the screenshot of the part that `picture` names."""
    page.evaluate("document.querySelectorAll('details.whole').forEach((fold) => { fold.open = true; })")
    page.evaluate("Report.drawAll()")
    if picture.name == "closer":
        page.evaluate("Plotly.relayout('chart-timeline', {'xaxis.range': [0, 4], 'yaxis.range': [270, 246]})")
    file = PICTURES / f"{picture.name}.png"
    if picture.part:  # hide the navigation bar, which otherwise stays in view
        page.add_style_tag(content=".bar { position: static } .skip { display: none }")
        page.locator(picture.part).first.screenshot(path=file, animations="disabled")
    else:
        page.screenshot(path=file, animations="disabled")
    print(file)


def take_interactive(browser: Browser, folder: Path) -> None:
    """Take the pictures of `loadgen ui`: its start form, and a run with 40 users, then 100."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with simulated("--server", "vllm", "--ttft", "300ms", "--itl", "100ms") as url:
        command = [*LOADGEN, "ui", "--server", "vllm", "--url", url, "--port", port, "--out", "runs/ui"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder) as process:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            open_when_ready(page, f"http://127.0.0.1:{port}")
            for name, value in {"userCount": "40", "spawnRate": "40"}.items():
                page.fill(f'input[name="{name}"]', value)
            page.wait_for_selector('input[name="outputTokens"][aria-describedby]')
            page.fill('input[name="inputTokens"]', "128")
            page.fill('input[name="outputTokens"]', "uniform:8..40")
            page.screenshot(path=PICTURES / "ui-form.png", full_page=True, animations="disabled")
            page.get_by_role("button", name="Start").click()
            page.wait_for_timeout(18_000)
            page.get_by_role("button", name="Edit").click()
            page.fill('input[name="userCount"]', "100")
            page.fill('input[name="spawnRate"]', "100")
            page.get_by_role("button", name="Update").click()
            page.wait_for_timeout(18_000)
            page.screenshot(path=PICTURES / "ui-run.png", full_page=True, animations="disabled")
            process.send_signal(signal.SIGINT)


def open_when_ready(page: Page, url: str) -> None:
    """Open a page whose server is starting. Raises Error if the server does not answer within 30 seconds."""
    for attempt in range(60):
        try:
            page.goto(url)
            return
        except Error:
            if attempt == 59:
                raise
            page.wait_for_timeout(500)


@contextmanager
def simulated(*options: str) -> Iterator[str]:
    """Start a simulated server and yield its URL. The server stops when the context ends."""
    command = [*LOADGEN, "mock-server", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
