"""Files that users name: read with a limit, written where that is possible, complaints in one line."""

import os
import threading
from pathlib import Path

import pytest

from jddtree.errors import UserError
from jddtree.user_files import check_new_file, check_new_folder, read_text


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfn\xc3\xa9\xef\xbb\xbf")
    assert read_text(path, "--prompt-file") == "né\ufeff"


@pytest.mark.parametrize("name", ["/dev/zero", "large", "folder", "missing", "latin", "a\0b"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)
    reasons = {
        "/dev/zero": "more than 1,000 bytes",
        "large": "more than 1,000 bytes",
        "folder": "Is a directory",
        "missing": "No such file",
        "latin": "not UTF-8 text",
        "a\0b": "null byte",
    }
    with pytest.raises(UserError, match=reasons[name]) as caught:
        read_text(tmp_path / name, "--cost", 1000)
    assert str(caught.value).startswith(f"--cost {tmp_path / name} ")


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As a shell's <(command) gives one."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("x" * 100_000,))
    writer.start()
    assert read_text(path, "--prompt-file") == "x" * 100_000
    writer.join()


@pytest.mark.parametrize("check", [check_new_file, check_new_folder])
@pytest.mark.parametrize("path", ["/proc/none/x", "file/x", "a\0b", "n" * 300])
def test_what_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch, check, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    with pytest.raises(UserError, match="^--output .* cannot be written"):
        check(Path(path), "--output")


def test_trying_leaves_nothing_behind(tmp_path: Path) -> None:
    """An existing file keeps its content, a new one is not made yet; folders are."""
    old = tmp_path / "old"
    old.write_text("kept")
    for path in (old, tmp_path / "a" / "b" / "new", Path(os.devnull), None):
        check_new_file(path, "--output")
    check_new_folder(tmp_path / "c" / "d", "--plot")
    assert old.read_text() == "kept" and not list((tmp_path / "a" / "b").iterdir())
    assert not list((tmp_path / "c" / "d").iterdir())
    with pytest.raises(UserError, match="is a folder, not a file"):
        check_new_file(tmp_path, "--output")
