"""Prompts counted by loopback servers that tokenise as vLLM, TGI and LightLLM do."""

from __future__ import annotations

import re
import threading
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from loadgen.engine.vocabulary_cache import vocabulary_cache
from loadgen.servers.auth import Access
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.backends.dialect import bearer_header
from loadgen.servers.discovery import open_tokenizer, probe
from loadgen.servers.errors import UncountableError
from loadgen.workloads.lengths import Fixed
from loadgen.workloads.prompts import COMMON_WORDS, load_tokenizer
from loadgen.workloads.workload import Synthetic, WorkloadSpec, prepare_prompts
from tests.support.exact import exact_prompts
from tests.support.stub_server import (
    LIGHTLLM_0_0_1,
    LIGHTLLM_1_2,
    OPENAI,
    TGI,
    TGI_1_1,
    VLLM,
    VLLM_0_2,
    Answer,
    answering,
)
from tests.support.tiny_tokenizers import byte_level_with_bos, save

TEMPLATE = "[user] {} [assistant]"
"""Its blanks make other tokens of the first word of a prompt than it has alone."""


@pytest.fixture(scope="module")
def engine() -> Tokenizer:
    """What the loopback servers tokenise with."""
    tokenizer = byte_level_with_bos()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def served(engine: Tokenizer) -> dict[str, dict[str, Answer]]:
    """The counting routes of each server, over one tokenizer and one chat template."""

    def ids(text: str, bos: bool = True) -> list[int]:
        return list(engine.encode(text, add_special_tokens=bos).ids)

    def templated(body: Any) -> list[int]:
        (message,) = body["messages"]
        return ids(TEMPLATE.format(message["content"]), False)

    def tgi(numbers: list[int]) -> list[dict[str, Any]]:
        return [{"id": number, "text": "?", "start": 0, "stop": 1} for number in numbers]

    def vllm(body: Any) -> Any:
        numbers = templated(body) if "messages" in body else ids(body["prompt"], body.get("add_special_tokens", True))
        return {"count": len(numbers), "max_model_len": 2048, "tokens": numbers, "token_strs": None}

    def lightllm(body: Any) -> Any:
        return {"ntokens": len(ids(body["text"], body["parameters"].get("add_special_tokens", True)))}

    def usage(numbers: list[int]) -> Any:
        return {"choices": [{}], "usage": {"prompt_tokens": len(numbers), "completion_tokens": 1}}

    chat: dict[str, Answer] = {"POST /v1/chat/completions": lambda body: usage(templated(body))}
    completions: dict[str, Answer] = {"POST /v1/completions": lambda body: usage(ids(body["prompt"]))}
    return {
        "vllm": VLLM | {"POST /tokenize": vllm},
        "vllm before 0.6": VLLM_0_2 | chat | completions,
        "tgi": TGI
        | {
            "POST /tokenize": lambda body: tgi(ids(body["inputs"])),
            "POST /chat_tokenize": lambda body: {"tokenize_response": tgi(templated(body)), "templated_text": "?"},
        },
        "tgi 1.1": TGI_1_1
        | {"POST /generate": lambda body: {"generated_text": "", "details": {"prefill": tgi(ids(body["inputs"]))}}},
        "lightllm": LIGHTLLM_1_2 | chat | {"POST /tokens": lightllm},
        "lightllm before 1.0": LIGHTLLM_0_0_1
        | {"POST /generate": lambda body: {"tokens": [{"id": 9, "prompt_tokens": len(ids(body["inputs"]))}]}},
        "openai": OPENAI | chat | completions,
    }


@pytest.mark.parametrize(
    ("kind", "endpoint", "generates"),
    [
        ("vllm", "completions", False),
        ("vllm", "chat", False),
        ("vllm before 0.6", "completions", True),
        ("vllm before 0.6", "chat", True),
        ("tgi", "generate", False),
        ("tgi", "completions", False),
        ("tgi", "chat", False),
        ("tgi 1.1", "generate", True),
        ("lightllm", "generate", False),
        ("lightllm", "completions", False),
        ("lightllm", "chat", True),
        ("lightllm before 1.0", "generate", True),
        ("openai", "completions", True),
        ("openai", "chat", True),
    ],
)
def test_count(engine: Tokenizer, kind: str, endpoint: str, generates: bool) -> None:
    """Each server says what it counts for a text on each endpoint: BOS on native routes, the template on chat."""
    expected = {
        "chat": len(engine.encode(TEMPLATE.format("zanu wozu"), add_special_tokens=False).ids),
        "bare": len(engine.encode("zanu wozu", add_special_tokens=False).ids),
        "bos": len(engine.encode("zanu wozu").ids),
    }
    bare = (kind, endpoint) == ("lightllm", "completions")
    with answering(served(engine)[kind]) as stub:
        facts = probe(stub.url, kind.split(maxsplit=1)[0])
        with open_tokenizer(facts, BACKENDS[facts.name].dialects[endpoint]) as tokenizer:
            assert tokenizer.generates == generates
            counts = tokenizer.count(["zanu wozu", "zanu wozu"])
    assert counts == [expected["chat" if endpoint == "chat" else "bare" if bare else "bos"]] * 2


@pytest.mark.parametrize("kind", ["vllm", "tgi", "lightllm"])
@pytest.mark.parametrize("tokens", [16, 512])
def test_texts_by_the_servers_count(engine: Tokenizer, kind: str, tokens: int) -> None:
    """Texts built with the server's own count are exact, its BOS included, and the first ones are confirmed by it."""
    with answering(served(engine)[kind]) as stub:
        facts = probe(stub.url, kind)
        with open_tokenizer(facts, BACKENDS[kind].dialects[BACKENDS[kind].native]) as server:
            made = exact_prompts(30, tokens, 0, token_ids=False, local=None, server=server)
    assert made.counting_method == "text, counted by the server"
    encoded = [engine.encode(str(text)).ids for text in made.prompts]
    assert {len(ids) for ids in encoded} == {tokens}
    assert len({tuple(ids[:16]) for ids in encoded}) == 30
    confirmed = [value for body in stub.bodies if body for value in body.values()]
    assert set(made.prompts[:8]) <= {value for value in confirmed if isinstance(value, str)}


def test_texts_are_counted_side_by_side(engine: Tokenizer) -> None:
    """A server far away is not asked for one count after the other: the first counts are answered only once eight
    requests are there. A second run needs only a few counts, because the vocabulary is known."""
    together = threading.Barrier(8, timeout=30)
    counted = count()

    def slowly(body: Any) -> Any:
        if 1 <= next(counted) <= 8:  # the first request only shows that the server counts
            together.wait()
        ids = engine.encode(body["inputs"]).ids
        return [{"id": number, "text": "?", "start": 0, "stop": 1} for number in ids]

    facts = ServerFacts("tgi", "", model="m", count_routes=("/tokenize",))
    with answering({"POST /tokenize": slowly}) as stub:
        facts = replace(facts, url=stub.url)
        asked = []
        for _ in range(2):
            with open_tokenizer(facts, BACKENDS["tgi"].dialects["generate"]) as server:
                store = vocabulary_cache(facts, server.counting_path, COMMON_WORDS)
                spec = WorkloadSpec(Synthetic(), Fixed(100), Fixed(1), 0, None)
                prompts = prepare_prompts(spec, token_ids=False, local=None, server=server, store=store)
            texts = [str(request.prompt) for request in islice(prompts.requests(), 100)]
            assert {len(engine.encode(text).ids) for text in texts} == {100}
            asked.append(len(stub.heard))
    assert not together.broken
    assert asked[1] - asked[0] == 9 < asked[0]


@pytest.mark.parametrize(
    ("kind", "with_file"),
    [
        ("vllm", False),
        ("vllm", True),
        ("tgi", False),
        ("tgi", True),
        ("lightllm", False),
        ("lightllm", True),
        ("openai", True),
    ],
)
def test_chat(engine: Tokenizer, kind: str, with_file: bool, tmp_path: Path) -> None:
    """On chat the template counts too: content and template together have the length asked."""
    local = load_tokenizer(save("byte_level_with_bos", tmp_path)) if with_file else None
    with (
        answering(served(engine)[kind]) as stub,
        open_tokenizer(probe(stub.url, kind), BACKENDS[kind].dialects["chat"]) as server,
    ):
        made = exact_prompts(60, 100, 0, token_ids=False, local=local, server=server)
    whole = [TEMPLATE.format(text) for text in made.prompts]
    assert {len(engine.encode(text, add_special_tokens=False).ids) for text in whole} == {100}
    assert len(set(whole)) == 60
    ran = [body for body in stub.bodies if body and "max_tokens" in body]
    assert not {body["messages"][0]["content"] for body in ran} & set(made.prompts)


def test_token_ids_from_vllm(engine: Tokenizer) -> None:
    """vLLM tells the ids of common words, without its BOS; prompts are drawn from those."""
    with (
        answering(served(engine)["vllm"]) as stub,
        open_tokenizer(probe(stub.url, "vllm"), BACKENDS["vllm"].dialects["completions"]) as server,
    ):
        made = exact_prompts(30, 512, 0, token_ids=True, local=None, server=server)
    used = {token for prompt in made.prompts for token in prompt}
    assert made.counting_method == "token ids"
    assert engine.token_to_id("<s>") not in used
    assert len(used) > 20


def test_key_is_sent(engine: Tokenizer) -> None:
    """The key goes along on every count."""
    with (
        answering(served(engine)["tgi"]) as stub,
        open_tokenizer(
            probe(stub.url, "tgi"), BACKENDS["tgi"].dialects["generate"], access=Access(bearer_header("k"))
        ) as server,
    ):
        server.count(["a", "b"])
    assert stub.keys[-2:] == ["Bearer k", "Bearer k"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, b"Internal Server Error"), "/tokenize answers 500: Internal Server Error"),
        ((200, b"<html>"), "/tokenize answers 200, None"),
        ((422, {"error": "x" * 400 + " NotFoundError"}), "NotFoundError"),
        ((200, {"count": None}), "/tokenize answers 200, {'count': None}"),
        ((422, {"error": "inputs"}), "/tokenize answers 422: inputs"),
        ((401, b""), "/tokenize answers 401"),
    ],
)
def test_no_count(answer: Answer, words: str) -> None:
    """Whatever a server answers instead of a count becomes an error that quotes it."""
    with answering({"POST /tokenize": answer}) as stub:
        facts = ServerFacts("vllm", stub.url, count_routes=("/tokenize",))
        with (
            open_tokenizer(facts, BACKENDS["vllm"].dialects["completions"]) as server,
            pytest.raises(UncountableError, match=re.escape(words)),
        ):
            server.count(["a"])
