"""Imports NumPy so that it sorts fast on AMD Zen 4, the processor of many GPU servers.

Since version 2.0, NumPy sorts with AVX-512 where the processor has it. On Zen 4, an instruction of that code
(vpcompress to memory) is so slow that sorting a million numbers takes 52 ms instead of 9 ms with AVX2
(github.com/numpy/x86-simd-sort/issues/6). A report sorts each metric of all requests.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from contextlib import suppress
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
DISABLE_VARIABLE = "NPY_DISABLE_CPU_FEATURES"
"""Environment variable with the groups of instructions that NumPy must not use. NumPy reads it once, during import."""
AVX512_GROUP = "X86_V4"
"""NumPy's name for the AVX-512 instructions, from version 2.4 on. Older versions ignore the name, with a warning."""
ZEN_3_AND_4 = 25
"""Processor family of AMD Zen 3, which has no AVX-512, and of Zen 4. The family of Zen 5 is 26."""


def import_numpy() -> None:
    """Import NumPy. On AMD Zen 4, disable AVX-512 in NumPy, because sorting with AVX-512 is slow there.

    AVX-512 is disabled by the environment variable DISABLE_VARIABLE. The variable is set only during the import, so
    that programs started by loadgen do not inherit it.

    Even on Zen 4, the variable is not set if NumPy is already imported, or if the user has set the variable.
    """
    avoids_avx512 = "numpy" not in sys.modules and DISABLE_VARIABLE not in os.environ and has_slow_avx512()
    if not avoids_avx512:
        import numpy

        return
    os.environ[DISABLE_VARIABLE] = AVX512_GROUP
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ImportWarning)  # of a version that does not know the name
            import numpy  # noqa: F401
    finally:
        del os.environ[DISABLE_VARIABLE]


def has_slow_avx512(cpu_info: Path = CPU_INFO) -> bool:
    """Return True if the processor is an AMD Zen 4. Its AVX-512 instructions make sorting slow.

    `cpu_info` is the file with the Linux kernel's description of the processor.
    """
    text = ""
    with suppress(OSError):
        text = cpu_info.read_text(errors="replace")
    facts = dict(re.findall(r"^(vendor_id|cpu family|flags)\s*: (.*)$", text, re.MULTILINE))
    return (
        facts.get("vendor_id") == "AuthenticAMD"
        and facts.get("cpu family") == str(ZEN_3_AND_4)
        and "avx512f" in facts.get("flags", "").split()
    )
