"""`inspect`: the published numbers from small files alone, the micro models, and folders with faults."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import micro_drafter, micro_target, official_dir
from test_checkpoint import write_index

from converters.checkpoint import INDEX_NAME
from converters.dflash import load_drafter
from converters.kimi import expected_tensors, load_target
from jddtree.cli.inspect import inspect, render, run
from jddtree.config import dflash_config, read_json, target_config
from jddtree.errors import UserError

GIB = 1 << 30
PUBLISHED_BYTES = {  # facts/kimi_k26.md, section 3.5
    "experts_packed": 507_343_011_840,
    "experts_scales": 63_417_876_480,
    "experts_shapes": 552_960,
    "attention": 12_337_139_712,
    "shared_experts": 5_284_823_040,
    "dense": 792_723_456,
    "routers": 330_393_600,
    "embed": 2_348_810_240,
    "head": 2_348_810_240,
    "norms": 1_763_328,
    "total": 594_205_904_896,
    "vision": 942_287_840,
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the published config.json."""
    source = official_dir()
    if source is None:
        pytest.skip("the official configuration is not here")
    folder = tmp_path_factory.mktemp("published")
    shutil.copy(source / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def published_answer(published: Path) -> dict[str, Any]:
    """The answer for config.json alone."""
    return inspect(published)


def small_files(source: Path, folder: Path) -> Path:
    """Copy config.json and the index, no shard."""
    for name in ("config.json", INDEX_NAME):
        if (source / name).exists():
            shutil.copy(source / name, folder)
    return folder


def per_rank(answer: dict[str, Any]) -> dict[int, int | None]:
    """Weight bytes of one device by number of ranks."""
    return {entry["ranks"]: entry["bytes"] for entry in answer["memory"]["weights_per_device"]}


def test_published_bytes_and_counts(published_answer: dict[str, Any]) -> None:
    answer = published_answer
    assert answer["kind"] == "target"
    assert answer["bytes"] == PUBLISHED_BYTES
    assert answer["tensors"]["expected"] + answer["tensors"]["expected_vision"] == 208_550
    assert (answer["tensors"]["expected"], answer["tensors"]["found"]) == (208_215, None)
    parameters = answer["parameters"]
    assert (parameters["total"], parameters["vision"]) == (1_026_408_232_448, 471_143_920)
    assert round(parameters["active_per_token"] / 1e9, 1) == 31.7


def test_published_memory(published_answer: dict[str, Any]) -> None:
    memory = published_answer["memory"]
    assert memory["cache_bytes_per_token"] == 70_272
    sizes = per_rank(published_answer)
    eight = sizes[8]
    assert eight is not None and round(eight / GIB, 2) == 70.95
    files = PUBLISHED_BYTES["total"] - PUBLISHED_BYTES["experts_shapes"]
    assert sizes[1] == files
    replicated = 61 * 2 * (1536 * 7168 + 576 * 7168 + 1536 + 512) + PUBLISHED_BYTES["norms"]
    replicated += 60 * (2 * 384 * 7168 + 4 * 384)
    for ranks in (2, 4, 8):
        assert sizes[ranks] == replicated + (sizes[1] - replicated) // ranks
    assert "replicated" in memory["note"]


def test_published_index_is_compared_without_a_shard(published: Path, tmp_path: Path) -> None:
    folder = small_files(published, tmp_path)
    names = [f"language_model.{name}" for name in expected_tensors(target_config(folder))]
    names += [f"vision_tower.{number}" for number in range(329)] + [f"mm_projector.{number}" for number in range(6)]
    write_index(folder, dict.fromkeys(names, "model-00001-of-000064.safetensors"), total_size=595_148_192_736)
    answer = inspect(folder)
    tensors = answer["tensors"]
    assert (tensors["found"], tensors["found_vision"], tensors["missing"], tensors["unexpected"]) == (
        208_215,
        335,
        0,
        0,
    )
    assert (tensors["shards"], tensors["shards_present"]) == (1, 0)
    assert tensors["index_bytes"] == answer["bytes"]["total"] + answer["bytes"]["vision"]


def test_micro_target_agrees_with_what_is_loaded(tmp_path: Path) -> None:
    answer = inspect(small_files(micro_target(), tmp_path))
    arrays, report = load_target(micro_target(), target_config(micro_target()), "bfloat16")
    assert answer["parameters"]["total"] == report.parameters
    assert answer["bytes"]["total"] == report.file_bytes
    assert answer["bytes"]["vision"] == report.skipped_bytes
    assert per_rank(answer)[1] == report.memory_bytes == sum(array.nbytes for array in arrays.values())
    tensors = answer["tensors"]
    assert (tensors["found"], tensors["found_vision"], tensors["expected_vision"]) == (805, 35, 35)
    assert (tensors["shards"], tensors["shards_present"], tensors["index_bytes"]) == (4, 0, 9_511_360)
    assert inspect(micro_target())["tensors"]["shards_present"] == 4


def test_micro_drafter_agrees_with_what_is_loaded() -> None:
    answer = inspect(micro_drafter())
    _, report = load_drafter(micro_drafter(), dflash_config(micro_drafter()), "bfloat16")
    assert answer["kind"] == "drafter"
    assert answer["parameters"] == {"total": report.parameters}
    assert answer["bytes"]["total"] == report.file_bytes == per_rank(answer)[1]
    assert (answer["tensors"]["found"], answer["tensors"]["missing"]) == (36, 0)
    assert answer["memory"]["cache_bytes_per_token"] == 3 * 2 * 2 * 64 * 2


def test_kimi_drafter_size(tmp_path: Path) -> None:
    values = read_json(micro_drafter() / "config.json")
    values |= {"hidden_size": 7168, "num_hidden_layers": 6, "intermediate_size": 18432, "num_attention_heads": 64}
    values |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 163840, "num_target_layers": 61}
    values |= {"layer_types": None}
    values["dflash_config"] = {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    answer = inspect(tmp_path)
    norms = 6 * (2 * 7168 + 2 * 128) + 2 * 7168
    assert answer["parameters"]["total"] == 3_479_175_168 + norms  # facts/dflash_ddtree.md, 1.3, counts matrices only
    assert answer["tensors"] == {"expected": 69, "found": None, "index_bytes": None}
    assert answer["memory"]["cache_bytes_per_token"] == 24 * 1024
    assert answer["bytes"]["taps"] == 7168 * 43008 * 2
    assert None not in per_rank(answer).values()


def test_ranks_that_do_not_divide_say_why() -> None:
    entries = {entry["ranks"]: entry for entry in inspect(micro_target())["memory"]["weights_per_device"]}
    assert entries[2]["reason"] is None and entries[2]["bytes"] < entries[1]["bytes"]
    assert entries[8] == {"ranks": 8, "bytes": None, "reason": "num_attention_heads 4 is not divisible by 8"}
    entries = {entry["ranks"]: entry for entry in inspect(micro_drafter())["memory"]["weights_per_device"]}
    assert entries[4]["reason"] == "num_key_value_heads 2 is not divisible by 4"


def test_names_that_differ_are_counted(tmp_path: Path) -> None:
    folder = small_files(micro_target(), tmp_path)
    index = read_json(folder / INDEX_NAME)
    lost = [name for name in index["weight_map"] if ".experts.7." in name]
    weights = {name: shard for name, shard in index["weight_map"].items() if name not in lost}
    write_index(folder, {**weights, "language_model.model.extra": "model-00001-of-000004.safetensors"})
    tensors = inspect(folder)["tensors"]
    assert (tensors["missing"], len(tensors["missing_first"])) == (len(lost), 5) == (45, 5)
    assert (tensors["unexpected"], tensors["unexpected_first"]) == (1, ["model.extra"])
    assert tensors["index_bytes"] is None


def test_unknown_vision_layout_is_not_guessed(tmp_path: Path) -> None:
    values = read_json(micro_target() / "config.json")
    del values["vision_config"]["vt_hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    answer = inspect(tmp_path)
    assert answer["bytes"]["vision"] is answer["parameters"]["vision"] is answer["tensors"]["expected_vision"] is None
    assert "vision                   unknown" in render(answer)


def test_stray_files_are_not_taken_for_shards(tmp_path: Path) -> None:
    (small_files(micro_drafter(), tmp_path) / "golden.safetensors").write_bytes(b"no shard")
    assert inspect(tmp_path)["tensors"]["found"] is None


@pytest.mark.parametrize("source", [micro_target, micro_drafter])
def test_json_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str], source) -> None:
    run(source(), True)
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.count("\n") == 1
    assert json.loads(captured.out) == json.loads(json.dumps(inspect(source())))


def test_table_shows_the_published_numbers(published_answer: dict[str, Any]) -> None:
    lines = [" ".join(line.split()) for line in render(published_answer).splitlines()]
    for line in (
        "experts_packed 507,343,011,840 472.5000 GiB",
        "total 594,205,904,896 553.3974 GiB",
        "8 ranks 76,182,593,536 70.9506 GiB",
        "cache_bytes_per_token 70,272",
        "found no index and no shard to compare",
        "rope.factor 64.0",
    ):
        assert line in lines


def test_table_of_the_micro_models(capsys: pytest.CaptureFixture[str]) -> None:
    run(micro_target(), False)
    text = capsys.readouterr().out
    assert "8 ranks                  not possible: num_attention_heads 4 is not divisible by 8" in text
    assert "found                    805" in text
    run(micro_drafter(), False)
    assert "windows                  None, None, None" in capsys.readouterr().out


def test_errors_reach_the_caller(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["DFlash2DraftModel"]}')
    with pytest.raises(UserError, match=r"DFlash2DraftModel.*only \['DFlashDraftModel'\] \(DFlash v1\)"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM.*give a Kimi K2\.6 checkpoint"):
        inspect(tmp_path)
