"""Checks that the tests notice faults: inserts one fault at a time into a copy of the project, and runs its tests.

    python tests/mutations/run.py                 # every fault, one line each; exit code 1 if a fault is not noticed
    python tests/mutations/run.py ttft sse-crlf   # the faults whose names contain one of these words
    python tests/mutations/run.py --everything    # if the tests of a fault pass, run all tests in WIDE too

Run the script by hand. It takes as long as the tests that it runs. Each entry of `mutations.toml` is one fault: the
file, the text that it replaces (which occurs once in the file), the new text, and the tests that must fail.
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
"""Maximum time for the tests of one fault, in seconds."""
WIDE = ["tests/unit", "tests/property", "tests/contract"]


def main() -> int:
    """Insert the selected faults one after the other. Return 1 if the tests did not notice one of them, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="insert only the faults whose names contain one of these words")
    parser.add_argument("--everything", action="store_true", help=f"also run {', '.join(WIDE)}")
    options = parser.parse_args()
    with (Path(__file__).parent / "mutations.toml").open("rb") as file:
        mutations: list[dict[str, Any]] = tomllib.load(file)["mutation"]
    if options.words:
        mutations = [mutation for mutation in mutations if any(word in mutation["name"] for word in options.words)]
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        copy_project(tree)
        for mutation in mutations:
            start_s = time.monotonic()
            failed = notice(tree, mutation, everything=options.everything)
            unnoticed += not failed
            print(f"{mutation['name']:36} {failed or 'NOT NOTICED':60} {time.monotonic() - start_s:5.0f} s", flush=True)
    print(f"{len(mutations) - unnoticed} of {len(mutations)} faults noticed")
    return int(unnoticed > 0)


def copy_project(tree: Path) -> None:
    """Copy the files that git tracks into the folder `tree`. Symbolic links stay links."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)


def notice(tree: Path, mutation: dict[str, Any], *, everything: bool) -> str:
    """Return the first test that fails while the fault is in the copy `tree`, or "" if no test fails.

    The fault is removed afterwards. Exits if the text of the mutation does not occur exactly once in its file.
    """
    file = tree / mutation["file"]
    original = file.read_text(encoding="utf-8")
    if original.count(mutation["old"]) != 1:
        sys.exit(f"{mutation['name']}: its text occurs {original.count(mutation['old'])} times in {mutation['file']}")
    file.write_text(original.replace(mutation["old"], mutation["new"]), encoding="utf-8")
    try:
        return first_failure(tree, mutation["tests"]) or (first_failure(tree, WIDE) if everything else "")
    finally:
        file.write_text(original, encoding="utf-8")


def first_failure(tree: Path, tests: list[str]) -> str:
    """Return the name of the first test that fails, or "" if all tests pass.

    Exits if pytest cannot run the tests, or cannot import them. This would say nothing about the fault.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")) and "::" in line:
            return line.split(" ")[1].partition("::")[2]
    if done.returncode != 0:
        sys.exit(f"pytest could not run {tests}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ""


if __name__ == "__main__":
    sys.exit(main())
