"""Stores: loaded on any mesh they give the arrays of the checkpoint, and whatever is wrong with one is one line."""

import itertools
import json
import math
import shutil
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import micro_drafter, micro_target
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_convert import same_trees, small_pair

from converters import placement
from converters.convert import convert
from converters.dflash import DFlashReader, load_drafter
from converters.kimi import KimiReader, load_target
from converters.manifest import VERSION
from converters.pieces import Layout, Reader, in_memory, layout, memory_bytes, piece_of
from converters.placement import chunks, device_bytes, load_arrays, require_memory
from converters.store import Store, is_store
from jddtree.config import dflash_config, target_config
from jddtree.errors import UserError
from jddtree.models.parameters import nest
from jddtree.parallel.mesh import make_mesh
from jddtree.parallel.partition import on_mesh, place, spec


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folders of a target and a drafter in which every split axis divides by eight."""
    return small_pair(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """The store of `source`; tests do not change it."""
    out = tmp_path_factory.mktemp("made") / "store"
    convert(*source, out)
    return out


@pytest.fixture(scope="module")
def wanted(source):
    """Host arrays of `source` in bfloat16, by part."""
    target, drafter = source
    return {
        "target": load_target(target, target_config(target), ml_dtypes.bfloat16)[0],
        "drafter": load_drafter(drafter, dflash_config(drafter), ml_dtypes.bfloat16)[0],
    }


@pytest.fixture
def copied(made, tmp_path):
    """A copy of the store to damage."""
    return Path(shutil.copytree(made, tmp_path / "store"))


def sharding_over(count: int):
    """The split axes of the table over `count` devices."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("model",))

    def sharding(path, parameter):
        axes = [None] * len(parameter.shape)
        if parameter.split is not None:
            axes[parameter.split] = "model"
        return NamedSharding(mesh, PartitionSpec(*axes))

    return sharding


def sums(arrays) -> dict[str, int]:
    """A checksum of every gathered array."""
    return {path: zlib.crc32(np.asarray(array).tobytes()) for path, array in arrays.items()}


def edit_manifest(store: Path, edit) -> None:
    """Rewrite manifest.json after `edit` changed its values."""
    values = json.loads((store / "manifest.json").read_text())
    edit(values)
    (store / "manifest.json").write_text(json.dumps(values))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("direct", [False, True])
def test_every_mesh_loads_the_same_arrays(source, made, wanted, ranks: int, direct: bool) -> None:
    target, drafter = source
    readers = {
        "target": KimiReader(target, target_config(target)) if direct else Store(made).reader("target"),
        "drafter": DFlashReader(drafter, dflash_config(drafter)) if direct else Store(made).reader("drafter"),
    }
    for part, reader in readers.items():
        calls: list[tuple[int, int]] = []
        arrays = load_arrays(
            reader, ml_dtypes.bfloat16, sharding_over(ranks), progress=lambda *call, calls=calls: calls.append(call)
        )
        assert sums(arrays) == sums(wanted[part])
        for path, array in arrays.items():
            assert array.sharding == sharding_over(ranks)(path, reader.table[path])
            assert (array.shape, array.dtype) == (wanted[part][path].shape, wanted[part][path].dtype)
        size = sum(array.nbytes for array in arrays.values())
        assert [done for done, _ in calls] == sorted(done for done, _ in calls) and calls[-1] == (size, size)


@pytest.mark.parametrize("direct", [False, True])
def test_large_arrays_are_filled_in_place_in_chunks(source, made, wanted, monkeypatch, direct: bool) -> None:
    monkeypatch.setattr(placement, "HOST_BYTES", 1 << 18)
    monkeypatch.setattr(placement, "CHUNK_BYTES", 1 << 17)
    reader = KimiReader(source[0], target_config(source[0])) if direct else Store(made).reader("target")
    arrays = load_arrays(reader, ml_dtypes.bfloat16, sharding_over(2))
    assert sums(arrays) == sums(wanted["target"])


def test_float32_and_the_first_device_by_default(source, made) -> None:
    arrays = load_arrays(Store(made).reader("target"), np.float32)
    again, _ = load_target(source[0], target_config(source[0]), np.float32)
    assert sums(arrays) == sums(again)
    assert {device for array in arrays.values() for device in array.devices()} == {jax.devices()[0]}


def test_what_does_not_divide_is_one_line() -> None:
    reader = KimiReader(micro_target(), target_config(micro_target()))
    with pytest.raises(UserError, match=r"dense\.k_up \[1, 4, 32, 64\] cannot be split like this") as caught:
        load_arrays(reader, np.float32, sharding_over(8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("expert_layout", ["tensor", "expert"])
@pytest.mark.parametrize("large", [False, True])
def test_padding_and_whole_experts(tmp_path: Path, monkeypatch, expert_layout: str, direct: bool, large: bool) -> None:
    """Eight ranks share four heads, and sixteen experts by columns or whole, as the mesh has them."""
    if large:
        monkeypatch.setattr(placement, "HOST_BYTES", 1 << 15)
        monkeypatch.setattr(placement, "CHUNK_BYTES", 1 << 14)
    config = target_config(micro_target())
    reader: Reader = KimiReader(micro_target(), config)
    if not direct:
        convert(micro_target(), None, tmp_path / "store")
        reader = Store(tmp_path / "store").reader("target")
    mesh = make_mesh(8)
    placed = on_mesh(dict(reader.table), 8, expert_layout, config.num_moe_layers)
    sharding = lambda path, parameter: NamedSharding(mesh, spec(parameter))
    calls: list[tuple[int, int]] = []
    arrays = load_arrays(reader, ml_dtypes.bfloat16, sharding, placed=placed, progress=lambda *call: calls.append(call))
    whole, _ = load_target(micro_target(), config, ml_dtypes.bfloat16)
    wanted = place(whole, placed, mesh)
    assert jax.tree.structure(nest(arrays)) == jax.tree.structure(wanted)
    for found, right in zip(jax.tree.leaves(nest(arrays)), jax.tree.leaves(wanted), strict=True):
        assert found.sharding == right.sharding and np.asarray(found).tobytes() == np.asarray(right).tobytes()
    assert calls[-1][0] == calls[-1][1] == sum(array.nbytes for array in arrays.values())


def test_the_micro_pair_on_one_and_two_devices(tmp_path: Path) -> None:
    convert(micro_target(), micro_drafter(), tmp_path / "store")
    store = Store(tmp_path / "store")
    for part, (arrays, report) in {
        "target": load_target(micro_target(), target_config(micro_target()), ml_dtypes.bfloat16),
        "drafter": load_drafter(micro_drafter(), dflash_config(micro_drafter()), ml_dtypes.bfloat16),
    }.items():
        reader = store.reader(part)
        for ranks in (1, 2):
            assert sums(load_arrays(reader, ml_dtypes.bfloat16, sharding_over(ranks))) == sums(arrays)
        found = reader.report(ml_dtypes.bfloat16)
        assert (found.parameters, found.memory_bytes) == (report.parameters, report.memory_bytes)


@pytest.mark.parametrize("ranks", [1, 8])
def test_every_byte_is_read_once(made, ranks: int) -> None:
    reader = Store(made).reader("target")

    class Counting:
        """Notes what is asked for."""

        table, stored, report = reader.table, reader.stored, reader.report
        asked: list[tuple[str, int]] = []

        def fill(self, path, piece, index, out):
            self.asked.append((path, out.nbytes))
            reader.fill(path, piece, index, out)

    load_arrays(counting := Counting(), ml_dtypes.bfloat16, sharding_over(ranks))
    assert sum(size for _, size in counting.asked) == memory_bytes(reader.table, ml_dtypes.bfloat16)
    for path, size in counting.asked:
        entry, cut = reader.table[path], layout(reader.table, path)
        shards = ranks if entry.split is not None else 1
        assert size * shards <= math.prod(cut.shape) * in_memory(entry, ml_dtypes.bfloat16).itemsize, path


@pytest.mark.parametrize("stacked", [False, True])
def test_chunks_cover_everything_once(stacked: bool) -> None:
    cut = Layout(4, (6, 5), stacked)
    pieces = np.arange(4 * 6 * 5).reshape(4, 6, 5)
    whole = pieces if stacked else pieces.reshape(24, 5)
    rows = [(0, 4), (1, 3), (2, 2)] if stacked else [(0, 24), (1, 24), (7, 8), (5, 19), (3, 3)]
    inner = [(slice(0, 6), slice(1, 4)), (slice(2, 5), slice(0, 5))] if stacked else [(slice(1, 4),), (slice(5, 5),)]
    for (first, last), rest, size in itertools.product(rows, inner, (1, 3 * 8 * 2, 1 << 20)):
        bounds = (slice(first, last), *rest)
        out = np.full(whole[bounds].shape, -1)
        for chunk in chunks(cut, bounds, size, 8):
            value = pieces[chunk.piece][chunk.index]
            assert (out[chunk.place] == -1).all() and value.size == math.prod(chunk.shape)
            out[chunk.place] = value.reshape(chunk.shape)
            assert value.nbytes <= max(size, value[0].nbytes)
        assert np.array_equal(out, whole[bounds])


def test_chunks_have_few_shapes() -> None:
    sizes = [c.shape[0] for c in chunks(Layout(1, (163840, 4), False), (slice(0, 20480), slice(0, 4)), 9362 * 8, 2)]
    assert len(set(sizes)) == 1 and sum(sizes) == 20480
    sizes = [c.shape[0] for c in chunks(Layout(1, (1283, 4), False), (slice(0, 1283), slice(0, 4)), 100 * 8, 2)]
    assert sizes == [100] * 12 + [83]


def test_files_hold_the_pieces_and_nothing_else(made, wanted) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("jddtree store", VERSION)
    store = Store(made)
    for part, arrays in wanted.items():
        table = store.reader(part).table
        for path, array in arrays.items():
            cut = layout(table, path)
            for piece in range(cut.count):
                name = f"{path}/{piece:03}.bin" if "." in path else f"{path}.bin"
                data = (made / part / name).read_bytes()
                assert data == piece_of(array, cut, piece).tobytes()
                assert manifest["parts"][part]["files"][name] == {
                    "bytes": len(data), "crc32": f"{zlib.crc32(data):08x}",
                }  # fmt: skip
    files = {f"{part}/{name}" for part in store.parts for name in store.parts[part].files} | {"manifest.json"}
    assert files == {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}


def test_small_files_are_copied(source, made) -> None:
    for name in ("config.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
        assert (made / "target" / name).read_bytes() == (source[0] / name).read_bytes()
    assert target_config(made / "target") == target_config(source[0])
    assert dflash_config(made / "drafter") == dflash_config(source[1])


def test_check_reads_everything_and_names_the_damaged_file(copied) -> None:
    store, calls = Store(copied), []
    store.check(lambda done, total: calls.append((done, total)))
    size = sum(path.stat().st_size for path in copied.rglob("*") if path.is_file() and path.name != "manifest.json")
    assert calls[-1] == (size, size)
    path = copied / "target" / "moe.q_b" / "001.bin"
    data = bytearray(path.read_bytes())
    data[77] ^= 4
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"1 damaged file: target/moe\.q_b/001\.bin \(CRC-32 \w{8}, wanted \w{8}\); "):
        Store(copied).check()


def test_missing_and_short_files_are_named_when_opened(copied) -> None:
    (copied / "target" / "embed.bin").unlink()
    path = copied / "drafter" / "fc.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError) as caught:
        Store(copied)
    text = (
        f"2 damaged files: target/embed.bin (missing), drafter/fc.bin ({size - 1} bytes, wanted {size}); copy it again"
    )
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_another_version_is_refused(copied) -> None:
    edit_manifest(copied, lambda values: values.update(version=VERSION + 1))
    with pytest.raises(
        UserError, match=rf"version {VERSION + 1}, but this program reads version {VERSION}; convert the"
    ):
        Store(copied)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: values.update(format="x"), r"is no manifest of a store \(format 'x', wanted 'jddtree store'\)"),
        (lambda values: values["parts"]["target"].pop("files"), r"manifest\.json is damaged \(KeyError\('files'\)\)"),
        (lambda values: values.update(parts=[]), r"manifest\.json is damaged"),
    ],
)
def test_broken_manifest(copied, edit, message: str) -> None:
    edit_manifest(copied, edit)
    with pytest.raises(UserError, match=message):
        Store(copied)


def test_cut_manifest(copied) -> None:
    path = copied / "manifest.json"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"manifest\.json cannot be read as JSON"):
        Store(copied)


def test_other_folders_are_no_stores(made, tmp_path: Path) -> None:
    assert is_store(made) and not is_store(micro_target()) and not is_store(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is no store: it has no manifest\.json; give a folder that convert wrote"):
        Store(micro_target())
    (tmp_path / "convert.journal").touch()
    assert is_store(tmp_path)
    with pytest.raises(UserError, match=r"is an unfinished conversion; run the same convert command again, it resumes"):
        Store(tmp_path)


def test_a_config_of_another_model_is_refused(copied) -> None:
    config = copied / "target" / "config.json"
    config.write_text(config.read_text().replace('"n_routed_experts": 8', '"n_routed_experts": 4'))
    entry = {"bytes": config.stat().st_size, "crc32": "0"}
    edit_manifest(copied, lambda values: values["parts"]["target"]["files"].update({"config.json": entry}))
    with pytest.raises(UserError, match=r"config\.json describes another model than manifest\.json; convert again"):
        Store(copied).reader("target")


def test_a_store_without_drafter(source, tmp_path: Path) -> None:
    convert(source[0], None, tmp_path / "store")
    with pytest.raises(UserError, match=r"holds only a target; convert again with a drafter"):
        Store(tmp_path / "store").reader("drafter")


def test_too_little_memory_is_said_before_loading(made) -> None:
    store = Store(made)
    tables = [store.reader(part).table for part in store.parts]
    needed = [device_bytes(table, ml_dtypes.bfloat16, sharding_over(2)) for table in tables]
    share = sum(part[jax.devices()[0]] for part in needed)
    stats = lambda device: {"bytes_limit": share + (10 << 30) - 1, "bytes_in_use": 9 << 30}
    require_memory(needed, stats_of=stats)
    text = (
        r"has 1\.0 GiB of free memory, but its share of the weights needs 0\.0 GiB and 1\.0 GiB to work with; use more"
    )
    with pytest.raises(UserError, match=text):
        require_memory(needed, reserve=1 << 30, stats_of=stats)
    require_memory(needed, reserve=1 << 50, stats_of=lambda device: None)
    assert len(needed[0]) == 2 and needed[0][jax.devices()[0]] == sum(
        array.addressable_shards[0].data.nbytes
        for array in load_arrays(store.reader("target"), ml_dtypes.bfloat16, sharding_over(2)).values()
    )


def test_identical_from_the_same_source(source, made, tmp_path: Path) -> None:
    convert(*source, tmp_path / "again")
    assert same_trees(made, tmp_path / "again")
