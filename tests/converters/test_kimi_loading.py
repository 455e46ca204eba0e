"""Loading a Kimi K2.6 folder: values against the raw tensors and the reference arrays, and every fault in one
error.
"""

import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_folders import Edit, copy_folder, edit_folder
from conftest import golden_ref, micro_target, official_dir
from safetensors import safe_open
from whole_packing import unpack_down, unpack_gate_up

from converters.checkpoint import Checkpoint
from converters.kimi import count_parameters, expected_tensors, load_target
from jddtree.config import target_config
from jddtree.errors import UserError
from jddtree.models.parameters import target_parameters

PREFIX = "language_model."
LAYER1 = "language_model.model.layers.1."
EXPERT = LAYER1 + "mlp.experts.3."


@pytest.fixture(scope="module")
def loaded():
    """(arrays, report) of the micro target in bfloat16."""
    return load_target(micro_target(), target_config(micro_target()), ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def raw():
    """Tensors as the safetensors library reads them, by name without prefix."""
    tensors = {}
    for path in sorted(micro_target().glob("*.safetensors")):
        with safe_open(path, "np") as library:
            tensors |= {name.removeprefix(PREFIX): library.get_tensor(name) for name in library.keys()}
    return tensors


def load_edited(tmp_path: Path, edit: Edit, *, index: bool = True):
    """Load a micro target after `edit` changed its tensors."""
    folder = edit_folder(copy_folder(micro_target(), tmp_path), edit, index=index)
    return load_target(folder, target_config(folder), ml_dtypes.bfloat16)


def same(left, right) -> bool:
    """Equal paths, types and bytes."""
    return left.keys() == right.keys() and all(
        left[path].dtype == right[path].dtype and left[path].tobytes() == right[path].tobytes()
        for path in left
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_arrays_match_the_parameter_table(dtype) -> None:
    config = target_config(micro_target())
    arrays, _ = load_target(micro_target(), config, dtype)
    table = target_parameters(config)
    assert arrays.keys() == table.keys()
    for path, parameter in table.items():
        wanted = dtype if parameter.dtype == "compute" else parameter.dtype
        assert (arrays[path].shape, arrays[path].dtype) == (parameter.shape, np.dtype(wanted)), path
        assert arrays[path].flags.c_contiguous


def test_report(loaded) -> None:
    arrays, report = loaded
    assert (report.tensors, report.skipped_tensors) == (805, 35)
    assert report.file_bytes + report.skipped_bytes == 9511360
    assert report.files == tuple(f"model-0000{number}-of-000004.safetensors" for number in (1, 2, 3))
    assert report.memory_bytes == sum(array.nbytes for array in arrays.values())
    assert report.memory_bytes == report.file_bytes - 5 * 16 * 3 * 8  # no weight_shape
    assert report.notes == ()


def test_plain_tensors_are_stacked_in_layer_order(loaded, raw) -> None:
    arrays, _ = loaded
    names = {
        "input_norm": "input_layernorm.weight",
        "q_a": "self_attn.q_a_proj.weight",
        "q_a_norm": "self_attn.q_a_layernorm.weight",
        "kv_a_norm": "self_attn.kv_a_layernorm.weight",
        "o": "self_attn.o_proj.weight",
        "post_norm": "post_attention_layernorm.weight",
        "shared_gate": "mlp.shared_experts.gate_proj.weight",
        "shared_up": "mlp.shared_experts.up_proj.weight",
        "shared_down": "mlp.shared_experts.down_proj.weight",
        "router": "mlp.gate.weight",
        "router_bias": "mlp.gate.e_score_correction_bias",
    }
    for path, name in names.items():
        wanted = np.stack([raw[f"model.layers.{layer}.{name}"] for layer in range(1, 6)])
        assert np.array_equal(arrays[f"moe.{path}"].astype(np.float32), wanted.astype(np.float32)), path
    for path, name in {"mlp_gate": "gate", "mlp_up": "up", "mlp_down": "down"}.items():
        assert arrays[f"dense.{path}"][0].tobytes() == raw[f"model.layers.0.mlp.{name}_proj.weight"].tobytes()
    assert arrays["embed"].tobytes() == raw["model.embed_tokens.weight"].tobytes()
    assert arrays["head"].tobytes() == raw["lm_head.weight"].tobytes()
    assert arrays["norm"].tobytes() == raw["model.norm.weight"].tobytes()


@pytest.mark.parametrize(("kind", "row", "layer"), [("dense", 0, 0), ("moe", 0, 1), ("moe", 4, 5)])
def test_rotary_rows_and_head_split(loaded, raw, kind: str, row: int, layer: int) -> None:
    arrays, _ = loaded
    attention = f"model.layers.{layer}.self_attn."
    evens_then_odds = [*range(0, 32, 2), *range(1, 32, 2)]
    order = [head * 64 + r for head in range(4) for r in [*range(32), *(32 + d for d in evens_then_odds)]]
    assert arrays[f"{kind}.q_b"][row].tobytes() == raw[attention + "q_b_proj.weight"][order].tobytes()
    order = [*range(64), *(64 + d for d in evens_then_odds)]
    assert (
        arrays[f"{kind}.kv_a"][row].tobytes() == raw[attention + "kv_a_proj_with_mqa.weight"][order].tobytes()
    )
    kv_b = raw[attention + "kv_b_proj.weight"]
    for head in range(4):
        assert arrays[f"{kind}.k_up"][row, head].tobytes() == kv_b[head * 64 : head * 64 + 32].tobytes()
        assert arrays[f"{kind}.v_up"][row, head].tobytes() == kv_b[head * 64 + 32 : head * 64 + 64].tobytes()


def test_experts_unpack_to_the_raw_tensors(loaded, raw) -> None:
    arrays, _ = loaded
    gate, gate_scale, up, up_scale = unpack_gate_up(
        arrays["experts.gate_up"], arrays["experts.gate_up_scale"]
    )
    down, down_scale = unpack_down(arrays["experts.down"], arrays["experts.down_scale"])
    parts = {"gate": (gate, gate_scale), "up": (up, up_scale), "down": (down, down_scale)}
    for place in range(5 * 16):
        name = f"model.layers.{1 + place // 16}.mlp.experts.{place % 16}."
        for projection, (words, scale) in parts.items():
            assert words[place].tobytes() == raw[f"{name}{projection}_proj.weight_packed"].tobytes()
            assert scale[place].tobytes() == raw[f"{name}{projection}_proj.weight_scale"].tobytes()


@pytest.mark.parametrize(("layer", "expert"), [(2, 7), (4, 11)])
def test_experts_that_straddle_shards_match_the_reference(loaded, layer: int, expert: int) -> None:
    arrays, _ = loaded
    checkpoint = Checkpoint(micro_target())
    name = f"{PREFIX}model.layers.{layer}.mlp.experts.{expert}."
    assert len({entry.shard for key, entry in checkpoint.entries.items() if key.startswith(name)}) == 2
    one = slice((layer - 1) * 16 + expert, (layer - 1) * 16 + expert + 1)
    experts = {path: array[one] for path, array in arrays.items() if path.startswith("experts.")}
    gate, gate_scale, up, up_scale = unpack_gate_up(
        experts["experts.gate_up"], experts["experts.gate_up_scale"]
    )
    down, down_scale = unpack_down(experts["experts.down"], experts["experts.down_scale"])
    with safe_open(golden_ref() / "int4.safetensors", "np") as golden:
        present = set(golden.keys())
        for projection, words, scale in (
            ("gate", gate, gate_scale),
            ("up", up, up_scale),
            ("down", down, down_scale),
        ):
            start = f"{layer}.{expert}.{projection}_proj."
            q = (words[0, :, :, None].view(np.uint32) >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(
                np.int8
            ) - 8
            q = q.reshape(len(q), -1)
            assert np.array_equal(q, golden.get_tensor(start + "q"))
            scale = scale[0].view(ml_dtypes.bfloat16)
            assert scale.tobytes() == golden.get_tensor(start + "scale").tobytes()
            if start + "dequant" in present:
                value = q.astype(np.float32) * np.repeat(scale.astype(np.float32), 32, axis=1)
                wanted = golden.get_tensor(start + "dequant")
                assert value.astype(ml_dtypes.bfloat16).tobytes() == wanted.tobytes()


def test_minus_eight_survives(loaded) -> None:
    arrays, _ = loaded
    words = [arrays[f"experts.{name}"].view(np.uint32) for name in ("gate_up", "down")]
    assert sum(int((word >> np.uint32(4 * k) & 15 == 0).sum()) for word in words for k in range(8)) == 62648


@pytest.mark.parametrize("index", [True, False])
def test_no_prefix_and_no_index_give_the_same(tmp_path: Path, loaded, index: bool) -> None:
    def strip(tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix(PREFIX)] = tensors.pop(name)

    arrays, report = load_edited(tmp_path, strip, index=index)
    assert same(arrays, loaded[0])
    assert report.skipped_tensors == 35


def test_a_folder_without_vision_loads(tmp_path: Path, loaded) -> None:
    def drop(tensors) -> None:
        for name in [name for name in tensors if not name.startswith(PREFIX)]:
            del tensors[name]

    arrays, report = load_edited(tmp_path, drop)
    assert same(arrays, loaded[0]) and (report.skipped_tensors, report.skipped_bytes) == (0, 0)


def test_weight_shape_may_be_int64(tmp_path: Path, loaded) -> None:
    def widen(tensors) -> None:
        tensors.update(
            {name: a.astype(np.int64) for name, a in tensors.items() if name.endswith("weight_shape")}
        )

    assert same(load_edited(tmp_path, widen)[0], loaded[0])


def test_progress_counts_every_byte_once(loaded) -> None:
    calls: list[tuple[int, int]] = []
    config = target_config(micro_target())
    load_target(
        micro_target(), config, ml_dtypes.bfloat16, progress=lambda done, total: calls.append((done, total))
    )
    done = [call[0] for call in calls]
    assert done == sorted(done) and calls[-1] == (loaded[1].file_bytes, loaded[1].file_bytes)
    assert {call[1] for call in calls} == {loaded[1].file_bytes} and len(calls) > 80


def test_every_fault_is_in_one_error(tmp_path: Path) -> None:
    def spoil(tensors) -> None:
        del tensors[LAYER1 + "self_attn.o_proj.weight"]
        tensors[LAYER1 + "self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors[LAYER1 + "input_layernorm.weight"] = np.ones(255, ml_dtypes.bfloat16)
        tensors[LAYER1 + "mlp.gate.e_score_correction_bias"] = np.ones(16, ml_dtypes.bfloat16)
        tensors[EXPERT + "up_proj.weight_packed"] = tensors[EXPERT + "up_proj.weight_packed"].view(np.uint8)

    with pytest.raises(UserError) as caught:
        load_edited(tmp_path, spoil)
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        f"the tensors in {tmp_path / 'checkpoint'} are not those that its config.json needs: ",
        f"1 tensor missing: {LAYER1}self_attn.o_proj.weight; ",
        f"1 tensor unexpected: {LAYER1}self_attn.rotary_emb.inv_freq; ",
        f"2 tensors of the wrong shape: {LAYER1}input_layernorm.weight is [255], wanted [256], "
        f"{EXPERT}up_proj.weight_packed is [128, 128], wanted [128, 32]; ",
        f"2 tensors of the wrong type: {LAYER1}mlp.gate.e_score_correction_bias is BF16, wanted F32, "
        f"{EXPERT}up_proj.weight_packed is U8, wanted I32; ",
        "give a folder whose config.json and shards belong together",
    ):
        assert part in text


def test_renamed_tensor_is_missing_and_unexpected(tmp_path: Path) -> None:
    def rename(tensors) -> None:
        tensors["language_model.head.weight"] = tensors.pop("language_model.lm_head.weight")

    with pytest.raises(UserError) as caught:
        load_edited(tmp_path, rename)
    assert "1 tensor missing: language_model.lm_head.weight; " in str(caught.value)
    assert "1 tensor unexpected: language_model.head.weight; " in str(caught.value)


def test_unpacked_expert_is_named_as_that(tmp_path: Path) -> None:
    def unpack(tensors) -> None:
        for part in ("packed", "scale", "shape"):
            del tensors[f"{EXPERT}gate_proj.weight_{part}"]
        tensors[EXPERT + "gate_proj.weight"] = np.ones((128, 256), ml_dtypes.bfloat16)

    with pytest.raises(UserError) as caught:
        load_edited(tmp_path, unpack)
    kind = "1 tensor of routed experts not packed (INT4 needs .weight_packed, found .weight)"
    assert f"{kind}: {EXPERT}gate_proj.weight;" in str(caught.value)
    assert "missing" not in str(caught.value) and "unexpected" not in str(caught.value)


def test_packed_attention_is_named_as_that(tmp_path: Path) -> None:
    name = LAYER1 + "self_attn.o_proj.weight"

    def pack(tensors) -> None:
        del tensors[name]
        tensors[name + "_packed"] = np.zeros((256, 16), np.int32)
        tensors[name + "_scale"] = np.ones((256, 4), ml_dtypes.bfloat16)
        tensors[name + "_shape"] = np.array([256, 128], np.int32)

    with pytest.raises(UserError) as caught:
        load_edited(tmp_path, pack)
    wanted = f"1 tensor packed, though only routed experts may be (needs .weight in bfloat16): {name}_packed;"
    assert wanted in str(caught.value)
    assert "missing" not in str(caught.value) and "unexpected" not in str(caught.value)


def test_weight_shape_that_contradicts_is_named(tmp_path: Path) -> None:
    def swap(tensors) -> None:
        for expert in (3, 5):
            name = f"{LAYER1}mlp.experts.{expert}.down_proj.weight_shape"
            tensors[name] = tensors[name][::-1]

    with pytest.raises(UserError) as caught:
        load_edited(tmp_path, swap)
    text = str(caught.value)
    assert "2 tensors whose value contradicts the packed weights: " in text
    assert f"{EXPERT}down_proj.weight_shape is [128, 256], wanted [256, 128], " in text


def test_another_config_lists_exact_counts(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(micro_target(), tmp_path / "checkpoint"))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"n_routed_experts": 16', '"n_routed_experts": 17'))
    with pytest.raises(UserError) as caught:
        load_target(folder, target_config(folder), ml_dtypes.bfloat16)
    assert re.search(
        r"45 tensors missing: .* and 37 more; 10 tensors of the wrong shape: ", str(caught.value)
    )
    assert len(str(caught.value)) < 3000


@pytest.mark.skipif(official_dir() is None, reason="the official configuration is not here")
def test_inventory_of_the_published_model() -> None:
    directory = official_dir()
    assert directory is not None
    config = target_config(directory)
    expected = expected_tensors(config)
    assert len(expected) == 208_215
    widths = {"BF16": 2, "F32": 4, "I32": 4}
    assert sum(int(np.prod(shape)) * widths[dtype] for dtype, shape in expected.values()) == 594_205_904_896
    assert count_parameters(config) == 1_026_408_232_448
    assert expected["model.layers.60.mlp.experts.383.down_proj.weight_packed"] == ("I32", (7168, 256))
    assert expected["model.layers.0.self_attn.kv_b_proj.weight"] == ("BF16", (16384, 512))


def test_inventory_of_the_micro_model(raw) -> None:
    config = target_config(micro_target())
    names = {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
    vision = ("vision_tower.", "mm_projector.")
    text = {name: (names[a.dtype], a.shape) for name, a in raw.items() if not name.startswith(vision)}
    assert expected_tensors(config) == text
