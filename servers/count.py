"""How many tokens a server counts for a prompt: by its own tokenise route, else by running the text for one token."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from servers.calls import Caller
from servers.errors import UncountableError
from servers.kinds import KINDS
from servers.kinds.base import Route, ServerFacts, Told


@dataclass(frozen=True, slots=True)
class ServerTokenizer:
    """The server under test as a judge of lengths, through one kept connection.

    `count` raises UncountableError when the server answers anything but a count, UnreachableError and
    UnauthorizedError.
    """

    ask: Callable[[str, object], tuple[int, Any]]
    route: Route[int]
    model: str
    id_route: Route[list[int]] | None
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
        return [self._post(self.route, text) for text in texts]

    def ids(self, text: str) -> list[int]:
        """Ids of a text without special tokens; empty when the server does not tell them."""
        return self._post(self.id_route, text) if self.id_route else []

    def _post(self, route: Route[Told], text: str) -> Told:
        status, answer = self.ask(route.path, route.body(text, self.model))
        if status == 200:
            with suppress(KeyError, IndexError, TypeError, ValueError):
                return route.read(answer)
        raise UncountableError(
            f"the server does not say how many tokens a prompt has: {status} from {route.path}, {str(answer)[:200]}",
            "use another --endpoint, or check the server's log",
        )


@contextmanager
def connect(
    facts: ServerFacts, endpoint: str, *, api_key: str | None = None, verify: ssl.SSLContext | None = None
) -> Iterator[ServerTokenizer]:
    """Open a connection on which `facts.name` counts prompts for `endpoint`: completions, chat or generate."""
    kind = KINDS[facts.name]
    dialect = kind.dialects[endpoint]

    def known(route: Route[Told] | None) -> Route[Told] | None:
        return route if route and route.path in facts.count_routes else None

    with closing(Caller(facts.url, api_key, verify)) as ask:
        route = known(dialect.count) or dialect.count_by_running
        tokenizer = ServerTokenizer(ask, route, facts.model, known(kind.ids))
        if plain := known(dialect.count_text):
            tokenizer = replace(tokenizer, plain=replace(tokenizer, route=plain))
        yield tokenizer
