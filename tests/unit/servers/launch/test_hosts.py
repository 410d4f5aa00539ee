"""The hosts file: what it gives, and every mistake in it at once; and which Compose file is used on them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from loadgen.servers.errors import HostsError, LaunchError
from loadgen.servers.launch.compose import compose_file
from loadgen.servers.launch.spec import LOCAL, Host, read_hosts

WHOLE = """
[gpu-a]
platform = "A800"
docker = "ssh://bench@gpu-a"
address = "10.0.0.5"
gpus = {vllm = "0", tgi = "GPU-8f4e0b6c-1d2e", lightllm = "2,3"}
model_dir = "/srv/models"
env = {VLLM_TAG = "v0.32.0"}

[gpu-b]
docker = "gpu-b"
address = "gpu-b.lab"
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "hosts.toml"
    file.write_text(text)
    return file


def test_a_table_is_a_host(tmp_path: Path) -> None:
    """Each table gives a Host under its name; what is left out keeps its default."""
    hosts = read_hosts(written(tmp_path, WHOLE))
    assert hosts["gpu-a"] == Host(
        "gpu-a",
        platform="A800",
        docker="ssh://bench@gpu-a",
        address="10.0.0.5",
        gpus={"vllm": "0", "tgi": "GPU-8f4e0b6c-1d2e", "lightllm": "2,3"},
        model_dir="/srv/models",
        env={"VLLM_TAG": "v0.32.0"},
    )
    assert hosts["gpu-b"] == Host("gpu-b", docker="gpu-b", address="gpu-b.lab")


def test_this_machine_is_always_there(tmp_path: Path) -> None:
    """`local` needs no table, and a table of that name replaces it."""
    assert read_hosts(written(tmp_path, WHOLE))["local"] == LOCAL
    assert read_hosts(written(tmp_path, '[local]\nplatform = "L4"'))["local"] == Host("local", platform="L4")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[a]\ndockr = "x"', "a has no key 'dockr'"),
        ("[A]", "'A' is not a valid host name"),
        ("a = 1", "a must be a table"),
        ('[a]\ndocker = "tcp://x:2375"', "a.docker cannot be"),
        ('[a]\ndocker = "ssh://-oProxyCommand=x"', "a.docker cannot be"),
        ('[a]\ndocker = "ssh://me:correct-horse@x"', "with your own key and no password"),
        ('[a]\naddress = "me:correct-horse@x"', "a.address cannot be"),
        ('[a]\naddress = "http://x"', "a.address cannot be"),
        ('[a]\ngpus = {ollama = "0"}', "a.gpus cannot be"),
        ('[a]\ngpus = {vllm = "0,"}', "a.gpus cannot be"),
        ("[a]\ngpus = {vllm = 0}", "a.gpus cannot be"),
        ('[a]\nmodel_dir = "models"', "a.model_dir cannot be"),
        ('[a]\nmodel_volume = "/srv"', "a.model_volume cannot be"),
        ('[a]\nenv = {HF_TOKEN = "correct-horse"}', "secrets must come from the environment"),
        ("[a", "is not TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, part: str) -> None:
    """Each wrong key or value has a message of its own, which shows no secret."""
    with pytest.raises(HostsError) as caught:
        read_hosts(written(tmp_path, text))
    assert part in str(caught.value)
    assert "correct" not in str(caught.value)
    assert caught.value.hint


def test_all_mistakes_come_at_once(tmp_path: Path) -> None:
    """One reading of the file is enough to correct it."""
    with pytest.raises(HostsError) as caught:
        read_hosts(written(tmp_path, '[a]\ndockr = ""\nplatform = 1\n[b]\ngpus = 3'))
    assert all(part in str(caught.value) for part in ("a has no key 'dockr'", "a.platform", "b.gpus"))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """The message names the file and the hint an example."""
    with pytest.raises(HostsError, match=r"nowhere\.toml") as caught:
        read_hosts(tmp_path / "nowhere.toml")
    assert "examples/hosts.toml" in caught.value.hint


def test_the_example_is_a_hosts_file() -> None:
    """What the hints point at can be read, and shows every key."""
    example = Path(__file__).parents[4] / "examples" / "hosts.toml"
    shown = example.read_text()
    assert set(read_hosts(example)) == {"local", "gpu-a", "gpu-b"}
    assert all(f"{each.name} = " in shown for each in fields(Host) if each.name != "name")


def test_the_compose_file_is_ours_or_the_one_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that merely lies in the working folder may be somebody else's; one that is named must be there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docker-compose.yml").write_text("services: {}\n")
    assert compose_file() == Path(__file__).parents[4] / "docker-compose.yml"
    assert compose_file("docker-compose.yml") == tmp_path / "docker-compose.yml"
    with pytest.raises(LaunchError, match=r"there is no other\.yml"):
        compose_file("other.yml")
