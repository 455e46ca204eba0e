"""Random checkpoints: the layout of the real ones, reproducible, of sensible values, and loadable as they are."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import micro_drafter, micro_target, official_dir

from converters.checkpoint import INDEX_NAME, Checkpoint, read_index
from converters.dflash import load_drafter
from converters.kimi import load_target
from converters.random_tensors import CHUNK, Tensor, Values, write_shards
from converters.synthetic import main, target_list, vision_list, write_checkpoint, write_drafter
from jddtree.config import check_pair, dflash_config, target_config
from jddtree.errors import UserError
from jddtree.text.tokenizer import Tokenizer

SMALL = {"num_hidden_layers": 3, "n_routed_experts": 4, "hidden_size": 128}


def layout(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor."""
    return {name: (entry.dtype, entry.shape) for name, entry in Checkpoint(folder).entries.items()}


def test_without_changes_the_layout_is_that_of_the_bundled_pair(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "target", {}, vision=True)
    drafter = write_drafter(tmp_path / "drafter", config)
    assert config == target_config(micro_target()) and layout(tmp_path / "target") == layout(micro_target())
    assert layout(tmp_path / "drafter") == layout(micro_drafter())
    assert drafter.target_layer_ids == (0, 2, 4)
    names = {path.name for path in micro_target().iterdir()}
    assert {path.name for path in (tmp_path / "target").iterdir()} == names
    index, bundled = (read_index(folder) for folder in (tmp_path / "target", micro_target()))
    assert index is not None and bundled is not None and index.total_size == bundled.total_size


def test_it_loads(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "target", SMALL, shards=3)
    drafter = write_drafter(tmp_path / "drafter", config, {"num_hidden_layers": 2, "block_size": 4}, shards=2)
    check_pair(config, drafter)
    assert (config.num_hidden_layers, config.n_routed_experts, drafter.block_size) == (3, 4, 4)
    arrays, report = load_target(tmp_path / "target", config, ml_dtypes.bfloat16)
    assert len(report.files) == 3 and report.notes == ()
    assert all(np.isfinite(array.astype(np.float32)).all() for array in arrays.values() if array.dtype != np.int32)
    load_drafter(tmp_path / "drafter", dflash_config(tmp_path / "drafter"), np.float32)
    assert Tokenizer.from_directory(tmp_path / "target").vocab_size <= config.vocab_size


def test_values_have_the_deviation_of_their_fan_in() -> None:
    values = Values(0)
    weight = values.draw(Tensor("q.weight", "BF16", (512, 256)), 0, 512 * 256).astype(np.float32)
    assert abs(weight.std() * 16 - 1) < 0.02 and abs(weight.mean()) < 1e-3 and abs(weight).max() > 3.5 / 16
    norm = values.draw(Tensor("norm.weight", "BF16", (4096,)), 0, 4096).astype(np.float32)
    assert abs(norm.mean() - 1) < 0.01 and 0.08 < norm.std() < 0.12
    words = values.draw(Tensor("up_proj.weight_packed", "I32", (512, 32)), 0, 512 * 32).view(np.uint32)
    scale = values.draw(Tensor("up_proj.weight_scale", "BF16", (512, 8)), 0, 512 * 8).astype(np.float32)
    q = (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(np.int32).reshape(512, 256) - 8
    assert set(np.unique(q)) == set(range(-8, 8))
    assert abs((q * np.repeat(scale.reshape(512, 8), 32, axis=1)).std() * 16 - 1) < 0.1
    bias = values.draw(Tensor("gate.e_score_correction_bias", "F32", (4096,)), 0, 4096)
    assert bias.dtype == np.float32 and bias.std() < 0.02


def test_bytes_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    def tensors(folder: str, seed: int, shards: int) -> dict[str, bytes]:
        write_checkpoint(tmp_path / folder, SMALL, seed, shards=shards)
        checkpoint = Checkpoint(tmp_path / folder)
        return {name: checkpoint.read(name).tobytes() for name in checkpoint.entries}

    first = tensors("a", 1, 2)
    assert first == tensors("b", 1, 5)
    other = tensors("c", 2, 2)
    assert first.keys() == other.keys()
    assert [name for name in first if first[name] == other[name]] == [n for n in first if n.endswith("weight_shape")]


def test_large_tensors_are_drawn_in_chunks(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    tensors = [Tensor("a.weight", "BF16", (CHUNK // 1024 + 1, 1024)), Tensor("b.weight", "F32", (5,))]
    write_shards(tmp_path, tensors, 0, 1, lambda *call: calls.append(call))
    size = sum(tensor.nbytes for tensor in tensors)
    assert len(calls) == 3 and calls[-1] == (size, size)
    value = Checkpoint(tmp_path).read("a.weight").reshape(-1)
    assert value[:1024].tobytes() != value[CHUNK:].tobytes() and not (tmp_path / INDEX_NAME).exists()


@pytest.mark.skipif(official_dir() is None, reason="the official configuration is not here")
def test_the_preset_is_the_published_model(tmp_path: Path) -> None:
    directory = official_dir()
    assert directory is not None
    official = target_config(directory)
    written = write_checkpoint(tmp_path / "one", {"num_hidden_layers": 2, "n_routed_experts": 1, "vocab_size": 1280,
        "num_experts_per_tok": 1, "intermediate_size": 64, "moe_intermediate_size": 64}, preset="k2.6")  # fmt: skip
    for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "rope", "softmax_scale"):
        assert getattr(written, name) == getattr(official, name), name
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    tensors = target_list(official) + vision_list(vision, official)
    assert len(tensors) == 208_550 and sum(tensor.nbytes for tensor in tensors) == 595_148_192_736


def test_the_command(tmp_path: Path, capsys) -> None:
    arguments = [str(tmp_path / "t"), "--drafter", str(tmp_path / "d"), "--set-drafter", "num_hidden_layers=1"]
    assert main([*arguments, *(f"--set={name}={value}" for name, value in SMALL.items())]) == 0
    assert target_config(tmp_path / "t").hidden_size == dflash_config(tmp_path / "d").hidden_size == 128
    assert main([str(tmp_path / "t")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 't'} exists and is no empty folder; give a new one\n"


@pytest.mark.parametrize(
    ("values", "message"),
    [({"hidden_size": 100}, r"field 'text_config\.hidden_size' is 100"), ({"vocab_size": 1000}, r"eos_token_id")],
)
def test_values_that_make_no_model(tmp_path: Path, values, message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_checkpoint(tmp_path / "t", values)


def test_a_configuration_object_may_be_given(tmp_path: Path) -> None:
    config = target_config(micro_target())
    assert write_checkpoint(tmp_path / "t", config) == config
    with pytest.raises(UserError, match=r"preset is 'k3', but must be one of micro, k2\.6"):
        write_checkpoint(tmp_path / "u", {}, preset="k3")
