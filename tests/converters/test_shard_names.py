"""Names and headers of shards: folders inside the checkpoint load, nothing outside is read, bad headers are
refused.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import SHARD, copy_folder, write_index, write_shard
from conftest import micro_target

from converters.checkpoint import INDEX_NAME, Checkpoint, read_index
from converters.file_names import inside
from converters.kimi import KimiReader, load_target
from converters.shard_header import read_header
from converters.storage.convert import convert
from converters.storage.store import Store
from jddtree.cli.inspect import inspect
from jddtree.config import target_config
from jddtree.errors import UserError

OUTSIDE = [
    "../x.safetensors",
    "a/../../x.safetensors",
    "/etc/passwd",
    "a/../x",
    "./x",
    "a//x",
    "a/",
    "",
    ".",
    "..",
]
UNUSABLE = ["a" * 5000, "b/" + "a" * 256, "a/" * 600 + "x", "a\0b", "a\nb", "\ud800", "a\x1b[2J"]


def in_folders(folder: Path) -> Path:
    """The checkpoint with its shards one and two folders deep, as the index says."""
    index = read_index(folder)
    assert index is not None
    moved = {SHARD: f"weights/{SHARD}"}
    moved |= {name: f"weights/more/{name}" for name in set(index.weight_map.values()) - {SHARD}}
    (folder / "weights" / "more").mkdir(parents=True)
    for name, place in moved.items():
        (folder / name).rename(folder / place)
    write_index(folder, {tensor: moved[shard] for tensor, shard in index.weight_map.items()})
    return folder


def test_shards_in_folders_load_as_those_beside_the_index(tmp_path: Path) -> None:
    folder = in_folders(copy_folder(micro_target(), tmp_path))
    config = target_config(folder)
    found, report = load_target(folder, config, np.float32)
    wanted, plain = load_target(micro_target(), config, np.float32)
    assert found.keys() == wanted.keys() and all(np.array_equal(found[path], wanted[path]) for path in wanted)
    assert report.files[0] == f"weights/{SHARD}" and report.file_bytes == plain.file_bytes
    checkpoint = Checkpoint(folder)
    name = "language_model.model.norm.weight"
    assert np.array_equal(checkpoint.read(name), Checkpoint(micro_target()).read(name))
    answer = inspect(folder)["tensors"]
    assert (answer["shards"], answer["shards_present"], answer["missing"], answer["unexpected"]) == (
        4,
        4,
        0,
        0,
    )


def test_shards_in_folders_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    folder = in_folders(copy_folder(micro_target(), tmp_path))
    convert(folder, None, tmp_path / "store")
    store, source = Store(tmp_path / "store"), KimiReader(micro_target(), target_config(micro_target()))
    store.check()
    assert f"weights/{SHARD}" in store.parts["target"].source["files"]
    stored, plain = np.empty((256,), np.float32), np.empty((256,), np.float32)
    store.reader("target").fill("norm", 0, (slice(0, 256),), stored)
    source.fill("norm", 0, (slice(0, 256),), plain)
    assert np.array_equal(stored, plain)


@pytest.mark.parametrize("name", [*OUTSIDE, *UNUSABLE])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    assert not inside(name)
    write_shard(tmp_path / "x.safetensors", {"a": np.ones(2, np.float32)})
    folder = tmp_path / "checkpoint"
    (folder / "a").mkdir(parents=True)
    write_index(folder, {"a": name})
    with pytest.raises(
        UserError, match=r"names the shard .*, which is no file inside the folder; download"
    ) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value) and INDEX_NAME in str(caught.value) and len(str(caught.value)) < 500
    with pytest.raises(UserError, match="no file inside the folder"):
        read_index(folder)


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    """Hugging Face keeps files in blobs/ and gives folders of links to them."""
    snapshot = tmp_path / "snapshots" / "0a1b"
    (tmp_path / "blobs").mkdir()
    copy = copy_folder(micro_target(), tmp_path)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(copy.iterdir())):
        blob = path.rename(tmp_path / "blobs" / f"{number:064}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    assert Checkpoint(snapshot).entries == Checkpoint(micro_target()).entries
    assert target_config(snapshot) == target_config(micro_target())


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    folder = copy_folder(micro_target(), tmp_path)
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to("../../blobs/gone")
    with pytest.raises(UserError, match=rf"lacks 1 of the 4 shards that {INDEX_NAME} names: {SHARD}"):
        Checkpoint(folder)
    (folder / INDEX_NAME).unlink()
    (folder / INDEX_NAME).symlink_to("../../blobs/gone")
    with pytest.raises(UserError, match=rf"{INDEX_NAME} does not exist"):
        Checkpoint(folder)


def header_file(folder: Path, header: Any, data: int) -> Path:
    """A safetensors file with this header (JSON, or its text) and so many bytes of data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data))
    return path


def tensor(begin: Any, end: Any, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    """What a header says of one tensor."""
    return {
        "dtype": dtype,
        "shape": shape if isinstance(shape, str) else list(shape),
        "data_offsets": [begin, end],
    }


def test_the_header_of_two_tensors_is_read(tmp_path: Path) -> None:
    path = header_file(tmp_path, {"a": tensor(0, 4), "b": tensor(4, 16, (3,))}, 16)
    entries = read_header(path, "weights/x.safetensors")
    assert entries["b"].shard == "weights/x.safetensors" and entries["b"].end - entries["b"].begin == 12
    assert read_header(path)["a"].shard == "model.safetensors"


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"a": tensor(0, 4), "b": tensor(0, 4)}, 4, "corrupt header"),  # overlap
        ({"a": tensor(0, 8, (2,)), "b": tensor(4, 12, (2,))}, 12, "corrupt header"),
        ({"a": tensor(0, 4), "b": tensor(8, 12)}, 12, "corrupt header"),  # a hole
        ({"a": tensor(4, 8)}, 8, "corrupt header"),
        ({"a": tensor(0, 4)}, 5, "corrupt header"),  # bytes after the last tensor
        ({}, 4, "corrupt header"),
        ({"a": tensor(0.0, 4.0)}, 4, r"data_offsets is \[0.0, 4.0\], wanted integers"),
        ({"a": tensor(0.5, 8.9, (2,))}, 8, "wanted integers"),
        ({"a": tensor(False, True, dtype="U8")}, 1, "wanted integers"),
        ({"a": tensor("0", "4")}, 4, "wanted integers"),
        ({"a": tensor(-4, 0)}, 4, "negative size"),
        ({"a": tensor(0, 4, (-1,))}, 4, "negative size"),
        ({"a": tensor(0, 4, (1.0,))}, 4, r"shape is \[1.0\], wanted integers"),
        ({"a": tensor(0, 4, (True,))}, 4, "wanted integers"),
        ({"a": tensor(0, 4, "1")}, 4, "wanted integers"),
        ({"a": tensor(0, 4, (1,) * 33)}, 4, "too large"),
        ({"a": tensor(0, 2**80)}, 4, "too large"),
        ({"a": tensor(0, 2**62, (2**60,))}, 4, "its header needs"),
        ({"a": tensor(0, 4, dtype="bogus")}, 4, "bogus"),
        ({"a": tensor(0, 4, dtype=5)}, 4, "corrupt header"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, 4, "corrupt header"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,Infinity]}}', 4, "corrupt header"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,NaN]}}', 4, "corrupt header"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', 4, "'a' is there twice"),
        (b"[" * 200_000, 0, "nests deeper"),
        (b'{"__metadata__": {"a": 1}}', 0, "corrupt header"),
    ],
)
def test_headers_that_do_not_describe_the_file(tmp_path: Path, header: Any, data: int, reason: str) -> None:
    path = header_file(tmp_path, header, data)
    with pytest.raises(
        UserError, match=rf"model\.safetensors.*{reason}.*; download the shard again"
    ) as caught:
        read_header(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "size", ["NaN", "Infinity", "1e999", "9" * 400, "true", '"7"', "[7]", "null", "-1", "7.5"]
)
def test_a_total_size_of_any_kind_is_noted_or_refused(tmp_path: Path, size: str) -> None:
    write_shard(tmp_path / SHARD, {"a": np.ones(2, np.float32)})
    (tmp_path / INDEX_NAME).write_text(
        f'{{"metadata": {{"total_size": {size}}}, "weight_map": {{"a": "{SHARD}"}}}}'
    )
    if size in ("NaN", "Infinity", "1e999", "9" * 400):
        with pytest.raises(UserError, match=f"{INDEX_NAME} cannot be read as JSON"):
            Checkpoint(tmp_path)
    else:
        assert len(Checkpoint(tmp_path).notes) == (size in ("-1", "7.5"))
