"""Does the suite notice? Breaks one behaviour at a time in a copy of the tree and runs the tests that should fail.

    python tests/mutations/run.py                 # all of them, a line each; exit code 1 when one survives
    python tests/mutations/run.py ttft sse-crlf   # those whose name contains one of the words
    python tests/mutations/run.py --everything    # what its tests miss goes through unit, property and contract too

By hand or nightly: it takes as long as the tests it runs. `mutations.toml` has one entry per behaviour: the file, the
text that is there once, what replaces it, and the tests that speak of it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
WIDE = ["tests/unit", "tests/property", "tests/contract"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--everything", action="store_true")
    asked = parser.parse_args()
    with (Path(__file__).parent / "mutations.toml").open("rb") as file:
        mutations: list[dict[str, Any]] = tomllib.load(file)["mutation"]
    chosen = [each for each in mutations if not asked.words or any(word in each["name"] for word in asked.words)]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, tracked.decode().split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        for each in chosen:
            began = time.monotonic()
            caught = broken(tree, each, asked.everything)
            survived += not caught
            print(f"{each['name']:36} {caught or 'SURVIVED':60} {time.monotonic() - began:5.0f} s", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} caught")
    return survived > 0


def broken(tree: Path, mutation: dict[str, Any], everything: bool) -> str:
    """The first test that fails once the mutation is in; empty when none does. The tree is whole again afterwards."""
    file = tree / mutation["file"]
    whole = file.read_text(encoding="utf-8")
    if whole.count(mutation["old"]) != 1:
        sys.exit(f"{mutation['name']}: its text stands {whole.count(mutation['old'])} times in {mutation['file']}")
    file.write_text(whole.replace(mutation["old"], mutation["new"]), encoding="utf-8")
    try:
        return failing(tree, mutation["tests"]) or (failing(tree, WIDE) if everything else "")
    finally:
        file.write_text(whole, encoding="utf-8")


def failing(tree: Path, tests: list[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ")[1].partition("::")[2] or line.split(" ")[1]
    if done.returncode not in (0, 1):
        sys.exit(f"pytest could not run {tests}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ""


if __name__ == "__main__":
    sys.exit(main())
