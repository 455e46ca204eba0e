"""Temporary folders: gone at the end, whatever is in them, and nothing outside is touched."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jddtree.evaluation.sandbox import temporary
from jddtree.evaluation.sandbox.temporary import temporary_folder


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folders are made; pytest could not remove a deep one that a failed test left."""
    monkeypatch.setattr(temporary.tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    subprocess.run(["rm", "-rf", tmp_path], check=True)


def nest(folder: str, depth: int) -> None:
    """Folders in each other, deeper than a path can name."""
    place = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("level", dir_fd=place)
        inner = os.open("level", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)


def test_a_folder_of_any_depth_goes(parent: Path) -> None:
    with temporary_folder("x-") as folder:
        nest(folder, 1100)
    assert os.listdir(parent) == []


def test_names_modes_and_links_go_and_what_they_lead_to_stays(parent: Path, tmp_path_factory) -> None:
    kept = tmp_path_factory.mktemp("kept")
    (kept / "file").write_text("x")
    with temporary_folder("x-") as folder:
        for name in (b"lifted-0", b"lifted-1", b"-rf", b"\xff\n", b"x" * 255):
            os.makedirs(os.path.join(os.fsencode(folder), name, b"lifted-0", name))
            os.chmod(os.path.join(os.fsencode(folder), name, b"lifted-0"), 0)
        os.symlink(kept, os.path.join(folder, "link"))
        os.symlink(kept, os.path.join(folder, "-rf", "link"))
        os.mkfifo(os.path.join(folder, "pipe"))
        os.chmod(folder, 0)
    assert os.listdir(parent) == [] and (kept / "file").read_text() == "x"


def test_a_link_in_its_place_is_not_followed(parent: Path, tmp_path_factory) -> None:
    """The folder was moved away: it is emptied where it is, and the link stays."""
    kept = tmp_path_factory.mktemp("kept")
    (kept / "file").write_text("x")
    with temporary_folder("x-") as folder:
        os.rename(folder, parent / "moved")
        (parent / "moved" / "file").write_text("x")
        os.symlink(kept, folder)
    assert (kept / "file").exists() and os.listdir(parent / "moved") == []


def test_what_cannot_be_removed_stays_without_an_error(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours go."""
    unlink = os.unlink

    def refuse(name, **place):
        if name == "held":
            raise PermissionError
        unlink(name, **place)

    monkeypatch.setattr(os, "unlink", refuse)
    with temporary_folder("x-") as folder:
        os.makedirs(os.path.join(folder, "a", "b"))
        for name in ("held", "f", "a/b/f"):
            Path(folder, name).write_text("x")
    assert [entry.name for entry in parent.rglob("*") if entry.is_file()] == ["held"]
    assert len(list(parent.rglob("*"))) == 2


def test_an_error_of_the_caller_comes_through(parent: Path) -> None:
    with pytest.raises(KeyError), temporary_folder("x-"):
        raise KeyError
    assert os.listdir(parent) == []
