"""Hints that name the command which installs an optional dependency group."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.errors import install_hint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def origin(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loadgen appear to be installed from this place. None: pip has recorded no place."""
    text = None if content is None else json.dumps(content)
    installed = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr(metadata, "distribution", lambda name: {"llm-loadgen": installed}[name])


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (
            {"url": "https://git.example/loadgen.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            "pip install 'llm-loadgen[ui] @ git+https://git.example/loadgen.git'",
        ),
        (
            {"url": "https://files.example/llm_loadgen-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'llm-loadgen[ui] @ https://files.example/llm_loadgen-0.1.0-py3-none-any.whl'",
        ),
        ({"url": "file:///no/such/clone", "dir_info": {}}, "In a clone of loadgen: pip install '.[ui]'"),
        (None, "pip install 'llm-loadgen[ui]'"),
    ],
    ids=["git", "wheel", "clone that was removed", "package index"],
)
def test_the_hint_installs_from_the_same_place(content: Any, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command installs the extra from where loadgen was installed, because that place is known to work."""
    origin(content, monkeypatch)
    assert install_hint("ui") == hint


@pytest.mark.parametrize(("editable", "option"), [(True, "-e "), (False, "")])
def test_the_hint_of_a_clone_names_its_folder(
    editable: bool, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone is named, because the command works only in its folder. Its name may contain blanks."""
    clone = tmp_path / "my clone"
    clone.mkdir()
    origin({"url": clone.as_uri(), "dir_info": {"editable": editable}}, monkeypatch)
    assert install_hint("notebook") == f"In {clone}: pip install {option}'.[notebook]'"
