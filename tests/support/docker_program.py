"""The program that `stand_in_docker.py` installs as the command `docker`.

Tests start it hundreds of times. It imports neither json nor pathlib, which would take longer than the program itself.
"""

# ruff: noqa: PTH120, PTH123
from __future__ import annotations

import marshal
import os
import sys

KEPT = (
    *("DOCKER_HOST", "DOCKER_CONTEXT", "MODEL_NAME", "BIND", "VLLM_GPU", "TGI_GPU", "MODELS_VOLUME", "VLLM_TAG"),
    "TENSOR_PARALLEL",
)
"""Environment variables that are recorded with each call."""


def main(arguments: list[str], folder: str) -> int:
    """Record a call of the stand-in, print the output of its rule, and return the rule's exit code."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    with open(f"{folder}/calls", "a") as calls:
        calls.write(repr({"arguments": arguments, "environment": environment}) + "\n")
    with open(f"{folder}/rules.marshal", "rb") as file:
        rules = marshal.load(file)
    for rule in rules:
        if set(rule["words"]) <= set(arguments) and rule.get("times", 1) > 0:
            if "times" in rule:
                rule["times"] -= 1
                with open(f"{folder}/rules.marshal", "wb") as file:
                    marshal.dump(rules, file)
            # As in the compose file, the variable VLLM_PORT determines the published port.
            sys.stdout.write(rule.get("out", "").replace('"VLLM_PORT"', os.environ.get("VLLM_PORT", "8001")))
            sys.stderr.write(rule.get("err", ""))
            return int(rule.get("code", 0))
    sys.stderr.write(f"the stand-in has no answer to {arguments}\n")
    return 99


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.path.dirname(os.path.realpath(__file__))))
