"""Builds canaries: prompts with a fixed answer, which show whether a server answers correctly under load.

Each canary contains a different code word, which its answer must repeat. If an answer contains the code word of another
canary, the server has sent the answer to another prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import msgspec

from loadgen.workloads.request import Request

MAX_CANARIES = 1_000
OUTPUT_TOKENS = 48
"""Maximum length of the answer to a canary."""
FIRST_ID = -1_000_000
"""Id of the first request with a canary. Further ids are lower, so that they differ from those of warm-up requests."""
SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "do_sample", "n", "best_of", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "max_tokens", "max_completion_tokens", "min_tokens"),
)
"""Fields of the user that canaries leave out, because they would make the answer random, or shorter or longer."""
_SYLLABLES = ("ba", "do", "fi", "ga", "ke", "lu", "mo", "ni", "pa", "re", "su", "ti", "vo", "wa", "ze")
_TOPICS = (
    *("a lighthouse", "a violin", "the ocean", "a bakery", "the moon", "a railway station", "a garden", "snow"),
    *("a library", "a bicycle", "the desert", "a bridge", "an island", "a clock tower", "a forest", "a market"),
)


class CanaryPrompt(msgspec.Struct, frozen=True):
    """A prompt whose answer is compared with the answer to the same prompt without load."""

    number: int
    """Number of the canary, from 0."""
    code: str
    """Code word of the canary, which no other canary of the run has."""
    text: str


def build_canaries(count: int, seed: int) -> list[CanaryPrompt]:
    """Return `count` canaries: test prompts that ask for a code word. Equal seeds give equal canaries."""
    canaries = []
    for number in range(count):
        random = Random(f"{seed}/canary/{number}")  # noqa: S311 - words, not secrets
        code = "".join(random.choice(_SYLLABLES) for _ in range(4)) + str(1_000 + number)
        text = (
            f"The code word is {code}. Write the code word once. "
            f"Then write two short sentences about {_TOPICS[number % len(_TOPICS)]}."
        )
        canaries.append(CanaryPrompt(number, code, text))
    return canaries


def canary_request(canary: CanaryPrompt, serial: int, body: Mapping[str, object]) -> Request:
    """Return a request that sends the prompt `canary`. Its id is derived from `serial`, the number of the request.

    `body` contains the fields that the user adds to each request. Fields that influence sampling are left out, because
    a canary needs an answer that is always the same.
    """
    fields = {name: value for name, value in body.items() if name not in SAMPLING_FIELDS}
    return Request(FIRST_ID - serial, canary.text, 0, OUTPUT_TOKENS, body=fields, ignore_eos=False)
