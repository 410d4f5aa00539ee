"""Sends 117 requests to a vLLM server, and reduces each response to its shape.

Tests compare the responses of the simulated vLLM with recordings of a real vLLM 0.32.0. To record them again:

    PYTHONPATH=. python tests/support/vllm_answers.py URL

The real server must be started as in `tests/real/conftest.py`: with the model `tiny` and a context of 2048 tokens.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

import httpx

FILE = Path(__file__).parents[1] / "contract/vllm_answers.jsonl"
"""JSON Lines file with one line per request. A line has the keys `name`, `path`, `body`, `said` (the response of the
real vLLM) and, if the response of the simulated vLLM differs, `differs` (the reason, which is also in
docs/simulated.md)."""

# Fields whose values are compared. Of all other fields, only the type is compared: number, text or list of ids.
_WORDS = ("finish_reason", "stop_reason", "object", "role", "index", "type", "status", "reason")
_COUNTS = ("completion_tokens", "output_tokens")
_BY_WORD = ("top_logprobs", "prompt_logprobs")


def requests() -> list[dict[str, Any]]:
    """Return all lines of FILE, which describe the requests and the recorded responses."""
    return [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]


def ask(client: httpx.Client, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request, and return the status and the shape of the response.

    The shape contains the type of most values. Errors are returned unchanged.
    """
    reply = client.post(request["path"], json=request["body"])
    # The generated text decides where a stop string cuts. The load decides how many tokens share an event.
    exact = not {"stop", "stream"} & {*request["body"]}
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        return {"status": reply.status_code, "body": _shape(reply.json(), exact=exact)}
    found: list[Any] = []
    for event in reply.text.removesuffix("\n\n").split("\n\n"):
        head, _, data = event.rpartition("data: ")
        shape = [head, data if data == "[DONE]" else _shape(json.loads(data), exact=exact)]
        found.append(shape)
    found.sort(key=_answer)  # the order of events of several answers also depends on the load
    return {"status": reply.status_code, "events": [each for each, _ in groupby(found)]}


def _answer(event: list[Any]) -> float:
    choices = event[1].get("choices") if isinstance(event[1], dict) else None
    return choices[0]["index"] if choices else inf if event[1] == "[DONE]" or choices == [] else 0


def _shape(value: Any, key: str = "", *, exact: bool) -> Any:
    if isinstance(value, dict) and "error" not in value:
        if key in _BY_WORD:
            return ["by word", *(_shape(each, exact=exact) for each in list(value.values())[:1])]
        return {name: _shape(each, name, exact=exact) for name, each in value.items()}
    if isinstance(value, list):
        shapes = [_shape(each, key, exact=exact) for each in value]
        if key != "choices":
            shapes = [each for each, _ in groupby(shapes)]
        return "ids" if value and all(type(each) is int for each in value) else shapes
    if value is None or isinstance(value, bool | dict) or key in _WORDS or (key in _COUNTS and exact):
        return value
    return "text" if isinstance(value, str) else "number"


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=300) as client:
        lines = [request | {"said": ask(client, request)} for request in requests()]
    FILE.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
