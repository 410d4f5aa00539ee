"""Counts the tokens of whole requests (`requests:FILE`) for a run in virtual time.

In virtual time, no request is sent, so no server counts the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import msgspec
from msgspec.structs import replace

from loadgen.plan import Plan
from loadgen.workloads.lengths import DEFAULT_OUTPUT_TOKENS
from loadgen.workloads.prompts import load_tokenizer
from loadgen.workloads.raw_requests import stated_output_tokens
from loadgen.workloads.request import Request
from loadgen.workloads.request_logs.bodies import OTHER_ROUTES
from loadgen.workloads.request_logs.logged import LogNotes
from loadgen.workloads.request_logs.prompt_text import prompt_of
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.token_counter import ABOUT_ONE_TOKEN, APPROXIMATE

COUNTED = f"each response is as long as its body allows, or {DEFAULT_OUTPUT_TOKENS} tokens"


def describe_counting(plan: Plan) -> str:
    """Return a line for the user that says how the tokens of prompts and responses are counted."""
    prompts = (
        "prompts are counted with the tokenizer file" if plan.tokenizer else f"prompts are estimated: {APPROXIMATE}"
    )
    return f"{prompts}; tokens of a chat template are not counted; {COUNTED}"


class BodyReader:
    """Reads the request bodies of a workload `requests:FILE`, for a run in virtual time without a server.

    It finds the prompt, as token ids, and the requested length of the response.
    """

    def __init__(self, plan: Plan) -> None:
        self._file = plan.workload_file
        self._tokenizer = load_tokenizer(plan.tokenizer) if plan.tokenizer else None

    def counted(self, request: Request) -> Request:
        """Return `request` with its prompt as token ids, and with the requested length of its response.

        If two prompts begin with the same text, their ids begin alike, so that the simulated prefix cache recognises
        the shared part. Raises WorkloadError for a body without a prompt, and for a route that generates no text.
        """
        where = f"{self._file}, request {request.id + 1}"
        if request.path.rpartition("/")[2] in OTHER_ROUTES:
            raise WorkloadError(
                f"{where}: {request.path} generates no text, which loadgen simulate cannot model", "remove the line"
            )
        try:
            prompt = prompt_of(msgspec.json.decode(request.raw), LogNotes())
        except WorkloadError as error:
            raise WorkloadError(f"{where}: {error}", error.hint) from None
        if prompt is None:
            raise WorkloadError(f"{where}: its body has no prompt whose tokens could be counted", "remove the line")
        ids = prompt if isinstance(prompt, tuple) else tuple(self._ids(prompt))
        output_tokens = stated_output_tokens(request.raw) or DEFAULT_OUTPUT_TOKENS
        return replace(request, prompt=ids, input_tokens=len(ids), output_tokens=output_tokens)

    def _ids(self, text: str) -> Sequence[int]:
        if self._tokenizer is not None:
            return self._tokenizer.ids(text)
        return [crc32(word.encode("utf-8", "surrogatepass")) for word in ABOUT_ONE_TOKEN.findall(text)]
