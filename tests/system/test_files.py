"""Files that are replaced whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edgefl.system.files import remedy, replacing, write_text, write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_gets_its_new_content_and_nothing_is_left_beside_it(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.bin"
    for data in (b"old", b"new and longer", b""):
        write_whole(path, data, durable=durable)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["a.bin"]


def test_the_old_content_stands_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"

    assert path.read_bytes() == b"new"


def test_an_error_in_the_block_leaves_the_old_content_and_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"ne")
        raise KeyboardInterrupt

    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_durable_file_is_on_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))

    write_whole(path, b"new", durable=True)
    write_whole(path, b"newer")

    assert synced == [b"old", b"new"], "its bytes before, its name after"


def test_a_full_disk_is_told_with_the_path_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    (tmp_path / "a.bin.partial").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, b"new")

    assert caught.value.filename == str(path) and caught.value.errno == errno.ENOSPC
    assert remedy(caught.value) == "free some space there, or name another folder"
    assert os.listdir(tmp_path) == []


def test_what_is_not_the_disk_s_fault_names_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError) as caught, replacing(tmp_path / "a.bin"):
        raise ConnectionResetError(errno.ECONNRESET, "reset by peer")
    assert caught.value.filename is None and remedy(caught.value) == ""


def test_text_is_written_whole_into_a_folder_that_is_made(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "page.html", "naïve")
    assert (tmp_path / "new" / "page.html").read_bytes() == "naïve".encode()


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "gone" / "a.bin", b"")
