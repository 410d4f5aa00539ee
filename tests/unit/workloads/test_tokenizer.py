"""Reading a tokenizer.json."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.workloads.prompts import PromptError, load_tokenizer, tokenizer_file
from tests.support.tiny_tokenizers import save


def test_words_are_single_tokens(tmp_path: Path) -> None:
    """The words it proposes first are one token each after a blank."""
    local = load_tokenizer(save("byte_level", tmp_path))
    words = local.words[:500]
    assert len(set(words)) == 500
    assert set(local.count([f"di {word}" for word in words])) == {local.count(["di"])[0] + 1}


def test_special_tokens_are_not_words(tmp_path: Path) -> None:
    """A special token is no word and part of none, even when it reads like one."""
    assert "cu" in load_tokenizer(save("byte_level", tmp_path)).words
    words = load_tokenizer(save("with_special_word", tmp_path)).words
    assert len(words) > 500
    assert not [word for word in words if "cu" in word]


def test_counts_as_a_server_does(tmp_path: Path) -> None:
    """The BOS counts; truncation and padding that the file asks for do not happen, since no server does them."""
    plain, bos = load_tokenizer(save("byte_level", tmp_path)), load_tokenizer(save("byte_level_with_bos", tmp_path))
    texts = ["di", " ".join(plain.words[:50])]
    assert bos.count(texts) == [tokens + 1 for tokens in plain.count(texts)]
    assert bos.ids(texts[1]) == plain.ids(texts[1])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{}", "is not a tokenizer.json"),
        (b"\xff\xfe", "is not a tokenizer.json"),
        (b"", "is not"),
        (None, "there is no file"),
    ],
)
def test_not_a_tokenizer(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """A file that is missing or something else is an error with a hint, not a traceback."""
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptError, match=reason) as caught:
        load_tokenizer(path)
    assert "okenizer" in caught.value.hint


def test_import_is_cheap() -> None:
    """Reading the module does not load the tokenizers library: most commands never need it."""
    code = "import sys, loadgen.workloads.prompts; assert 'tokenizers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_a_tokenizer_is_found_by_what_people_have(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, a folder that holds one, or a model by its name in the cache that Hugging Face's tools fill, wherever
    that is: of several snapshots the one that `main` points to."""
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    hub = {"HF_HUB_CACHE": ".", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub", "HOME": ".cache/huggingface/hub"}
    model = tmp_path / hub[variable] / "models--Qwen--Qwen3-0.6B"
    for revision in ("aaaa", "bbbb", "cccc"):
        (model / "snapshots" / revision).mkdir(parents=True)
        save("byte_level", model / "snapshots" / revision).rename(model / "snapshots" / revision / "tokenizer.json")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("bbbb\n")
    file = model / "snapshots" / "bbbb" / "tokenizer.json"
    for named in (file, file.parent, Path("Qwen/Qwen3-0.6B")):
        assert tokenizer_file(named) == file
        assert load_tokenizer(named).count(["di"])


def test_what_is_no_tokenizer_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a name was looked for, and which folder or model holds no tokenizer.json."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--old" / "snapshots" / "aaaa").mkdir(parents=True)
    for named, words in {
        "org/none": f"no file org/none, no folder, and no model of that name in {tmp_path}",
        "org/old": "the cached model org/old has no tokenizer.json: save_pretrained",
        str(tmp_path): f"the folder {tmp_path} has no tokenizer.json",
    }.items():
        with pytest.raises(PromptError, match=words):
            tokenizer_file(Path(named))


@pytest.mark.parametrize(
    ("named", "hint"),
    [
        ("Qwen/Qwen3-0.6B", "download it: hf download Qwen/Qwen3-0.6B tokenizer.json"),
        ("gpt2", "download it: hf download gpt2 tokenizer.json"),
        ("org/old", "download it: hf download org/old tokenizer.json"),
        ("tokenizer.json", "pass --tokenizer PATH/tokenizer.json"),
        ("/models/llama", "pass --tokenizer PATH/tokenizer.json"),
        ("../llama", "pass --tokenizer PATH/tokenizer.json"),
    ],
)
def test_a_model_that_is_not_cached_names_the_download(
    named: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint for the name of a model is the complete command. Paths get no such command."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models--org--old" / "snapshots" / "aaaa").mkdir(parents=True)
    with pytest.raises(PromptError) as caught:
        tokenizer_file(Path(named))
    assert caught.value.hint.startswith(hint)
