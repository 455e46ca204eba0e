"""Loading a drafter folder: values against the raw tensors, layouts that are accepted, and variants refused by name."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import micro_drafter
from safetensors import safe_open
from test_checkpoint import Edit, copy_folder, edit_folder, write_index, write_shard

from converters.checkpoint import INDEX_NAME
from converters.dflash import drafter_parameters, expected_tensors, load_drafter
from jddtree.config import dflash_config
from jddtree.errors import UserError


@pytest.fixture(scope="module")
def raw():
    """Tensors as the safetensors library reads them."""
    with safe_open(micro_drafter() / "model.safetensors", "np") as library:
        return {name: library.get_tensor(name) for name in library.keys()}


@pytest.fixture(scope="module")
def loaded():
    """(arrays, report) of the micro drafter in bfloat16."""
    return load_drafter(micro_drafter(), dflash_config(micro_drafter()), ml_dtypes.bfloat16)


def load_edited(tmp_path: Path, edit: Edit, dtype=ml_dtypes.bfloat16):
    """Load a micro drafter after `edit` changed its tensors."""
    folder = edit_folder(copy_folder(micro_drafter(), tmp_path), edit)
    return load_drafter(folder, dflash_config(folder), dtype)


def same(left, right) -> bool:
    """Equal paths and bytes."""
    return left.keys() == right.keys() and all(left[path].tobytes() == right[path].tobytes() for path in left)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_arrays_match_the_parameter_table_and_the_tensors(raw, dtype) -> None:
    config = dflash_config(micro_drafter())
    arrays, _ = load_drafter(micro_drafter(), config, dtype)
    table = drafter_parameters(config)
    assert {path: array.shape for path, array in arrays.items()} == {path: p.shape for path, p in table.items()}
    assert all(array.dtype == dtype for array in arrays.values())
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "input_norm": "input_layernorm"}
    names |= {"post_norm": "post_attention_layernorm", "mlp_gate": "mlp.gate_proj", "mlp_up": "mlp.up_proj"}
    names |= {"mlp_down": "mlp.down_proj"}
    for path, name in names.items():
        wanted = np.stack([raw[f"layers.{layer}.{name}.weight"] for layer in range(3)]).astype(dtype)
        assert arrays[f"layers.{path}"].tobytes() == wanted.tobytes(), path
    for path in ("fc", "hidden_norm", "norm"):
        assert arrays[path].tobytes() == raw[f"{path}.weight"].astype(dtype).tobytes()


def test_report_and_progress(loaded) -> None:
    calls: list[tuple[int, int]] = []
    config = dflash_config(micro_drafter())
    load_drafter(micro_drafter(), config, np.float32, progress=lambda done, total: calls.append((done, total)))
    report = loaded[1]
    assert (report.tensors, report.files, report.skipped_tensors) == (36, ("model.safetensors",), 0)
    assert report.file_bytes == report.memory_bytes == 2 * report.parameters
    assert calls[-1] == (report.file_bytes, report.file_bytes) and len(calls) == 36


def test_model_prefix_and_float32_give_the_same(tmp_path: Path, loaded) -> None:
    def change(tensors) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name).astype(np.float32)

    arrays, report = load_edited(tmp_path, change)
    assert same(arrays, loaded[0]) and report.file_bytes == 4 * report.parameters


@pytest.mark.parametrize("index", [True, False])
def test_two_shards_give_the_same(tmp_path: Path, raw, loaded, index: bool) -> None:
    folder = copy_folder(micro_drafter(), tmp_path)
    (folder / "model.safetensors").unlink()
    names = list(raw)
    weight_map = {}
    for number, part in enumerate((names[:20], names[20:]), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        write_shard(folder / shard, {name: raw[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    if index:
        write_index(folder, weight_map)
    assert (folder / INDEX_NAME).exists() == index
    arrays, report = load_drafter(folder, dflash_config(folder), ml_dtypes.bfloat16)
    assert same(arrays, loaded[0]) and len(report.files) == 2


def test_every_difference_is_in_one_error(tmp_path: Path) -> None:
    def spoil(tensors) -> None:
        del tensors["norm.weight"]
        tensors["layers.3.input_layernorm.weight"] = np.ones(256, ml_dtypes.bfloat16)
        tensors["layers.0.self_attn.q_norm.weight"] = np.ones(32, ml_dtypes.bfloat16)
        tensors["hidden_norm.weight"] = np.ones(256, np.float16)

    with pytest.raises(UserError) as caught:
        load_edited(tmp_path, spoil)
    assert (
        "1 tensor missing: norm.weight; 1 tensor unexpected: layers.3.input_layernorm.weight; "
        "1 tensor of the wrong shape: layers.0.self_attn.q_norm.weight is [32], wanted [64]; "
        "1 tensor of the wrong type: hidden_norm.weight is F16, wanted BF16; give a folder"
    ) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("layers.0.attention_conv.base_kernel", "DFlash 2, convolutions"),
        ("layers.0.mlp_conv.kernel_projection.weight", "DFlash 2, convolutions"),
        ("candidate_selector.predecessor_codebook", "DFlash 2, a candidate selector"),
        ("markov_head.w1.weight", "DSpark, a Markov head"),
        ("confidence_head.weight", "DSpark, a confidence head"),
        ("gru.weight_ih_l0", "Domino, a GRU head"),
        ("layers.0.self_attn.q_proj.bias", "biases"),
        ("layers.0.self_attn.sinks", "attention sinks"),
        ("embed_tokens.weight", "an embedding of its own"),
        ("lm_head.weight", "a head of its own"),
        ("d2t", "a reduced vocabulary"),
        ("layers.0.self_attn.kv_b_proj.weight", "latent attention"),
        ("mask_embedding", "a mask embedding of its own"),
    ],
)
def test_variants_are_refused_by_name(tmp_path: Path, name: str, meaning: str) -> None:
    def add(tensors) -> None:
        tensors[name] = np.ones(4, ml_dtypes.bfloat16)

    with pytest.raises(UserError) as caught:
        load_edited(tmp_path, add)
    assert f"holds {name} ({meaning}), but only DFlash v1 is supported" in str(caught.value)


def test_another_number_of_taps_is_explained(tmp_path: Path) -> None:
    def narrow(tensors) -> None:
        tensors["fc.weight"] = tensors["fc.weight"][:, :512]

    with pytest.raises(
        UserError, match=r"fc\.weight has 512 columns, but the 3 target_layer_ids .* need 768 \(3 x hid"
    ):
        load_edited(tmp_path, narrow)


def test_inventory(raw) -> None:
    assert expected_tensors(dflash_config(micro_drafter())) == {n: ("BF16", a.shape) for n, a in raw.items()}
