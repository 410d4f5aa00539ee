"""Finds an endpoint on which the server accepts requests, and the request fields that the server refuses.

The module sends test requests for one token. A GET request would not help, because many servers answer 404 to a GET of
a route that exists. A run does not start in three cases: the server has none of the endpoints, redirects the test
request, or refuses the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import msgspec

from loadgen.servers.auth import NO_AUTH, Access
from loadgen.servers.backends.base import ServerFacts, model_cards
from loadgen.servers.backends.dialect import REFUSABLE, Dialect
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.errors import DECODE_ERRORS, NoEndpointError, RefusedModelError, ServerError, UnreachableError
from loadgen.servers.gateways import counting_gateway
from loadgen.servers.server_url import API_PATH, AZURE_VERSION_QUERY, azure_deployment, parse_server_url
from loadgen.workloads.request import Request

if TYPE_CHECKING:
    from loadgen.servers.json_client import JsonClient, JsonResponse

Say = Callable[[str], None]

FEW_TOKENS = 16
"""Output tokens of a test request if the server refuses to generate one token. OpenAI's reasoning models want 16."""
MISSING_STATUSES = (404, 405, 501)
"""HTTP statuses of a route that does not exist."""
FIELD_STATUSES = (400, 406, 411, 412, 415, 416, 417, 418, 421, 422)
"""HTTP statuses with which servers refuse a field."""
NAMED_FIELD_STATUSES = (*FIELD_STATUSES, 500)
"""HTTP statuses of a refusal that names the refused field. 500 comes from LiteLLM."""
MODELS_LISTED = 20
"""Maximum number of models that a message names."""
_ECHOES = frozenset({"input", "ctx", "url", "body", "request"})
"""Keys of error objects that repeat the request, which contains the names of all fields."""
_ALTERNATIVES = re.compile(
    r"(?i)\b(?:expected (?:one of|a value)|(?:allowed|supported|valid|known) (?:fields|parameters))\b.*"
)
"""Matches the end of a message that lists the fields which the server accepts."""
_MODEL_REFUSED = re.compile(
    r"model_not_found|unknown_model|invalid_model|DeploymentNotFound"
    r"|\bmodels?\b.{0,200}?\bnot (be )?(found|exist|available|served|loaded|deployed|registered|supported|allowed)"
    r"|\bmodels?\b.{0,200}?\b(doesn't exist|is unknown|unavailable|no longer)"
    r"|\b(unknown|invalid|no such|no (\w+ )?(workers?|endpoints?|deployments?|backends?)).{0,60}\bmodel\b",
    re.IGNORECASE | re.DOTALL,
)
"""Matches a refusal that concerns the model."""


class Trial(NamedTuple):
    """The outcome of the test requests on one endpoint."""

    dialect: Dialect
    """The dialect without the fields that the server refuses."""
    sent: bytes
    """The body of the last test request."""
    response: JsonResponse

    @property
    def accepted(self) -> bool:
        """True if the server ran the test request. False for a web page, even if its status is 200."""
        return self.response.status < 300 and self.response.content.lstrip()[:1] != b"<"

    @property
    def missing(self) -> bool:
        """True if the server does not have this endpoint: the response has a status such as 404, or is a web page."""
        return self.response.status in MISSING_STATUSES or (self.response.status < 300 and not self.accepted)

    @property
    def counting_gateway(self) -> str:
        """The name of a gateway that reports its own token counts on this endpoint. Empty if there is none."""
        return counting_gateway(self.response.headers, self.dialect.endpoint)

    @property
    def words(self) -> str:
        """The request path and the server's answer, such as `POST /v1/completions answers 404 Not Found`."""
        answer = f"{self.response.status}, a web page" if self.response.status < 300 else self.response.words
        return f"POST {self.dialect.path} answers {answer}"

    @property
    def model_refused(self) -> bool:
        """True if the server refuses the request because of its model."""
        return self.response.status >= 400 and _MODEL_REFUSED.search(_words(self.response.content)) is not None


def choose_endpoint(
    dialects: Sequence[Dialect],
    facts: ServerFacts,
    request: Request,
    say: Say,
    *,
    timeout_s: float,
    access: Access = NO_AUTH,
) -> Dialect:
    """Return the first of `dialects` whose requests the server accepts. It leaves out the fields that the server
    refuses.

    A dialect is the request and response format of an endpoint. `request` is a request for one token. `say` is called
    with a line for each result that the user should know, such as a refused field.

    There are two special cases:

    - A gateway may replace the server's token counts on an endpoint. Such an endpoint is used only if the server
      accepts no other endpoint. Its dialect then ignores the token counts.
    - The server may refuse all requests for another reason, such as overload. In this case, the first dialect whose
      endpoint exists is returned. The run then records the reason.

    This function raises:

    - NoEndpointError if every endpoint is missing, or if the request is redirected.
    - RefusedModelError if the server refuses the model.
    - UnauthorizedError if the server requires an API key, or refuses the key that was sent.
    """
    from loadgen.servers.json_client import BUSY_STATUSES, JsonClient

    with closing(JsonClient(facts.full_url, access, timeout_s, say)) as client:
        trials: list[Trial] = []
        for dialect in dialects:
            trial = _fit(client, dialect, facts, request)
            if trial.accepted and not trial.counting_gateway:
                _report(trial, trials, facts, say)
                return trial.dialect
            trials.append(trial)
            if trial.response.status in BUSY_STATUSES:
                break  # a busy server has the endpoint
        recounted = next((trial for trial in trials if trial.accepted), None)
        if recounted:
            _report(recounted, trials[: trials.index(recounted)], facts, say)
            say(_recounted_words(recounted))
            return recounted.dialect.without_usage()
        error = _reason_to_stop(trials, client, facts)
        if error:
            raise error
    trial = next(trial for trial in trials if not trial.missing)
    say(f"{facts.url} refuses a request for one token: {trial.words}")
    return trial.dialect


def accepts_request(client: JsonClient, dialect: Dialect, facts: ServerFacts) -> bool:
    """Return True if the server answers a request for one token as an OpenAI server does.

    If the server refuses a field of the request, the request is sent again without this field.
    """
    trial = _fit(client, dialect, facts, Request(0, "Hello", 0, 1))
    return trial.accepted and b'"choices"' in trial.response.content


def relocated(dialect: Dialect, facts: ServerFacts) -> Dialect:
    """Return the dialect with the path that its endpoint has on the server that `facts` describes.

    On some servers, the OpenAI routes begin with another prefix than `/v1`. In this case, `/v1` in the path is replaced
    by this prefix. If the server's URL has a query, such as `?version=2`, the query is appended to the path.
    """
    path = dialect.path
    if path.startswith(f"{API_PATH}/"):
        path = facts.api_path + path.removeprefix(API_PATH)
    if facts.query:
        path = f"{path}?{facts.query}"
    return dialect if path == dialect.path else dialect.at(path)


def list_models(cards: Sequence[dict[str, Any]]) -> str:
    """Return the model names as text for a message.

    If there are more than MODELS_LISTED names, the text ends with the number of the other names, such as ` and 12
    more`.
    """
    names = sorted(str(card["id"]) for card in cards if "id" in card)
    more = f" and {len(names) - MODELS_LISTED} more" if len(names) > MODELS_LISTED else ""
    return ", ".join(names[:MODELS_LISTED]) + more


def _fit(client: JsonClient, dialect: Dialect, facts: ServerFacts, request: Request) -> Trial:
    """Send test requests in the format of `dialect`, and adapt the format until the server accepts a request.

    `request` is the content of the test requests. After each refusal, the next test request omits or changes a field.
    Return the accepted attempt. If no adaptation helps, or the server refuses a request for a reason other than its
    fields, return a refused attempt.
    """

    def send(candidate: Dialect) -> Trial:
        test = msgspec.structs.replace(request, output_tokens=request.output_tokens and candidate.test_tokens)
        body = candidate.encode(test, facts.model)
        path = candidate.path.partition("?")[0]
        return Trial(candidate, body, client.request(path, body, candidate.media_headers))

    trial = send(dialect)
    if dialect.request_form is None:
        return trial
    # Each round changes one field, so the number of rounds is limited.
    for _ in range(len(REFUSABLE) + 1):
        if trial.accepted or trial.response.status not in NAMED_FIELD_STATUSES:
            return trial
        changed = _without_named_field(trial)
        if changed is None:
            break
        trial = send(changed)
    if trial.response.status not in FIELD_STATUSES or trial.model_refused:
        return trial
    for candidate in _eliminations(trial.dialect):
        attempt = send(candidate)
        if attempt.accepted:
            return _restored(attempt, trial.dialect, send)
    return trial


def _without_named_field(trial: Trial) -> Dialect | None:
    """Return the trial's dialect (its request format) without a field that the server's refusal names.

    Only one field is changed, even if the refusal names several. A field that has a newer name, such as `max_tokens`,
    gets this newer name instead. The result is None if the refusal names no field that may be left out.

    There is one exception: a server may refuse the output length only because the trial requests a single token. The
    result then keeps the field of the output length, and requests FEW_TOKENS tokens.
    """
    dialect = trial.dialect
    words = _words(trial.response.content)
    for field in dialect.refusable_fields:
        name = REFUSABLE[field] if field in dialect.dropped_fields else field
        is_sent = name and f'"{name}":'.encode() in trial.sent
        if not is_sent or not re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", words):
            continue
        newer_name = REFUSABLE[field]
        if newer_name and dialect.test_tokens == 1 and (name == newer_name or newer_name not in words):
            return dialect.without(dialect.dropped_fields, FEW_TOKENS)
        if name == field:
            return dialect.without((*dialect.dropped_fields, field), dialect.test_tokens)
    return None


def _eliminations(dialect: Dialect) -> Iterator[Dialect]:
    """Yield variants of `dialect` (the request format) that the server may accept although it refused this dialect.

    The variants have fewer fields, or request FEW_TOKENS output tokens. They are tried if the server's refusal names no
    field.
    """
    dropped = dialect.dropped_fields
    left = [field for field in dialect.refusable_fields if field not in dropped]
    optional = tuple(field for field in left if not REFUSABLE[field])
    renamed = tuple(field for field in left if REFUSABLE[field])
    if optional:
        yield dialect.without((*dropped, *optional), dialect.test_tokens)
    if dialect.test_tokens == 1:
        yield dialect.without(dropped, FEW_TOKENS)
        yield dialect.without((*dropped, *optional), FEW_TOKENS)
    if renamed:
        yield dialect.without((*dropped, *optional, *renamed), FEW_TOKENS)


def _restored(trial: Trial, start: Dialect, send: Callable[[Dialect], Trial]) -> Trial:
    """Add dropped fields to a test request again, one at a time. Return the last test request that the server accepted.

    Several fields were dropped from the accepted test request `trial` at once, although the server may refuse only some
    of them. For each dropped field, `send` therefore sends a test request with this field. If the server accepts the
    request, the field stays. Some fields are not tried:

    - The fields in `start.dropped_fields`, because the server has already refused them.
    - A field that is the only dropped one, because the server must have refused it.

    `stream_options` is added before `continuous_usage_stats`, which is a field inside it.
    """
    for field in reversed(trial.dialect.dropped_fields):
        kept = tuple(name for name in trial.dialect.dropped_fields if name != field)
        if field in start.dropped_fields or not kept:
            continue
        if field == "continuous_usage_stats" and "stream_options" in kept:
            continue  # without `stream_options`, the request would not contain this field
        attempt = send(trial.dialect.without(kept, trial.dialect.test_tokens))
        if attempt.accepted:
            trial = attempt
    return trial


def _report(trial: Trial, failed: Sequence[Trial], facts: ServerFacts, say: Say) -> None:
    """Report to the user (`say`) what the probe has found out.

    There is a line for a change of the endpoint, for a model that the server does not list, and for fields that are
    left out. `trial` is the accepted test request, and `failed` contains the refused ones.
    """
    dialect = trial.dialect
    if failed and failed[0].accepted:
        gateway = failed[0].counting_gateway
        reason = f"{gateway} counts the tokens of {failed[0].dialect.path} itself and hides the server's counts"
        say(f"{reason}; using {dialect.path} (--endpoint {dialect.endpoint})")
    elif failed:
        say(f"{failed[0].words}; using {dialect.path} (--endpoint {dialect.endpoint})")
    if not facts.listed:
        say(f"{facts.url} does not list the model {facts.model}, but accepts requests for it")
    if dialect.dropped_fields:
        names = ", ".join(dialect.dropped_fields)
        say(f"{facts.url} refuses {names} on {dialect.endpoint}: left out, or sent under a newer name")


def _recounted_words(trial: Trial) -> str:
    """Return a sentence on an endpoint whose token counts come from a gateway instead of the server."""
    return (
        f"{trial.counting_gateway} counts the tokens of {trial.dialect.path} itself and hides the server's counts: "
        "chunks are counted instead (--endpoint chat has the server's counts)"
    )


def _reason_to_stop(trials: Sequence[Trial], client: JsonClient, facts: ServerFacts) -> ServerError | None:
    """Return the error that ends the probe because no request of the run can succeed, or None if a request may succeed.

    `trials` are the test requests that the server refused. The error names the cause, such as a redirect, an unknown
    model or a missing API key.
    """
    redirected = next((trial for trial in trials if trial.response.location), None)
    if redirected:
        return _redirect_error(redirected, facts)
    refused = next((trial for trial in trials if trial.model_refused), None)
    closed = next((trial for trial in trials if trial.response.status in (401, 403)), None)
    if refused and all(trial.model_refused or trial.missing or trial is closed for trial in trials):
        return _model_error(refused, client, facts)
    if closed:
        return client.unauthorized(closed.dialect.path, closed.response)
    if not all(trial.missing for trial in trials):
        return None
    hint = "check the path in --url (the base URL, or the full URL of the endpoint); --endpoint names another endpoint"
    if azure_deployment(facts.url) and AZURE_VERSION_QUERY not in facts.query:
        hint = f"Azure needs its API version in --url: {facts.url}?{AZURE_VERSION_QUERY}=2024-10-21"
    return NoEndpointError(f"{facts.url} accepts no requests: {'; '.join(trial.words for trial in trials)}", hint)


def _redirect_error(trial: Trial, facts: ServerFacts) -> NoEndpointError:
    """Return the error for a request that the server or a gateway redirects."""
    location = trial.response.location
    hint = "a login page needs credentials: --api-key-env, or --header"
    target = urlsplit(location)
    if target.scheme in ("http", "https"):
        plain = urlunsplit((target.scheme, target.netloc, target.path, "", ""))
        with suppress(ValueError, ServerError):
            address = parse_server_url(plain)
            if address.endpoint:
                hint = f"use the server's final address: --url {address.base}"
    status = trial.response.status
    return NoEndpointError(f"{facts.url} redirects POST {trial.dialect.path} to {one_line(location)} ({status})", hint)


def _model_error(trial: Trial, client: JsonClient, facts: ServerFacts) -> RefusedModelError:
    """Return the error for a model that the server refuses, with the models that the server lists."""
    listed = ""
    with suppress(UnreachableError):
        listed = list_models(model_cards(client.request(f"{facts.api_path}/models").value))
    hint = f"it lists: {listed}; name one with --model" if listed else "name another model with --model"
    if azure_deployment(facts.url):
        hint = "check the name of the deployment in --url"
    elif listed == facts.model:
        hint = f"it lists only {listed}; name the model that it serves with --model"
    return RefusedModelError(f"{facts.url} refuses the model {facts.model}: {trial.words}", hint)


def _words(content: bytes) -> str:
    """Return the text of an error response. The callers search this text for the names of refused fields or models.

    `content` is JSON or plain text. Two parts are left out, because they also name fields that the server accepts:
    copies of the request, and lists of the supported fields.
    """
    try:
        value = msgspec.json.decode(content)
    except DECODE_ERRORS:
        value = content.decode("utf-8", "replace")
    return "\n".join(_ALTERNATIVES.sub("", text) for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    """Yield every string in a decoded error response, except in fields that repeat the request (_ECHOES)."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in _ECHOES:
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
