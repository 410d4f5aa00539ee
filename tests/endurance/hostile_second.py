"""A second round of hostile cases: servers, pages, options, files, run folders and surroundings.

    PYTHONPATH=. python tests/endurance/hostile_second.py [SEED] [PREFIX of the cases] [FILE for the messages]

Every case is one real command. The cases differ in kind, and the seed decides their order and the few random choices.

The round found a run that no command could read, because a server had stated a limit of 10^30, and a version of 100,000
digits that kept the probe busy for a minute. Looking for a file in a locked folder, or with too long a name, ended ten
commands and options with a traceback. Smaller findings were an API key in a message about a wrong option, a wait of a
minute for `Retry-After: nan`, and refused servers that repeat Content-Length or send early hints.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from tests.endurance.hostile_answers import answers
from tests.endurance.hostile_inputs import RecordedRun, inputs
from tests.endurance.hostile_judge import ROOT, Case, Outcome, judge
from tests.endurance.hostile_pages import pages
from tests.endurance.hostile_surroundings import surroundings

AT_ONCE = 2


def all_cases(seed: str, recorded: RecordedRun) -> list[Case]:
    """Return every case, in an order drawn from the seed."""
    cases = [*answers(), *pages(), *inputs(seed, recorded), *surroundings(seed)]
    Random(seed).shuffle(cases)
    return cases


def record_run(folder: Path) -> RecordedRun:
    """Measure the simulated server once. The cases of run folders corrupt copies of this run."""
    words = [
        "run",
        "--simulated",
        "--speed",
        "20",
        "--n",
        "40",
        "--rate",
        "20",
        "--input-tokens",
        "8",
        "--output-tokens",
        "8",
    ]
    command = [sys.executable, "-m", "loadgen", *words, "--out", str(folder / "recorded")]
    subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    return RecordedRun(folder / "recorded")


def main(seed: str = "2027", prefix: str = "", messages: str = "") -> None:
    """Run every case, two at a time, and print the broken promises."""
    codes, broken, lost_cases = Counter[int](), list[str](), set[str]()

    def run(case: Case) -> None:
        begin_s = time.monotonic()
        try:
            outcome, lost = judge(case)
        except Exception as error:  # a case that cannot be judged is lost
            outcome, lost = Outcome(-1, "", "", True, []), [f"not judged: {error!r}"]
        codes[outcome.code] += 1
        broken.extend(f"{case.name}: {promise}" for promise in lost)
        lost_cases.update([case.name] if lost else [])
        state = "LOST" if lost else "ok"
        print(f"{state:>4} {outcome.code:>3} {time.monotonic() - begin_s:>5.1f} s  {case.name}", flush=True)
        if messages:
            with Path(messages).open("a") as file:
                file.write(f"### {case.name}: {outcome.code} {' '.join(case.words)[:300]!r}\n{outcome.err}\n")

    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in all_cases(seed, record_run(Path(folder))) if case.name.startswith(prefix)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(run, cases))
    print(
        f"{len(cases)} cases, {len(cases) - len(lost_cases)} survived, {len(lost_cases)} lost; exit codes {dict(codes)}"
    )
    print(*broken, sep="\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main(*sys.argv[1:])
