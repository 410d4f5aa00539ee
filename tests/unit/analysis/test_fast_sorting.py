"""NumPy is imported without AVX-512 on AMD Zen 4, and without any change elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.analysis.fast_sorting import AVX512_GROUP, DISABLE_VARIABLE, has_slow_avx512

ZEN_4 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: fpu avx2 avx512f bmi2\n"


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        (ZEN_4, True),
        (ZEN_4 + "\n" + ZEN_4, True),
        (ZEN_4.replace(" avx512f", ""), False),  # Zen 3, or a virtual machine without the instructions
        (ZEN_4.replace("family\t: 25", "family\t: 26"), False),  # Zen 5
        (ZEN_4.replace("AuthenticAMD", "GenuineIntel"), False),
        ("Processor\t: AArch64\n", False),
        ("", False),
    ],
)
def test_zen_4_is_recognised(tmp_path: Path, text: str, slow: bool) -> None:
    """Only AMD's family 25 with AVX-512 is Zen 4. A system without the file has no such processor."""
    (tmp_path / "cpuinfo").write_text(text)
    assert has_slow_avx512(tmp_path / "cpuinfo") is slow
    assert not has_slow_avx512(tmp_path / "missing")


@pytest.mark.parametrize(
    ("slow", "chosen", "during_import"), [(True, None, AVX512_GROUP), (True, "", ""), (False, None, None)]
)
def test_numpy_is_imported_without_avx512(slow: bool, chosen: str | None, during_import: str | None) -> None:
    """The variable is only set during the import on Zen 4, and a value that the user has chosen is kept."""
    program = f"""
import os, sys
from loadgen.analysis import fast_sorting
fast_sorting.has_slow_avx512 = lambda: {slow}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            print(os.environ.get({DISABLE_VARIABLE!r}))
sys.meta_path.insert(0, Finder())
fast_sorting.import_numpy()
print(os.environ.get({DISABLE_VARIABLE!r}), "numpy" in sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != DISABLE_VARIABLE}
    if chosen is not None:
        environment[DISABLE_VARIABLE] = chosen
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(during_import), f"{chosen} True"]
