"""The plan: every mistake at once, in the words of the command line."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from loadgen.engine.resolve_server import access_for
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.plan_fields import command_line, describe_lengths, read_plan
from loadgen.servers import hardware
from loadgen.servers.auth import redact
from loadgen.servers.errors import HostsError
from loadgen.servers.hardware import HardwareError
from loadgen.servers.launch.spec import read_hosts


def test_values_are_stored_in_their_canonical_form() -> None:
    """However they were written: arrivals, workloads and lengths read back as one text; fixed lengths are numbers."""
    plan = Plan(server="tgi", arrivals="poisson:20.0", duration_s=5, input_tokens="0512", output_tokens="uniform:1..9")
    assert (plan.arrivals, plan.input_tokens, plan.output_tokens) == ("poisson:20", 512, "uniform:1..9")


@pytest.mark.parametrize(
    ("written", "level"), [("95%", 0.95), ("0.99", 0.99), (0.9, 0.9), ("99.5%", 0.995), (None, None)]
)
def test_a_confidence_is_a_share(written: object, level: float | None) -> None:
    """As a percentage or as a share; the command line repeats it next to the objectives."""
    plan = Plan(server="tgi", n=3, objectives=["complete >= 99%"], confidence=written)
    assert plan.confidence == level
    words = ["--confidence", f"{level:g}"] if level else []
    assert command_line(plan)[-2 - len(words) :] == ["--assert", "complete >= 99%", *words]


@pytest.mark.parametrize("written", ["5%", "100%", "95", "high", 2])
def test_a_confidence_is_between_a_half_and_one(written: object) -> None:
    """Other values are refused with the form to write."""
    with pytest.raises(PlanError, match=r"--confidence .*write 95% or 0\.95"):
        Plan(server="tgi", n=3, objectives=["complete >= 99%"], confidence=written)


def test_a_plan_that_would_never_end_says_how_to_end_it() -> None:
    """Endless arrivals need a number of requests or a duration; a ramp ends by itself."""
    for arrivals in ("burst", "constant:5", "closed:3"):
        with pytest.raises(PlanError, match="--duration 60s"):
            Plan(server="tgi", arrivals=arrivals)
    assert Plan(server="tgi", arrivals="ramp:1..5/10s").n is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 128),
        ({"workload": "shared-prefix:groups=2,tokens=8"}, 128),
        ({"workload": "multi-turn:turns=3"}, 128),
        ({"workload": "jsonl:a.jsonl"}, "answers"),
        ({"workload": "sharegpt:a.json"}, "answers"),
        ({"workload": "alpaca:a.json"}, "answers"),
        ({"workload": "multi-turn:a.json,think=1s"}, "answers"),
        ({"workload": "jsonl:a.jsonl", "output_tokens": 64}, 64),
        ({"workload": "jsonl:a.jsonl", "output_tokens": "max:answers"}, "max:answers"),
        ({"output_tokens": "max:0064"}, "max:64"),
        ({"output_tokens": " max:uniform:1..9"}, "max:uniform:1..9"),
    ],
)
def test_a_file_brings_its_own_output_lengths(settings: dict[str, object], expected: int | str) -> None:
    """Unless others are named, answers shall be as long as those on file; elsewhere 128 tokens. The plan says which,
    and the command that repeats it asks for the same."""
    plan = Plan(server="tgi", n=4, **settings)
    assert plan.output_tokens == expected
    command = command_line(plan)
    assert ("--output-tokens" in command) == ("output_tokens" in settings)
    assert plan.may_stop_early == str(expected).startswith("max:")


def test_a_named_length_is_repeated_even_where_it_is_the_usual_one() -> None:
    """128 of a file's workload is not its default."""
    assert command_line(Plan(server="tgi", n=4, workload="jsonl:a", output_tokens=128))[-2:] == [
        "--output-tokens",
        "128",
    ]


def test_a_default_that_follows_from_a_mistake_is_none(tmp_path: Path) -> None:
    """A workload that cannot be read is one mistake, not two."""
    with pytest.raises(PlanError) as caught:
        Plan(server="tgi", n=4, workload="json:a")
    assert str(caught.value).splitlines() == [
        "--workload json:a: workload 'json:a': unknown source 'json', and no file has this name; choose synthetic, "
        "shared-prefix, sharegpt, alpaca, jsonl, requests, audio, sessions, multi-turn, or name a file"
    ]


def test_a_file_is_recognised_and_is_an_end(tmp_path: Path) -> None:
    """The plan names the format that was recognised. A file ends a closed loop, unless it is repeated."""
    file = tmp_path / "chats"
    file.write_text('{"messages": [{"role": "user", "content": "Hi."}]}\n')
    plan = Plan(server="tgi", arrivals="closed:4", workload=str(file))
    assert (plan.workload, plan.n) == (f"jsonl:{file}", None)
    with pytest.raises(PlanError, match="would never end"):
        Plan(server="tgi", arrivals="closed:4", workload=str(file), repeat_file=True)
    with pytest.raises(PlanError, match="--repeat-file: --workload synthetic reads no file"):
        Plan(server="tgi", n=4, repeat_file=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ("512", "128")),
        ({"output_tokens": "max:64"}, ("512", "at most 64")),
        ({"workload": "jsonl:a"}, ("the file's", "the file's (128 where it names none)")),
        ({"workload": "alpaca:a", "output_tokens": "max:answers"}, ("the file's", "at most the file's")),
        ({"workload": "jsonl:a", "output_tokens": 9}, ("the file's", "9")),
        ({"arrivals": "trace:a.csv"}, ("recorded", "recorded")),
        ({"arrivals": "trace:a.csv", "workload": "jsonl:a", "output_tokens": 9}, ("the file's", "9")),
    ],
)
def test_lengths_are_said_before_the_run(settings: dict[str, object], said: tuple[str, str]) -> None:
    """What a trace, a file or an option brings, as the first line of output has it."""
    assert describe_lengths(Plan(server="tgi", n=4, **settings)) == said


def test_a_plan_file_is_toml(tmp_path: Path) -> None:
    """Keys are the plan's fields; what is no TOML, or no file, says so."""
    file = tmp_path / "plan.toml"
    file.write_text('server = "tgi"\narrivals = "constant:5"\nn = 10\n')
    assert Plan(**read_plan(file)).n == 10
    file.write_text('server = "tgi"\nmore_urls = ["http://b:1"]\n')
    with pytest.raises(PlanError, match="more_urls is no setting of a plan file"):
        read_plan(file)
    file.write_text("server: tgi")
    with pytest.raises(PlanError, match="is not TOML"):
        read_plan(file)
    with pytest.raises(PlanError, match="cannot read"):
        read_plan(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"server": "ollama"},
            "--server ollama: unknown; choose 'vllm', 'tgi', 'lightllm', 'sglang', 'tei' or 'openai'",
        ),
        ({"n": 0}, "--n 0: must be from 1 to 1,000,000"),
        ({"n": -5}, "--n -5: must be from 1 to 1,000,000"),
        ({"input_tokens": 0}, "--input-tokens 0: lengths '0': length 0 is outside 1 to 10000000"),
        (
            {"arrivals": "poison:20"},
            "--arrivals poison:20: arrivals 'poison:20': unknown process 'poison'; choose burst",
        ),
        ({"window_s": (5, 2)}, "must begin at 0 or later and end after it begins"),
        ({"timeout_s": 0}, "--timeout 0: must be more than 0"),
        ({"url": "my server"}, "--url my server: must not contain spaces"),
        ({"url": "vllm"}, "--url vllm: must start with http:// or https://"),
        ({"tokenizer": Path("/nowhere/tokenizer.json")}, "--tokenizer /nowhere/tokenizer.json: there is no file"),
        ({"tokenizer": Path("no/such-model")}, "--tokenizer no/such-model: there is no file no/such-model, no folder"),
        ({"lengths": "tokenizer"}, "--lengths tokenizer needs a tokenizer: name one with --tokenizer"),
        (
            {"lengths": "server", "tokenizer": Path(__file__)},
            "--lengths server needs no tokenizer: leave --tokenizer out",
        ),
        ({"lengths": "guessed"}, "--lengths guessed: unknown; choose 'server', 'tokenizer', 'approximate' or 'exact'"),
        ({"output_tokens": "max:0"}, "--output-tokens max:0: lengths '0': length 0 is outside 1 to 10000000"),
        ({"workers": 4, "n": 2}, "4 workers for 2 requests: use --workers 2 or fewer"),
        (
            {"endpoint": "song"},
            "--endpoint song: unknown; choose 'completions', 'chat', 'responses', 'messages', "
            "'transcriptions', 'speech', 'embeddings', ",
        ),
        ({"header": ("X-Lane",)}, "--header X-Lane: must be written 'Name: value'"),
        ({"header": ("X-Lane: a\r\nX-Other: b",)}, "must be written 'Name: value'"),
        ({"header": ("Content-Length: 3",)}, "--header Content-Length: 3: loadgen sets Content-Length itself"),
        ({"extra_body": "{temperature"}, "--extra-body {temperature: is not JSON: "),
        ({"extra_body": {"parameters": 1}}, "--extra-body {'parameters': 1}: 'parameters' must be an object"),
        ({"extra_body": {"sampling_params": {"n": 2}}}, "'n' cannot be set here: a request has one response"),
        ({"extra_body": {"echo": True}}, "'echo' cannot be set here: the prompt would count as the first tokens"),
        ({"extra_body": {"input_ids": [1]}}, "'input_ids' cannot be set here: --workload sets the prompts"),
        ({"extra_body": "[1]"}, "--extra-body [1]: must be a JSON object"),
        ({"extra_body": "@nowhere.json"}, "--extra-body @nowhere.json: cannot be read: No such file"),
        ({"extra_body": {"max_tokens": 4}}, "'max_tokens' cannot be set here: --output-tokens sets the length"),
        ({"extra_body": {"parameters": {"max_new_tokens": 4}}}, "'max_new_tokens' cannot be set here"),
        ({"extra_body": {"ignore_eos": False}}, "'ignore_eos' cannot be set here: use --no-ignore-eos"),
        ({"image": "9x9", "workload": "multi-turn:turns=2"}, "--image: sessions cannot contain images"),
        ({"simulated": True, "url": "http://a"}, "--simulated uses no other server: leave --url out"),
        ({"simulated": True, "real": True}, "--simulated uses no other server: leave --real out"),
        ({"simulated": True, "server": "openai"}, "--simulated: there is no simulated openai; choose --server vllm,"),
        ({"image": "512"}, "--image 512: write the size of an image as 512x512"),
        ({"image": ("512x512", "0x9")}, "--image 512x512, 0x9: write the size of an image as 512x512"),
        (
            {"arrivals": "closed:8", "max_in_flight": 2},
            "--arrivals closed:8 keeps 8 requests in flight, more than --max-in-flight 2",
        ),
        ({"label": "../x"}, "--label ../x: must be 1 to 60 letters, digits"),
        ({"colour": "red"}, "colour: unknown setting"),
        ({"n": "many"}, "--n many: must be a whole number"),
        ({"model": 7}, "--model 7: must be text"),
        ({"window_s": (1, 2, 3)}, "--window 1, 2, 3: must be a number"),
        ({"gpu": "perhaps"}, "--gpu perhaps: must be true or false"),
    ],
)
def test_each_mistake_names_its_option_and_what_is_allowed(values: dict[str, object], message: str) -> None:
    """One bad value gives one line that says which option and what it takes."""
    with pytest.raises(PlanError) as caught:
        Plan(**{"server": "tgi", "n": 1000, **values})
    assert message in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("timeout", "timeout_s"),
        ("duration", "duration_s"),
        ("timeout_ms", "timeout_s"),
        ("output-tokens", "output_tokens"),
        ("--label", "label"),
        ("metrics_every", "metrics_every_s"),
        ("lable", "label"),
        ("colour", ""),
    ],
)
def test_an_unknown_setting_gets_a_suggestion(name: str, similar: str) -> None:
    """The most similar setting is suggested, also if only its unit or its separators differ. Unlike names get none."""
    with pytest.raises(PlanError) as caught:
        Plan(server="tgi", n=1, **{name: 1})
    suggestion = f"; did you mean {similar}?" if similar else ""
    assert str(caught.value) == f"{name}: unknown setting{suggestion}"


def test_the_signature_names_every_field() -> None:
    """`inspect.signature`, with which notebooks complete arguments, shows each field with its type and default."""
    parameters = inspect.signature(Plan).parameters
    assert [name for name in parameters if name != "rate"] == [field.name for field in dataclasses.fields(Plan)]
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert str(parameters["timeout_s"]) == "timeout_s: float = 600.0"
    assert str(parameters["input_tokens"]) == "input_tokens: int | str = 512"
    inspect.signature(Plan).bind(server="vllm", n=4, rate=5)


def test_ignore_eos_may_be_added_to_the_body() -> None:
    """Servers such as llama.cpp know the field, which the generic dialect does not set."""
    fields = {"ignore_eos": True, "parameters": {"ignore_eos": True}}
    assert Plan(server="openai", url="http://h", n=1, extra_body=fields).extra_body == fields
    with pytest.raises(PlanError, match="--no-ignore-eos forbids it: choose one"):
        Plan(server="openai", url="http://h", n=1, extra_body={"ignore_eos": True}, ignore_eos=False)


def test_who_answers_may_be_left_to_the_url() -> None:
    """A plan names a server or says where one is; who is named neither way is missing. Other clients may well be fewer
    than a limit in flight."""
    assert Plan(url="http://127.0.0.1:1", n=1).server == ""
    with pytest.raises(
        PlanError, match="--server is missing: name vllm, tgi, lightllm, sglang, tei or openai, or give --url"
    ):
        Plan(n=1)
    assert Plan(server="tgi", arrivals="closed:8", max_in_flight=8, n=9).max_in_flight == 8


def test_all_mistakes_are_reported_at_once() -> None:
    """Nobody has to fix one mistake to hear of the next."""
    with pytest.raises(PlanError) as caught:
        Plan(server="ollama", n=0, url="x")
    assert len(str(caught.value).splitlines()) == 3


SECRETS = ("Authorization: Bearer sk-1", "X-Api-Key: sk-2", "Cookie: a=sk-3", "X-Lane: 7", "X-Auth: Bearer $MY_TOKEN")
KEPT = ["Authorization: $AUTHORIZATION", "X-Api-Key: $X_API_KEY", "Cookie: $COOKIE", "X-Lane: 7", SECRETS[-1]]


def test_what_is_kept_of_a_header_is_no_secret() -> None:
    """In its place stands the environment variable that may hold it, so that what is kept can be run again."""
    plan = Plan(server="tgi", n=1, header=SECRETS)
    assert plan.to_dict()["header"] == KEPT
    assert plan.header == SECRETS
    assert command_line(plan)[-10:] == [word for line in KEPT for word in ("--header", line)]
    told = ["burst", "--header", SECRETS[0], f"--header={SECRETS[1]}", "--n", "1"]
    assert redact(told) == ["burst", "--header", KEPT[0], f"--header={KEPT[1]}", "--n", "1"]


def test_headers_take_what_the_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is not set is named; $$ is a dollar sign; an Authorization of one's own wins over the key."""
    monkeypatch.setenv("MY_TOKEN", "sk-four")
    monkeypatch.setenv("LOADGEN_API_KEY", "sk-five")
    plan = Plan(server="tgi", n=1, header=("X-Auth: Bearer ${MY_TOKEN}", "X-Price: 3 $$"))
    headers = {"X-Auth": "Bearer sk-four", "X-Price": "3 $"}
    assert access_for(plan).headers == headers | {"Authorization": "Bearer sk-five"}
    plan = Plan(server="tgi", n=1, header=("authorization: Basic bWU6Y29ycmVjdA==",))
    assert access_for(plan).headers == {"authorization": "Basic bWU6Y29ycmVjdA=="}
    monkeypatch.delenv("MY_TOKEN")
    for line, said in (
        ("X-Auth: $MY_TOKEN", r"X-Auth: \$MY_TOKEN is not set"),
        ("X-Price: 3 $", "no name of an environment variable"),
    ):
        with pytest.raises(PlanError, match=said):
            access_for(Plan(server="tgi", n=1, header=(line,)))


def test_extra_body_is_json_a_file_or_a_table(tmp_path: Path) -> None:
    """The three ways give one plan; the command that repeats a run says it in JSON."""
    file = tmp_path / "plan.toml"
    file.write_text('server = "tgi"\nn = 1\n[extra_body]\ntemperature = 0.7\n[extra_body.parameters]\ntop_p = 0.9\n')
    (tmp_path / "body.json").write_text('{"temperature": 0.7, "parameters": {"top_p": 0.9}}')
    plan = Plan(**read_plan(file))
    assert plan == Plan(server="tgi", n=1, extra_body=f"@{tmp_path / 'body.json'}")
    command = command_line(plan)
    assert plan == Plan(server="tgi", n=1, extra_body=command[command.index("--extra-body") + 1])
    assert command_line(Plan(server="tgi", n=1, ignore_eos=False))[-1] == "--no-ignore-eos"


BOMBS = {
    "dotted key": b"a" + b".a" * 50_000 + b" = 1",
    "quoted parts": b"""["a b""" + b"""".'c'."d""" * 50_000 + b'"]',
    "deep array": b"a = " + b"[" * 50_000,
    "deep table": b"a = " + b"{a = " * 50_000,
    "large": b"#" * (1 << 21),
    "number": b"n = " + b"1" * 10_000,
    "no text": b"\xff",
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_what_no_settings_file_holds_is_refused(tmp_path: Path, content: bytes) -> None:
    """Before a parser spends minutes on it or ends in an exception of its own: plans, hosts, hardware."""
    file = tmp_path / "bomb.toml"
    file.write_bytes(content)
    with pytest.raises(PlanError, match="is not TOML"):
        read_plan(file)
    with pytest.raises(HostsError, match="is not TOML"):
        read_hosts(file)
    with pytest.raises(HardwareError, match=r"bomb\.toml"):
        hardware.gpu("H100", file)


@pytest.mark.parametrize(
    "given",
    ["[" * 100_000, '{"a":' * 100_000, '{"a":' * 65 + "1" + "}" * 65, "1" * 5_000, "\udc80"],
    ids=["array", "object", "levels", "number", "no text"],
)
def test_extra_fields_have_limits(tmp_path: Path, given: str) -> None:
    """Of depth and size, on the command line and in a file."""
    file = tmp_path / "fields.json"
    file.write_bytes(given.encode(errors="surrogateescape"))
    for written in (given, f"@{file}"):
        with pytest.raises(PlanError, match="--extra-body"):
            Plan(server="tgi", n=1, extra_body=written)
    file.write_bytes(b'{"a": "' + b"x" * (1 << 20) + b'"}')
    with pytest.raises(PlanError, match="more than 1,048,576 bytes"):
        Plan(server="tgi", n=1, extra_body=f"@{file}")
