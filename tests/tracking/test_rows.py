"""Rows: in order, each once, never half a one for long; also on a disk that is full, or a file that is taken away."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from inchworm.tracking import jsonl as module
from inchworm.tracking.jsonl import RowFile, read_complete_rows


class Disk:
    """`os.write` on a disk with so much room; a write that does not fit is taken in part, as a real one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
        self.room, self.code, self.write = 10**9, code, os.write
        monkeypatch.setattr(module.os, "write", self)

    def __call__(self, descriptor: int, content: Any) -> int:
        if self.room == 0:
            raise OSError(self.code, os.strerror(self.code))
        written = self.write(descriptor, bytes(content)[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("room", [0, 1, 4, 5])
def test_what_does_not_fit_is_kept_and_written_later_in_order_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, code: int
) -> None:
    disk, file = Disk(monkeypatch, code), RowFile(tmp_path / "rows")
    file.append(b"one\n")
    disk.room = room  # `two two\n` is 8 bytes: a part of it, or nothing
    with pytest.warns(UserWarning, match=rf"\[Errno {code}\].*while writing 1 row.*rows'; training continues"):
        file.append(b"two two\n")
    assert (tmp_path / "rows").read_bytes() == b"one\n"  # cut back: no half a row
    assert file.count == 2
    file.append(b"three\n")  # no second warning while it lasts
    with pytest.raises(OSError, match="2 row"):
        file.flush()
    disk.room = 10**9
    file.append(b"four\n")
    assert (tmp_path / "rows").read_bytes() == b"one\ntwo two\nthree\nfour\n"
    assert file.count == 4
    disk.room = 0
    with pytest.warns(UserWarning, match="training continues"):  # it worked meanwhile, so this is news
        file.append(b"five\n")
    disk.room = 10**9
    file.close()
    assert (tmp_path / "rows").read_bytes().endswith(b"five\n")


def test_half_a_row_that_cannot_even_be_cut_back_is_cut_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, file, truncate = Disk(monkeypatch), RowFile(tmp_path / "rows"), os.ftruncate
    file.append(b"one\n")

    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    disk.room = 2
    monkeypatch.setattr(module.os, "ftruncate", refuse)
    with pytest.warns(UserWarning, match="training continues"):
        file.append(b"two\n")
    assert (tmp_path / "rows").read_bytes() == b"one\ntw"
    assert read_complete_rows(tmp_path / "rows") == [b"one\n"]
    monkeypatch.setattr(module.os, "ftruncate", truncate)
    disk.room = 10**9
    file.append(b"three\n")
    assert (tmp_path / "rows").read_bytes() == b"one\ntwo\nthree\n"


def test_an_interrupt_in_the_middle_of_a_row_writes_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = RowFile(tmp_path / "rows"), os.write
    file.append(b"one\n")

    def interrupted(descriptor: int, content: Any) -> int:
        write(descriptor, content)
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.append(b"two\n")
    monkeypatch.setattr(module.os, "write", write)
    file.close()
    assert (tmp_path / "rows").read_bytes() == b"one\ntwo\n"


def test_what_is_never_written_is_lost_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, file = Disk(monkeypatch), RowFile(tmp_path / "rows")
    disk.room = 0
    with pytest.warns(UserWarning, match="training continues"):
        file.append(b"one\n")
    with pytest.warns(UserWarning, match="1 row.*these rows are lost"):
        file.close()
    file.close()
    assert file.count == 0


def test_a_directory_that_is_not_there_yet_keeps_the_rows_waiting(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "gone" / "rows")
    with pytest.warns(UserWarning, match="No such file"):
        file.append(b"one\n")
    (tmp_path / "gone").mkdir()
    file.append(b"two\n")
    assert (tmp_path / "gone" / "rows").read_bytes() == b"one\ntwo\n"


def test_rows_are_counted_with_those_of_before(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"one\ntwo\nhal")
    file = RowFile(tmp_path / "rows")
    assert file.count == 2
    file.append(b"three\n")
    assert file.count == 3
    assert (tmp_path / "rows").read_bytes() == b"one\ntwo\nthree\n"


def test_syncing_says_whether_the_name_is_new_and_names_the_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RowFile(tmp_path / "rows")
    assert not file.sync()  # nothing there
    file.append(b"one\n")
    assert file.sync()
    assert not file.sync()

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error while syncing: .*rows"):
        file.sync()
