"""Claims on run folders: one owner at a time, nothing overwritten, nothing left behind."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from pathlib import Path

import pytest

from loadgen import folders
from loadgen.errors import OutputError
from loadgen.folders import LOCK_NAME, FolderClaim, check_room, new_folder, run_folder


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    """The message names both sizes, before anything is sent."""
    with pytest.raises(OutputError, match="MB are free"):
        check_room(tmp_path, 1 << 60)


def test_a_folder_that_holds_something_is_never_claimed(tmp_path: Path) -> None:
    """An empty folder is accepted; a folder with a file in it is refused and stays as it is."""
    with FolderClaim(tmp_path / "new"):
        pass
    (tmp_path / "new").mkdir()
    with FolderClaim(tmp_path / "new"):
        (tmp_path / "new" / "run.jsonl").write_text("precious")
    with pytest.raises(OutputError, match="exists and is not empty"):
        FolderClaim(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.jsonl"]


def test_a_claimed_folder_is_refused_with_its_owner(tmp_path: Path) -> None:
    """The second command names the process that holds the folder. The folder is free after the first has ended."""
    with FolderClaim(tmp_path / "run"), pytest.raises(OutputError, match=f"process {os.getpid()} on ") as caught:
        FolderClaim(tmp_path / "run")
    assert "another loadgen is writing to" in str(caught.value)
    assert "--out" in caught.value.hint
    FolderClaim(tmp_path / "run").release()


def test_an_unused_claim_leaves_no_folders(tmp_path: Path) -> None:
    """Folders that the claim made go with it, parents included. A folder that was there before stays."""
    FolderClaim(tmp_path / "a" / "b").release()
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    FolderClaim(tmp_path / "mine").release()
    assert [*(tmp_path / "mine").iterdir()] == []


def test_the_lock_of_a_dead_process_is_no_claim(tmp_path: Path) -> None:
    """A lock file that a killed command left does not block an otherwise empty folder."""
    (tmp_path / LOCK_NAME).write_text("process 1 on nowhere")
    with FolderClaim(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text().startswith(f"process {os.getpid()} ")
    assert [*tmp_path.iterdir()] == []


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """A link in somebody else's folder cannot make loadgen overwrite the file it leads to."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_NAME).symlink_to(precious)
    with pytest.raises(OutputError, match="cannot create"):
        FolderClaim(tmp_path / "run")
    assert precious.read_text() == "precious"


def test_where_the_file_system_has_no_locks_the_creator_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems refuse flock; creating the file is atomic there."""

    def refuse(_file: int, _how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderClaim(tmp_path / "run"), pytest.raises(OutputError, match="another loadgen is writing to"):
        FolderClaim(tmp_path / "run")


def test_a_claim_can_wait_for_its_predecessor(tmp_path: Path) -> None:
    """A resumed command waits until the workers of the killed one have ended."""
    with (tmp_path / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        orphan = subprocess.Popen(["sleep", "0.3"], pass_fds=(file.fileno(),))
    with FolderClaim(tmp_path, wait_s=30):
        assert orphan.wait() == 0


def test_of_many_claims_at_once_one_wins(tmp_path: Path) -> None:
    """Threads that claim and release the same folder over and over never hold it together."""
    inside, most, wins = 0, 0, 0
    refusals: set[str] = set()
    count = threading.Lock()

    def compete() -> None:
        nonlocal inside, most, wins
        for _ in range(200):
            try:
                claim = FolderClaim(tmp_path / "run")
            except OutputError as error:
                refusals.add(str(error).partition(" to ")[0])
                continue
            with count:
                inside, wins = inside + 1, wins + 1
                most = max(most, inside)
            with count:
                inside -= 1
            claim.release()

    threads = [threading.Thread(target=compete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, wins > 0) == (1, True)
    assert refusals <= {"another loadgen is writing"}


def test_names_are_given_to_one_command_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command of the same second gets a number behind the name. Unused folders are removed."""
    with new_folder(tmp_path / "runs", "x") as first, new_folder(tmp_path / "runs", "x") as second:
        assert [first.name, second.name] == ["x", "x-2"]
        (second / "run.jsonl").write_text("kept")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x-2"]
    monkeypatch.setattr(folders, "RUNS", tmp_path / "others")
    with run_folder(None, "tgi", "burst") as folder:
        assert folder.name.endswith("Z-tgi-burst")
    assert not (tmp_path / "others").exists()
    with run_folder(tmp_path / "named", "tgi", "burst") as folder:
        assert folder == tmp_path / "named"


def test_a_name_where_nothing_can_be_made_is_a_sentence(tmp_path: Path) -> None:
    """The parent is a file, or does not accept folders."""
    (tmp_path / "file").write_text("")
    for parent in (tmp_path / "file", Path("/proc/runs")):
        with pytest.raises(OutputError, match="cannot create"), new_folder(parent, "x"):
            pass
        with pytest.raises(OutputError, match="cannot create"):
            FolderClaim(parent / "x")
