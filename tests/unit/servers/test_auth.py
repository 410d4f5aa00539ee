"""Keys as they are read, and secrets that are taken out of what is kept or shown."""

from __future__ import annotations

import html
import json
from base64 import b64encode
from contextlib import nullcontext
from urllib.parse import quote

import pytest

from loadgen.distributed.protocol import token_of
from loadgen.engine.resolve_server import access_for
from loadgen.errors import LoadgenError, PlanError
from loadgen.plan import Plan
from loadgen.plan_fields import command_line
from loadgen.servers.auth import (
    HIDDEN,
    ONE_SERVER,
    fill_fields,
    hide_secrets,
    key_hint,
    normalise_url,
    read_secret,
    redact,
    redact_command,
    redact_fields,
    redact_header,
    register_secret,
    require_no_credentials,
    require_one_url,
)
from loadgen.servers.discovery import server_address
from loadgen.servers.errors import SecretError, ServerError
from loadgen.servers.launch.spec import LOCAL, LaunchSpec, readable_log
from tests.support.command import in_process

KEY = 'sk-unit/42"&<x>-QrStUvWxYz'
SENT = ("{}\n", "{}\r\n", " \t{} \n\n")
REFUSED = (
    "{}\nX: y",
    "{}\x00".replace("\x00", "\x01"),
    "{}\u043a\u043b\u044e\u0447",
    "{}\udcff",
    "{}\x7f",
    "{}\u00fc",
    "{}\u202e",
)


@pytest.mark.parametrize("written", SENT)
def test_white_space_around_a_key_is_not_sent(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounted secrets end in a newline; wherever a key is read, it goes."""
    for name in ("LOADGEN_API_KEY", "OTHER", "LOADGEN_TOKEN"):
        monkeypatch.setenv(name, written.format(KEY))
    sent = {"Authorization": f"Bearer {KEY}"}
    assert access_for(Plan(server="tgi", n=1)).headers == sent
    assert access_for(Plan(server="tgi", n=1, api_key_env="OTHER")).headers == sent
    assert access_for(Plan(server="tgi", n=1, header=("Authorization: Bearer $OTHER",))).headers == sent
    assert access_for(Plan(server="tgi", n=1, header=("X-Two: $OTHER,$OTHER",))).headers["X-Two"] == f"{KEY},{KEY}"
    assert LaunchSpec("vllm", LOCAL, "m", "running").access.headers == sent
    assert read_secret("OTHER") == KEY
    assert token_of({"LOADGEN_TOKEN": written.format(KEY)}) == KEY


def test_the_key_is_sent_as_the_endpoint_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anthropic's protocol has a header of its own. Before the server is known, the key is sent in both ways."""
    monkeypatch.setenv("LOADGEN_API_KEY", KEY)
    version, own, bearer = ({"anthropic-version": "2023-06-01"}, {"x-api-key": KEY}, {"Authorization": f"Bearer {KEY}"})
    assert access_for(Plan(server="openai", n=1, endpoint="messages")).headers == version | own
    assert access_for(Plan(server="vllm", n=1, endpoint="messages")).headers == version | bearer
    assert access_for(Plan(url="http://127.0.0.1:1", n=1, endpoint="messages")).headers == version | own | bearer
    assert access_for(Plan(server="openai", n=1, endpoint="responses")).headers == bearer


@pytest.mark.parametrize("written", REFUSED)
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line break inside, control characters, letters beyond ASCII: a sentence that names the variable."""
    for name in ("LOADGEN_API_KEY", "LOADGEN_TOKEN"):
        monkeypatch.setenv(name, written.format(KEY))
    ways = (
        lambda: access_for(Plan(server="tgi", n=1)),
        lambda: LaunchSpec("vllm", LOCAL, "m", "running").access,
        lambda: token_of({"LOADGEN_TOKEN": written.format(KEY)}),
        lambda: access_for(Plan(server="tgi", n=1, header=("X-Key: $LOADGEN_API_KEY",))),
        lambda: Plan(server="tgi", n=1, header=(f"X-Key: {written.format(KEY)}\u043a",)),
    )
    for way in ways:
        with pytest.raises((LoadgenError, ServerError)) as caught:
            way()
        said = f"{caught.value} {caught.value.hint}"
        assert KEY[:8] not in said
        assert "X-Key" in said or "LOADGEN_" in said


def test_a_key_too_short_to_be_hidden_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be found in ordinary words, or stay in what a server repeats; one of several short words is hidden."""
    refused = pytest.raises((LoadgenError, SecretError), match="fewer than 6 characters")
    for key, in_header, sent in (
        ("k-34q", "", refused),
        ("", "k-34q", refused),
        ("k-34qz", "k-34qz", nullcontext()),
        ("q z q z", "", nullcontext()),
    ):
        monkeypatch.setenv("LOADGEN_API_KEY", key)
        monkeypatch.setenv("OTHER", in_header)
        with sent:
            access_for(Plan(server="tgi", n=1, header=("X-Key: $OTHER",) if in_header else ()))
            assert hide_secrets(f"no {key}!") == f"no {HIDDEN}!"


def test_a_simulated_server_and_servers_read_keys_alike(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, the variable by its name, and not the key."""
    folder = tmp_path_factory.mktemp("keys")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.setenv("LOADGEN_API_KEY", f"{KEY}\nX: y")
    commands = (
        ("mock-server", "--server", "vllm", "--api-key-env", "LOADGEN_API_KEY"),
        ("servers", "up", "--server", "vllm", "--launch", "simulated"),
        ("servers", "up", "--server", "vllm"),
        ("burst", "--server", "vllm"),
    )
    for command in commands:
        code, out, err = in_process(folder, *command)
        assert (code, "LOADGEN_API_KEY: a key cannot contain" in err, KEY[:8] in out + err) == (2, True, False), err


@pytest.mark.parametrize(
    "url",
    [
        "http://url-user-9:url-pass@h",
        "url-user-9:url-pass@h:1",
        "ftp://url-user-9@h",
        "https://h/v1?api_key=url-user-9",
    ],
)
def test_credentials_in_a_url_are_refused(url: str) -> None:
    """Wherever it is named: they would be kept with the run, and not even be sent."""
    for way in (
        lambda: Plan(server="tgi", n=1, url=url),
        lambda: Plan(server="tgi", n=1, dcgm_url=url),
        lambda: server_address(url),  # of LOADGEN_TGI_URL, and of matrix plans
    ):
        with pytest.raises(SecretError, match="a URL must not contain a user, a password") as caught:
            way()
        assert "--header" in caught.value.hint
        assert "url-" not in str(caught.value)
    for fine in ("http://h:1/v1", "http://h/run/@cf/meta", "https://[::1]:8/?x=1"):
        assert require_no_credentials(fine) == fine


def test_known_secrets_are_hidden_in_every_spelling() -> None:
    """As they are, in JSON, URLs and HTML; whole and cut; in text and bytes. Other words stay."""
    register_secret(f"Bearer {KEY}")
    for spelled in (KEY, json.dumps(KEY)[1:-1], quote(KEY, safe=""), html.escape(KEY)):
        assert hide_secrets(f"a {spelled} b {spelled}", whole=True) == "a *** b ***"
        assert hide_secrets(f"no {spelled[: len(spelled) // 2 + 1]} …").startswith("no ***")
        assert hide_secrets(f"{spelled[-17:]} is wrong").endswith("*** is wrong")
        assert hide_secrets(f"\xff {spelled}".encode("latin-1")) == b"\xff ***"
    assert hide_secrets(f"{KEY[:16]}", whole=True) == KEY[:16]  # a model may begin as a key does
    assert hide_secrets("Bearer of good news: sk-un") == "Bearer of good news: sk-un"
    register_secret("session=abcdef123456; theme=dark; id=x")
    assert hide_secrets("abcdef123456, theme, dark") == "***, theme, dark"
    register_secret(f"Basic {b64encode(b'me:correct-horse').decode()}")
    assert hide_secrets("me correct-horse") == "me ***"


def test_values_that_look_like_secrets_are_kept_as_variables() -> None:
    """Whatever the header is called; a variable with more beside it as well."""
    for value in (f"Bearer {KEY}", "sk-abcd1234", "ghp_abcd1234", "AbCdEfGh1JkLmNoPqRsTuVwXyZ0123456", "sk-live4$MORE"):
        assert redact_header(f"X-Lane: {value}") == "X-Lane: $X_LANE"
    for line in ("X-Lane: 7", "X-Lane: $LANE", "X-Auth: Bearer $TOKEN", "X-Trace: nightly-2026-11-22-vllm-against-tgi"):
        assert redact_header(line) == line
    with pytest.raises(PlanError) as caught:
        Plan(server="tgi", n=1, header=("sk4242424242",))
    assert "sk42" not in str(caught.value)


def test_settings_and_command_lines_are_kept_without_secrets() -> None:
    """Those of servers as well as ours, at any depth; and what was taken out is known in their logs."""
    given = {
        "run": {"header": ["X-Key: headerkey1", "X-Lane: 7"], "n": 3},
        "options": {"arguments": ["--api-key", "argumentkey1", "--max-tokens", "512", "--hf-token=tokentoken1"]},
        "env": {"VLLM_API_KEY": "environmentkey1", "HF_HUB_OFFLINE": "1"},
    }
    assert redact(given) == {
        "run": {"header": ["X-Key: $X_KEY", "X-Lane: 7"], "n": 3},
        "options": {"arguments": ["--api-key", "...", "--max-tokens", "512", "--hf-token=..."]},
        "env": {"VLLM_API_KEY": "...", "HF_HUB_OFFLINE": "1"},
    }
    log = b"api_key=['composekey1'], headerkey1 argumentkey1 tokentoken1 environmentkey1 api_key=None max_tokens=512"
    assert readable_log(log) == "api_key=['***'], *** *** *** *** api_key=None max_tokens=512"


@pytest.mark.parametrize(
    "key",
    [
        "sk-test-123456",
        "sk_live_abcdefgh",
        "gsk_abcd1234",
        "hf_abcdefghij",
        "a8f5f167f44f4964e6c998dee827110c",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.e30.x",
        "abcdef123456",
        "averylongpassword",
    ],
)
def test_a_key_in_place_of_a_variable_is_not_shown(key: str) -> None:
    """`--api-key-env KEY` is a common slip. The message says what belongs there, and hides the key from then on."""
    with pytest.raises(SecretError, match="name of an environment variable, but this looks like a key") as caught:
        access_for(Plan(server="tgi", n=1, api_key_env=key))
    assert key not in f"{caught.value} {caught.value.hint}"
    assert hide_secrets(f"the key {key}") == "the key ***"


@pytest.mark.parametrize(
    "name", ["NOT_SET", "my_key", "K8S_TOKEN", "HF_TOKEN_RO", "LLM_KEY_2", "AZURE_OPENAI_KEY_EASTUS2", "_KEY", "MyKey"]
)
def test_a_variable_that_is_not_set_is_named(name: str) -> None:
    """A name that people give to variables is repeated, so that a typing error can be seen."""
    with pytest.raises(PlanError, match=f"--api-key-env {name}: the variable is empty or not set"):
        access_for(Plan(server="tgi", n=1, api_key_env=name))
    with pytest.raises(PlanError, match="--api-key-env names no variable"):
        access_for(Plan(server="tgi", n=1, api_key_env=""))


def test_a_variable_with_an_odd_name_may_hold_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set is a variable, whatever its name looks like."""
    monkeypatch.setenv("a8f5f167f44f4964e6c998dee827110c", KEY)
    assert access_for(Plan(server="tgi", n=1, api_key_env="a8f5f167f44f4964e6c998dee827110c")).headers


@pytest.mark.parametrize(
    ("environ", "headers", "variable"),
    [
        ({"OPENAI_API_KEY": "sk-other"}, {}, "OPENAI_API_KEY"),
        ({"OPENAI_API_KEY": "sk-other"}, {"Authorization": "Bearer sk-mine"}, "OPENAI_API_KEY"),
        ({"OPENAI_API_KEY": "sk-mine", "HF_TOKEN": "hf_x"}, {"Authorization": "Bearer sk-mine"}, "HF_TOKEN"),
        ({"OPENAI_API_KEY": "sk-mine"}, {"Authorization": "Bearer sk-mine"}, ""),
        ({"OPENAI_API_KEY": " "}, {}, ""),
        ({}, {}, ""),
    ],
)
def test_a_refused_request_suggests_the_key_of_another_tool(
    environ: dict[str, str], headers: dict[str, str], variable: str
) -> None:
    """The hint names the first variable whose key was not sent. Otherwise it explains where a key belongs."""
    hint = key_hint(headers, environ)
    assert (f"--api-key-env {variable}" in hint) if variable else ("LOADGEN_API_KEY" in hint)
    assert not any(key.strip() and key.strip() in hint for key in environ.values())


@pytest.mark.parametrize(
    "urls",
    [
        "http://a:1,http://b:2",
        "http://a:1/v1,http://b:2/v1",
        "http://a:1/v1, b:2/v1",
        "http://a http://b",
        "http://a;http://b",
        "http://a,b",
        "a:8000,b:8000",
    ],
)
def test_several_urls_in_one_text_are_refused_with_the_way_out(urls: str) -> None:
    """A list in one option, also in one of several: the sentence says how to name replicas."""
    for several in (urls, ["http://c", urls]):
        with pytest.raises(PlanError, match=r"holds several URLs") as caught:
            Plan(server="tgi", n=1, url=several)
        assert ONE_SERVER in str(caught.value)
    with pytest.raises(ValueError, match="holds several URLs"):
        normalise_url(urls)


def test_one_url_with_separators_in_its_path_is_taken() -> None:
    """A comma or semicolon in a path does not make a list. Credentials in a list are refused without showing them."""
    for url in ("http://h/a,b/v1", "http://h/x;y=1", "http://[::1]:8000/v1"):
        assert require_one_url(url) == url
    for urls in ("http://a,http://user-9:pass-word@b", "http://user-9:pass-word@a,http://b"):
        with pytest.raises(SecretError) as caught:
            Plan(server="tgi", n=1, url=urls)
        assert "user-9" not in str(caught.value)


SECRET_FIELDS = {
    "temperature": 0.5,
    "api_key": "body-secret-1",
    "metadata": {"password": "body-secret-2", "tags": ["a", {"clientSecret": "body-secret-3"}]},
    "session_token": 123456789,
    "note": "Bearer body-secret-4",
    "prompt_cache_key": "user-7",
    "eos_token": "</s>",
    "stop_token_ids": [7],
    "max_time": 9,
    "hf_token": "$HF_TOKEN",
    "guided_regex": "^[A-Za-z0-9]{32}$",
}
STORED_FIELDS = SECRET_FIELDS | {
    "api_key": "$API_KEY",
    "metadata": {"password": "$PASSWORD", "tags": ["a", {"clientSecret": "$CLIENTSECRET"}]},
    "session_token": "$SESSION_TOKEN",
    "note": "$NOTE",
}


def test_secret_fields_of_a_body_are_stored_as_variables() -> None:
    """The plan in a run file, the command that repeats a run, the recorded command line and journals hold no secret."""
    text = json.dumps(SECRET_FIELDS)
    plan = Plan(server="tgi", n=1, extra_body=text)
    assert plan.extra_body == SECRET_FIELDS
    assert plan.to_dict()["extra_body"] == STORED_FIELDS
    words = command_line(plan)
    assert json.loads(words[words.index("--extra-body") + 1]) == STORED_FIELDS
    recorded = redact(["loadgen", "run", "--extra-body", text, f"--extra-body={text}", "--extra-body", "@body.json"])
    assert json.loads(recorded[3]) == json.loads(recorded[4].partition("=")[2]) == STORED_FIELDS
    assert recorded[6] == "@body.json"
    assert redact({"run": {"extra_body": SECRET_FIELDS}}) == {"run": {"extra_body": STORED_FIELDS}}
    echo = "body-secret-1 body-secret-2 body-secret-3 body-secret-4 123456789 user-7"
    assert hide_secrets(echo) == "*** *** *** *** *** user-7"
    assert redact_fields({"temperature": 1}) == {"temperature": 1}


@pytest.mark.parametrize(
    "text",
    ['{"api_key": "typed-secret",}', '{"max_tokens": 4, "api_key": "typed-secret"}', "{api_key: typed-secret}"],
)
def test_a_mistake_in_a_body_shows_no_secret(text: str) -> None:
    """A message that repeats the option hides secret fields, also if the text is not JSON."""
    with pytest.raises(PlanError, match="--extra-body") as caught:
        Plan(server="tgi", n=1, extra_body=text)
    assert "typed-secret" not in str(caught.value)
    assert "typed-secret" not in str(redact(["loadgen", "run", "--extra-body", text]))


def test_secret_fields_are_filled_from_the_environment() -> None:
    """`$NAME` is replaced in secret fields only, and the secret is hidden. A variable that is not set is named."""
    environ = {"GATEWAY_KEY": "gateway-secret-1\n"}
    fields = {"api_key": "$GATEWAY_KEY", "auth": {"token": "id ${GATEWAY_KEY}"}, "guided_regex": "^$GATEWAY_KEY"}
    assert fill_fields(fields, environ) == {
        "api_key": "gateway-secret-1",
        "auth": {"token": "id gateway-secret-1"},
        "guided_regex": "^$GATEWAY_KEY",
    }
    assert hide_secrets("no gateway-secret-1") == "no ***"
    with pytest.raises(SecretError, match=r"--extra-body api_key: \$NOT_THERE is not set"):
        fill_fields({"api_key": "$NOT_THERE"}, environ)
    with pytest.raises(SecretError, match="fewer than 6 characters"):
        Plan(server="tgi", n=1, extra_body={"api_key": "short"})


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *((name, True) for name in ("api_key", "apikey", "x-api-key", "OPENAI_API_KEY", "apiKey", "accessToken")),
        *((name, True) for name in ("hf_token", "password", "db_passwd", "client_secret", "Authorization", "jwt")),
        *((name, False) for name in ("prompt_cache_key", "eos_token", "stop_token_ids", "max_tokens", "author")),
        *((name, False) for name in ("tokens", "keywords", "monkey", "return_tokens_as_token_ids")),
    ],
)
def test_the_name_tells_whether_a_field_is_secret(name: str, is_secret: bool) -> None:
    """Names of keys, tokens and passwords are recognised in any spelling. Fields about tokens of text are not."""
    assert (redact_fields({name: "some-text-7"}) != {name: "some-text-7"}) == is_secret


@pytest.mark.parametrize(
    ("command", "stored"),
    [
        ("curl -H 'Authorization: Bearer abcd1234' http://h", "curl -H 'Authorization: Bearer ***' http://h"),
        ('curl -H "Authorization: Basic dXNlcjpwYXNz" http://h', 'curl -H "Authorization: Basic ***" http://h'),
        ("curl -H 'Cookie: a=b1234567; c=d' http://h", "curl -H 'Cookie: ***' http://h"),
        ("curl -u joe:pa55word http://h", "curl -u joe:*** http://h"),
        ("curl http://joe:pa55word@h:80/", "curl http://joe:***@h:80/"),
        ("curl http://h/?key=abcdefgh&x=1", "curl http://h/?key=***&x=1"),
        ("""curl -d '{"api_key": "topsecret1"}' http://h""", """curl -d '{"api_key": ***}' http://h"""),
        ("mysql --password 'a b c d' -e x", "mysql --password *** -e x"),
        ("API_KEY=hunter2x ./x; y --token tok123456; z", "API_KEY=*** ./x; y --token ***; z"),
        ("echo hf_abcdefghij", "echo ***"),
        ("curl -H 'Authorization: Bearer $TOKEN' http://h", None),
        ('x --password "$(cat file)" --key client.pem --max-tokens=5', None),
        ("kubectl delete secret vllm; kubectl delete pod vllm-0; echo basic settings", None),
        ("curl http://h:80/a@b", None),
    ],
)
def test_stored_commands_have_no_secrets(command: str, stored: str | None) -> None:
    """A secret in a shell command is found by its form, or by the name before it. None: the command has no secrets."""
    assert redact_command(command) == (stored or command)
    assert redact_command(redact_command(command)) == redact_command(command)
