"""How many tokens a server counts for a prompt: by its own tokenise route, else by running the text for one token."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from servers.calls import Caller
from servers.errors import UncountableError
from servers.find import ServerFacts

Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Route:
    """One way to have a text counted."""

    path: str
    body: Callable[[str, str], dict[str, Any]]
    """(text, model) to the body of the POST."""
    tokens: Callable[[Any], int]
    """The answer's JSON to the number of tokens of the prompt."""
    generates: bool = False


@dataclass(frozen=True, slots=True)
class ServerTokenizer:
    """The server under test as a judge of lengths, through one kept connection.

    `count` raises UncountableError when the server answers anything but a count, UnreachableError and
    UnauthorizedError.
    """

    ask: Callable[[str, object], tuple[int, Any]]
    route: Route
    model: str
    id_route: str | None
    """The route that gives token ids, where the server has one and its API takes ids."""
    plain: ServerTokenizer | None = None
    """Where counting a prompt generates: the server's count of text alone, without running it."""
    words: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether counting makes the server run the text, and so leaves it in the server's prefix cache."""
        return self.route.generates

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text when it is sent as a prompt, special tokens and chat template included."""
        route = self.route
        return [self._post(route.path, route.body(text, self.model), route.tokens) for text in texts]

    def ids(self, text: str) -> list[int]:
        """Ids of a text without special tokens; empty when the server does not tell them."""
        if self.id_route is None:
            return []
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return self._post(self.id_route, body, lambda answer: [int(number) for number in answer["tokens"]])

    def _post(self, path: str, body: object, read: Callable[[Any], Told]) -> Told:
        status, answer = self.ask(path, body)
        if status == 200:
            with suppress(KeyError, IndexError, TypeError, ValueError):
                return read(answer)
        raise UncountableError(
            f"the server does not say how many tokens a prompt has: {status} from {path}, {str(answer)[:200]}",
            "use another --endpoint, or check the server's log",
        )


@contextmanager
def connect(
    facts: ServerFacts, endpoint: str, *, api_key: str | None = None, verify: ssl.SSLContext | bool = True
) -> Iterator[ServerTokenizer]:
    """Open a connection on which `facts.name` counts prompts for `endpoint`: completions, chat or generate."""
    with closing(Caller(facts.url, api_key, verify)) as ask:
        id_route = "/tokenize" if facts.name == "vllm" and "/tokenize" in facts.count_routes else None
        route, plain = _route(facts, endpoint), PLAIN.get(facts.name)
        tokenizer = ServerTokenizer(ask, route, facts.model, id_route)
        if route.generates and plain and plain.path in facts.count_routes:
            tokenizer = replace(tokenizer, plain=replace(tokenizer, route=plain))
        yield tokenizer


def _route(facts: ServerFacts, endpoint: str) -> Route:
    counting = COUNTING.get((facts.name, endpoint))
    if counting and counting.path in facts.count_routes:
        return counting
    return RUNNING.get((facts.name, endpoint)) or OPENAI[endpoint]


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


COUNTING = {
    # vLLM adds a BOS to a text prompt as its completions do by default; `messages` go through the chat template.
    ("vllm", "completions"): Route(
        "/tokenize", lambda text, model: {"model": model, "prompt": text}, lambda answer: int(answer["count"])
    ),
    ("vllm", "chat"): Route(
        "/tokenize", lambda text, model: {"model": model, "messages": _messages(text)}, lambda a: int(a["count"])
    ),
    # TGI tokenises here just as it does for generation, special tokens included (router/src/validation.rs).
    ("tgi", "generate"): Route("/tokenize", lambda text, _: {"inputs": text}, len),
    ("tgi", "completions"): Route("/tokenize", lambda text, _: {"inputs": text}, len),
    ("tgi", "chat"): Route(
        "/chat_tokenize",
        lambda text, model: {"model": model, "messages": _messages(text)},
        lambda answer: len(answer["tokenize_response"]),
    ),
    # LightLLM adds special tokens on its native route and none on /v1/completions (server/api_openai.py).
    ("lightllm", "generate"): Route(
        "/tokens", lambda text, _: {"text": text, "parameters": {}}, lambda answer: int(answer["ntokens"])
    ),
    ("lightllm", "completions"): Route(
        "/tokens",
        lambda text, _: {"text": text, "parameters": {"add_special_tokens": False}},
        lambda answer: int(answer["ntokens"]),
    ),
}
"""(server, endpoint) to the route that counts without running the text."""

PLAIN = {"lightllm": COUNTING["lightllm", "completions"]}
"""Server to the route that counts text alone, where there is none for chat."""

RUNNING = {
    # Before 1.0 only the details of a token tell the length of the prompt.
    ("lightllm", "generate"): Route(
        "/generate",
        lambda text, _: {"inputs": text, "parameters": {"max_new_tokens": 1, "return_details": True}},
        lambda answer: int(answer["tokens"][0]["prompt_tokens"]),
        generates=True,
    ),
    # Before 1.4.0; one entry per prompt token.
    ("tgi", "generate"): Route(
        "/generate",
        lambda text, _: {
            "inputs": text,
            "parameters": {"max_new_tokens": 1, "details": True, "decoder_input_details": True},
        },
        lambda answer: len(answer["details"]["prefill"]),
        generates=True,
    ),
}
"""(server, endpoint) to a request for one token whose answer tells the length of the prompt."""

OPENAI = {
    "chat": Route(
        "/v1/chat/completions",
        lambda text, model: {"model": model, "messages": _messages(text), "max_tokens": 1, "temperature": 0},
        lambda answer: int(answer["usage"]["prompt_tokens"]),
        generates=True,
    ),
    "completions": Route(
        "/v1/completions",
        lambda text, model: {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0},
        lambda answer: int(answer["usage"]["prompt_tokens"]),
        generates=True,
    ),
}
"""Endpoint to a request for one token, in the form that all servers with OpenAI's routes understand."""
