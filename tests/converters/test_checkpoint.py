"""Reading a checkpoint folder: tensors equal to the library's, every fault named."""

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_folders import SHARD, copy_folder, write_index, write_shard
from conftest import micro_drafter, micro_target
from safetensors import safe_open
from safetensors.numpy import save

from converters.checkpoint import (
    DTYPES,
    INDEX_NAME,
    Checkpoint,
    Entry,
    differences,
    phrase,
    read_header,
    read_index,
)
from jddtree.errors import UserError


def test_every_tensor_equals_the_library() -> None:
    checkpoint = Checkpoint(micro_target())
    count = 0
    for shard in checkpoint.shards:
        with safe_open(micro_target() / shard, "np") as library:
            for name in library.keys():
                wanted = library.get_tensor(name)
                found = checkpoint.read(name)
                assert checkpoint.entries[name].shard == shard
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                assert found.tobytes() == wanted.tobytes()
                count += 1
    assert count == len(checkpoint.entries) == 840
    assert checkpoint.notes == ()


def test_reading_copies_nothing_and_writes_nothing() -> None:
    checkpoint = Checkpoint(micro_target())
    first, second = (checkpoint.read("language_model.lm_head.weight") for _ in range(2))
    assert np.shares_memory(first, second) and not first.flags.writeable


def test_arrays_outlive_their_map(tmp_path: Path) -> None:
    for number in range(8):
        write_shard(tmp_path / f"part{number}.safetensors", {f"t{number}": np.full(4, number, np.int32)})
    checkpoint = Checkpoint(tmp_path)
    arrays = [checkpoint.read(f"t{number}") for number in range(8)]
    assert [int(array[3]) for array in arrays] == list(range(8))


def test_every_dtype_is_read(tmp_path: Path) -> None:
    tensors = {name: np.ones((2, 3), dtype) for name, dtype in DTYPES.items()}
    write_shard(tmp_path / "model.safetensors", tensors | {"empty": np.empty((0, 3), np.float32)})
    checkpoint = Checkpoint(tmp_path)
    for name, array in tensors.items():
        assert checkpoint.entries[name].dtype == name
        assert (
            checkpoint.read(name).dtype == array.dtype and checkpoint.read(name).tobytes() == array.tobytes()
        )
    assert checkpoint.read("empty").shape == (0, 3)


def test_order_follows_shards_and_bytes() -> None:
    checkpoint = Checkpoint(micro_target())
    names = sorted(checkpoint.entries, key=checkpoint.position)
    shards = [checkpoint.entries[name].shard for name in names]
    assert shards == sorted(shards)
    ends = [checkpoint.entries[name].end for name in names if checkpoint.entries[name].shard == SHARD]
    assert ends == sorted(ends)


def test_missing_folder_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere is not a folder; give the folder"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no \.safetensors file; give the folder"):
        Checkpoint(tmp_path)


def test_shards_named_model_are_preferred_to_strays(tmp_path: Path) -> None:
    for name in ("model-a", "model-b", "golden"):
        write_shard(tmp_path / f"{name}.safetensors", {name: np.ones(2, np.float32)})
    assert sorted(Checkpoint(tmp_path).entries) == ["model-a", "model-b"]


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = copy_folder(micro_target(), tmp_path)
    (folder / SHARD).unlink()
    with pytest.raises(
        UserError, match=rf"lacks 1 of the 4 shards that {INDEX_NAME} names: {SHARD}; download"
    ):
        Checkpoint(folder)


def test_missing_shard_without_index(tmp_path: Path) -> None:
    folder = copy_folder(micro_target(), tmp_path)
    (folder / INDEX_NAME).unlink()
    assert len(Checkpoint(folder).entries) == 840
    (folder / SHARD).unlink()
    with pytest.raises(UserError, match=r"has 3 shards of 4; download the others"):
        Checkpoint(folder)


def test_index_names_a_tensor_that_the_shard_lacks(tmp_path: Path) -> None:
    folder = copy_folder(micro_target(), tmp_path)
    index = read_index(folder)
    assert index is not None
    write_index(folder, {**index.weight_map, "extra.weight": SHARD})
    with pytest.raises(
        UserError, match=rf"{SHARD} does not hold extra\.weight, which {INDEX_NAME} places there"
    ):
        Checkpoint(folder)


def test_shard_holds_a_tensor_that_the_index_lacks(tmp_path: Path) -> None:
    folder = copy_folder(micro_target(), tmp_path)
    index = read_index(folder)
    assert index is not None
    weights = dict(index.weight_map)
    del weights["language_model.lm_head.weight"]
    write_index(folder, weights)
    with pytest.raises(
        UserError, match=r"00003-of-000004\.safetensors holds language_model\.lm_head\.weight, which"
    ):
        Checkpoint(folder)


def test_two_shards_hold_one_tensor(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_shard(tmp_path / f"{name}.safetensors", {"norm.weight": np.ones(2, np.float32)})
    with pytest.raises(UserError, match=r"b\.safetensors holds norm\.weight, which a\.safetensors holds too"):
        Checkpoint(tmp_path)


def test_truncated_shard_names_both_sizes(tmp_path: Path) -> None:
    folder = copy_folder(micro_target(), tmp_path)
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:-1])
    with pytest.raises(
        UserError, match=rf"{SHARD} has {len(data) - 1} bytes, but its header needs {len(data)}; down"
    ):
        Checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 5, 100])
def test_shard_cut_inside_its_header(tmp_path: Path, kept: int) -> None:
    folder = copy_folder(micro_drafter(), tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        UserError, match=rf"model\.safetensors has {kept} bytes, but its header says \d+; download"
    ):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b'{"a": [1]}', "has a corrupt header of 10 bytes"),
        (b"[1, 2]", "has a corrupt header of 6 bytes"),
        (b"\xff\xfe\x00\x00", "has a corrupt header of 4 bytes"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', r"F32 \[2\] needs 8 bytes, but has 4"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', "negative size"),
        (b'{"a":{"dtype":"F32","data_offsets":[0,4]}}', "corrupt header of 42 bytes .*shape"),
    ],
)
def test_corrupt_header_is_named(tmp_path: Path, header: bytes, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(UserError, match=rf"model\.safetensors.*{reason}.*download the shard again") as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


def test_lfs_pointer_is_named(tmp_path: Path) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    (tmp_path / "model.safetensors").write_bytes(text)
    with pytest.raises(UserError, match=rf"is a Git LFS pointer of {len(text)} bytes.*git lfs pull"):
        Checkpoint(tmp_path)


def test_total_size_is_only_noted(tmp_path: Path) -> None:
    folder = copy_folder(micro_target(), tmp_path)
    index = read_index(folder)
    assert index is not None and index.total_size == 9511360
    write_index(folder, index.weight_map, total_size=7)
    assert Checkpoint(folder).notes == (
        f"{INDEX_NAME}: total_size is 7 bytes, but the tensors have 9511360 bytes",
    )


@pytest.mark.parametrize(
    "content", ['{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "{}"]
)
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_NAME).write_text(content)
    with pytest.raises(UserError, match=r"field 'weight_map' does not map tensor names to shards"):
        read_index(tmp_path)


def test_library_reads_what_the_helper_writes(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16)}
    write_shard(tmp_path / "ours.safetensors", tensors)
    (tmp_path / "theirs.safetensors").write_bytes(save({"c": tensors["a"]}))
    with safe_open(tmp_path / "ours.safetensors", "np") as library:
        assert library.get_tensor("a").tobytes() == tensors["a"].tobytes()
    assert Checkpoint(tmp_path).read("c").tobytes() == tensors["a"].tobytes()


def test_differences_lists_every_kind_and_cuts_long_lists() -> None:
    found = {name: Entry("s", "BF16", (2,), 0, 4) for name in ("same", "shape", "type", "extra", "also.x")}
    expected = {
        "same": ("BF16", (2,)),
        "shape": ("BF16", (3,)),
        "type": ("F32", (2,)),
        "also.x": ("I32", (2,)),
    }
    expected |= {f"lost{number:02}": ("BF16", (1,)) for number in range(11)}
    assert differences(found, expected, {"x": "BF16"}) == [
        "11 tensors missing: lost00, lost01, lost02, lost03, lost04, lost05, lost06, lost07 and 3 more",
        "1 tensor unexpected: extra",
        "1 tensor of the wrong shape: shape is [2], wanted [3]",
        "1 tensor of the wrong type: type is BF16, wanted F32",
    ]
    assert differences({"same": found["same"]}, {"same": ("BF16", (2,))}) == []
    assert phrase("missing", ["a"]) == "1 tensor missing: a"
