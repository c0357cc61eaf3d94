"""The lock of a run never follows what a stranger has put in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inchworm.core.errors import InchwormError
from inchworm.run.directory import take_lock


def test_a_link_is_not_followed_and_its_target_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keys")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(InchwormError, match="cannot lock the run x"):
        take_lock(tmp_path / "lock", "the run x")
    assert (tmp_path / "precious").read_text() == "keys"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(InchwormError, match="lock is not a regular file"):
        take_lock(tmp_path / "lock", "the run x")


def test_the_holder_is_named_and_a_closed_lock_is_free(tmp_path: Path) -> None:
    first = take_lock(tmp_path / "lock", "the run x")
    with pytest.raises(InchwormError, match=f"the run x is in use by process {os.getpid()}"):
        take_lock(tmp_path / "lock", "the run x")
    os.close(first)
    os.close(take_lock(tmp_path / "lock", "the run x"))


def test_a_full_disk_takes_the_name_of_the_holder_but_not_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    first = take_lock(tmp_path / "lock", "the run x")
    with pytest.raises(InchwormError, match="that has just started"):
        take_lock(tmp_path / "lock", "the run x")
    os.close(first)
