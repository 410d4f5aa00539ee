"""Server commands of `loadgen plan-capacity`, read by the argument parsers of the engines. No server is started."""

from __future__ import annotations

import json
import shlex
import subprocess
from itertools import product

import pytest

from loadgen.plan import Plan
from loadgen.studies.capacity import option_of
from loadgen.studies.capacity_commands import CHUNKING, CommandContext, commands_of
from loadgen.studies.configurations import Configuration, SearchSpace
from tests.real.conftest import ENGINE

PARSERS = {
    "vllm": """
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
""",
    "sglang": """
from argparse import ArgumentParser
from sglang.srt.server_args import ServerArgs
parser = ArgumentParser()
ServerArgs.add_cli_args(parser)
""",
}
"""Python code that makes the argument parser of an engine's server."""
PARSE_ALL = """
import json, sys
for words in json.load(sys.stdin):
    parser.parse_args(words)
print("parsed")
"""
PROGRAM_WORDS = {"vllm": 2, "sglang": 3}
"""Number of words before the arguments of the server: `vllm serve` and `python -m sglang.launch_server`."""


def arguments(engine: str) -> list[list[str]]:
    """Return the arguments of the server commands of many configurations."""
    plan = Plan(server="vllm", n=1, output_tokens="16")
    result = []
    for (gpu, weights), chunked_prefill, step_tokens, separate in product(
        (("H100 SXM", "bf16"), ("H100 SXM", "fp8"), ("B200 SXM", "fp8"), ("L40S", "w4a16")),
        ("", *CHUNKING[engine]),
        (None, 512),
        (False, True),
    ):
        configuration = Configuration(gpu, weights, engine, 2, 2, 8, 4, 3, separate)
        workers = {"prefill_workers": 1, "decode_workers": 1} if separate else {}
        option = option_of(configuration, gpus=2 * configuration.gpus, **workers)
        space = SearchSpace([gpu], chunked_prefill=chunked_prefill, step_tokens=step_tokens)
        context = CommandContext(plan, "deepseek-r1", 10.0, 512, 16, space)
        for name, command in commands_of(option, context, 30.0).items():
            if name not in ("limits", "simulate"):
                result.append(shlex.split(command)[PROGRAM_WORDS[engine] :])
    return result


@pytest.mark.parametrize("engine", PARSERS)
def test_engines_know_every_option(engine: str) -> None:
    """Names and values of all options are those of the installed version. None is deprecated."""
    result = subprocess.run(
        [ENGINE / engine / "bin" / "python", "-c", PARSERS[engine] + PARSE_ALL],
        input=json.dumps(arguments(engine)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.endswith("parsed\n"), result.stderr
    assert "deprecated and" not in result.stderr
