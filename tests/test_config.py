"""Reading config.json: the micro and the published values, and every field that is honoured or refused by name."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import golden_ref, micro_drafter, micro_target, official_dir
from safetensors import safe_open

from jddtree.config import DFlashConfig, Rope, TargetConfig, check_pair, dflash_config, read_json, target_config
from jddtree.config_drafter import VARIANT_FIELDS
from jddtree.errors import UserError

Edit = Callable[[dict[str, Any]], object]
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}


def write(folder: Path, values: dict[str, Any]) -> Path:
    """A folder with this config.json."""
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def target(tmp_path: Path, edit: Edit, **switches: Any) -> TargetConfig:
    """The micro target's configuration after `edit` changed text_config; the outer object is its key "outer"."""
    values = read_json(micro_target() / "config.json")
    text = values["text_config"]
    text["outer"] = values
    edit(text)
    del text["outer"]
    return target_config(write(tmp_path, values), **switches)


def drafter(tmp_path: Path, edit: Edit, **switches: Any) -> DFlashConfig:
    """The micro drafter's configuration after `edit` changed it."""
    values = read_json(micro_drafter() / "config.json")
    edit(values)
    return dflash_config(write(tmp_path, values), **switches)


def refused(call: Callable[[], object], *parts: str) -> None:
    """`call` ends in a one-line UserError that names config.json and holds every part."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and "config.json" in text
    for part in parts:
        assert part in text, text


def test_micro_target() -> None:
    config = target_config(micro_target())
    assert (config.vocab_size, config.hidden_size, config.num_moe_layers, config.latent_size) == (1280, 256, 5, 96)
    assert config.rope == Rope(32, 50000.0, 64.0, 128, 32.0, 1.0, 1.0)
    assert (config.eos_token_ids, config.has_vision, config.latent_norm_eps) == ((1026,), True, 1e-5)
    with safe_open(golden_ref() / "rope.safetensors", "np") as golden:
        names = {name for name in golden.keys() if "scale" in name and "target" in name}
        assert names
        for name in names:
            assert math.isclose(float(golden.get_tensor(name)), config.softmax_scale, rel_tol=1e-6)
    assert target_config(micro_target(), latent_norm_eps=1e-6).latent_norm_eps == 1e-6


@pytest.mark.skipif(official_dir() is None, reason="the official configuration is not here")
def test_published_target() -> None:
    directory = official_dir()
    assert directory is not None
    config = target_config(directory)
    assert math.isclose(config.softmax_scale, 0.144679626, abs_tol=5e-10)
    assert config.rope == Rope(64, 50000.0, 64.0, 4096, 32.0, 1.0, 1.0)
    assert (config.num_hidden_layers, config.n_routed_experts, config.num_experts_per_tok) == (61, 384, 8)
    assert (config.rms_norm_eps, config.routed_scaling_factor, config.norm_topk_prob) == (1e-5, 2.827, True)
    assert (config.eos_token_ids, config.max_position_embeddings) == ((163586,), 262144)
    assert (config.latent_size, config.shared_intermediate_size, config.num_moe_layers) == (576, 2048, 60)


def test_micro_drafter() -> None:
    config = dflash_config(micro_drafter())
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (8, 1278, (1, 2, 3))
    assert (config.windows, config.causal, config.final_logit_softcapping) == ((None,) * 3, (False,) * 3, None)
    assert config.rope == Rope(64, 50000.0, 64.0, 128, 32.0, 1.0, 1.0)
    check_pair(target_config(micro_target()), config)


def test_broken_files(tmp_path: Path) -> None:
    refused(lambda: target_config(tmp_path), "config.json does not exist; give the folder")
    for content, part in (("{", "cannot be read as JSON"), ("[1]", "holds a list, not an object")):
        (tmp_path / "config.json").write_text(content)
        refused(lambda: target_config(tmp_path), part, "download the file again")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    refused(lambda: dflash_config(tmp_path), "cannot be read as JSON")


# --- target: layouts that mean the same


def move_quantisation(text: dict[str, Any]) -> None:
    text["outer"]["quantization_config"] = text.pop("quantization_config")


def to_rope_parameters(text: dict[str, Any]) -> None:
    scaling = text.pop("rope_scaling")
    text["rope_parameters"] = {**scaling, "rope_type": scaling["type"], "rope_theta": text.pop("rope_theta")}


def both_rope_forms(text: dict[str, Any]) -> None:
    text["rope_parameters"] = {**text["rope_scaling"], "rope_theta": text["rope_theta"]}


@pytest.mark.parametrize(
    "edit",
    [
        move_quantisation,
        to_rope_parameters,
        both_rope_forms,
        lambda text: text.update(rope_theta=50000, model_type="deepseek_v3"),
        lambda text: text["outer"].update(architectures=None),
        lambda text: (text.pop("dtype"), text.update(torch_dtype="bfloat16")),
        lambda text: [text.pop(name) for name in ("scoring_func", "topk_method", "moe_layer_freq", "attention_bias")],
    ],
)
def test_target_layouts_that_mean_the_same(tmp_path: Path, edit: Edit) -> None:
    assert target(tmp_path, edit) == target_config(micro_target())


def test_text_only_target(tmp_path: Path) -> None:
    text = read_json(micro_target() / "config.json")["text_config"]
    config = target_config(write(tmp_path, text))
    assert not config.has_vision
    assert config.rope == target_config(micro_target()).rope


def test_target_values_that_follow_the_file(tmp_path: Path) -> None:
    plain = target(tmp_path, lambda text: text.pop("rope_scaling"))
    assert plain.rope == Rope(32, 50000.0) and plain.softmax_scale == 64**-0.5
    unequal = target(tmp_path, lambda text: text["rope_scaling"].update(mscale=0.707))
    factor = 0.1 * math.log(64.0) + 1
    assert math.isclose(unequal.rope.amplitude, (0.0707 * math.log(64.0) + 1) / factor)
    assert math.isclose(unequal.softmax_scale, 64**-0.5 * factor**2)
    old = target(tmp_path, lambda text: text["rope_scaling"].update(beta_fast=1, factor=32))
    assert (old.rope.beta_fast, old.rope.factor) == (1.0, 32.0)
    several = target(
        tmp_path, lambda text: (text["outer"].update(eos_token_id=[1026, 1025]), text.update(eos_token_id=7))
    )
    assert several.eos_token_ids == (7, 1025, 1026)


# --- target: refused by name

REQUIRED = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "first_k_dense_replace",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "norm_topk_prob",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "hidden_act",
    "n_group",
    "topk_group",
]


@pytest.mark.parametrize("name", REQUIRED)
def test_target_fields_that_must_be_there(tmp_path: Path, name: str) -> None:
    refused(lambda: target(tmp_path, lambda text: text.pop(name)), name, "is missing, but")
    refused(lambda: target(tmp_path, lambda text: text.update({name: "x"})), name, "is 'x', but")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"hidden_act": "gelu"}, ["'text_config.hidden_act' is 'gelu', but the expert kernel needs 'silu'"]),
        ({"scoring_func": "softmax"}, ["'softmax', but the router needs 'sigmoid'"]),
        ({"topk_method": "greedy"}, ["'greedy', but the router needs 'noaux_tc'"]),
        ({"n_group": 8}, ["n_group' is 8, but the router (one group of experts) needs 1"]),
        ({"n_group": True}, ["n_group' is True, but the router"]),
        ({"attention_bias": 0}, ["attention_bias' is 0, but the attention needs False"]),
        ({"topk_group": 4}, ["topk_group' is 4, but the router"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq' is 2, but the layer loop needs 1"]),
        ({"attention_bias": True}, ["attention_bias' is True, but the attention needs False"]),
        ({"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers' is 1, but the layer loop"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings' is True, but Kimi K2.6, which has a head of its own"]),
        ({"dtype": "float16"}, ["'text_config.dtype' is 'float16', but must be 'bfloat16'"]),
        ({"torch_dtype": 3}, ["torch_dtype' is 3, but must be 'bfloat16'"]),
        ({"first_k_dense_replace": 6}, ["first_k_dense_replace' is 6, but must be at least 0 and below", "layers 6"]),
        ({"first_k_dense_replace": -1}, ["first_k_dense_replace' is -1, but must be at least 0"]),
        ({"hidden_size": 0}, ["hidden_size' is 0, but must be above 0"]),
        ({"hidden_size": 96}, ["hidden_size' is 96, but must be a multiple of 64"]),
        ({"moe_intermediate_size": 32}, ["moe_intermediate_size' is 32, but must be a multiple of 64"]),
        ({"num_experts_per_tok": 17}, ["num_experts_per_tok' is 17, above n_routed_experts 16"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps' is -1.0, but must be above 0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps' is nan, but must be a number"]),
        ({"vocab_size": True}, ["vocab_size' is True, but must be an integer"]),
        ({"vocab_size": 1280.0}, ["vocab_size' is 1280.0, but must be an integer"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob' is 1, but must be true or false"]),
        ({"qk_rope_head_dim": 31}, ["31 rotary dimensions, but they must come in pairs"]),
        ({"eos_token_id": 5000}, ["eos_token_id' is 5000, but must be token ids below vocab_size 1280"]),
        ({"eos_token_id": ["a"]}, ["eos_token_id' is ['a'], but must be token ids"]),
        ({"model_type": "llama"}, ["text model_type 'llama'", "is not known; give a Kimi K2.6 checkpoint"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["'linear', but must be 'yarn' or 'default'"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling' is 'yarn', but must be an object"]),
        ({"rope_scaling": {"factor": 64.0}}, ["'text_config.rope_scaling.rope_type' is missing, but the scaling"]),
        ({"rope_scaling": {"type": "yarn"}}, ["rope_scaling.factor' is missing, but the model cannot be built"]),
        (
            {"rope_scaling": {"type": "default", "factor": 64.0}},
            ["factor' is 64.0, which has no meaning for rope type"],
        ),
        ({"rope_scaling": {**YARN, "rope_type": "default"}}, ["type' is 'yarn', but field", "rope_type' is 'default'"]),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, ["factor' is 0.5, but must be at least 1"]),
        ({"rope_scaling": {**YARN, "truncate": False}}, ["truncate' is False, but the YaRN ramp"]),
        ({"rope_scaling": {**YARN, "extrapolation_factor": 2}}, ["extrapolation_factor' is 2, which is not known"]),
        (
            {"rope_scaling": {**YARN, "rope_theta": 1e4}},
            ["rope_theta' is 10000.0, but field", "is 50000.0; keep the right"],
        ),
        ({"rope_parameters": {**YARN, "factor": 8.0}}, ["rope_scaling' is", "but field 'rope_parameters' is"]),
        ({"rope_parameters": {"full_attention": {}}}, ["full_attention' is {}, but one rotation for all layers"]),
        ({"rope_theta": 0}, ["rope_theta' is 0, but must be above 0"]),
        (
            {"quantization_config": None},
            ["no quantization_config, neither at the top nor in text_config; give the INT4"],
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quant_method' is 'fp8', but the expert kernel needs"]),
        ({"quantization_config": []}, ["quantization_config' is [], but must be an object"]),
    ],
)
def test_target_values_that_are_refused(tmp_path: Path, change: dict[str, Any], parts: list[str]) -> None:
    refused(lambda: target(tmp_path, lambda text: text.update(change)), *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, ["['Qwen3ForCausalLM'] (model_type 'qwen3'"]),
        ({"architectures": "Kimi"}, ["architectures' is 'Kimi', but must be a list"]),
        ({"text_config": 3}, ["text_config' is 3, but must be an object"]),
        ({"tie_word_embeddings": True}, ["'tie_word_embeddings' is True, but Kimi K2.6"]),
        ({"dtype": "float32"}, ["'dtype' is 'float32', but must be 'bfloat16'"]),
        ({"quantization_config": {"quant_method": "modelopt"}}, ["'quantization_config.quant_method' is 'modelopt'"]),
    ],
)
def test_outer_values_that_are_refused(tmp_path: Path, change: dict[str, Any], parts: list[str]) -> None:
    refused(lambda: target(tmp_path, lambda text: text["outer"].update(change)), *parts)


def test_no_stop_token_is_refused(tmp_path: Path) -> None:
    def drop(text: dict[str, Any]) -> None:
        del text["eos_token_id"], text["outer"]["eos_token_id"]

    refused(lambda: target(tmp_path, drop), "'eos_token_id' is missing, but generation could not stop")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_bits", 8), ("type", "float"), ("symmetric", False), ("strategy", "channel"), ("group_size", 128),
     ("group_size", None), ("dynamic", True), ("actorder", "group")],
)  # fmt: skip
def test_other_packings_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    def change(text: dict[str, Any]) -> None:
        text["quantization_config"]["config_groups"]["group_0"]["weights"][name] = value

    found = "is missing" if value is None else f"is {value!r}"
    label = f"'text_config.quantization_config.config_groups.group_0.weights.{name}'"
    refused(lambda: target(tmp_path, change), f"{label} {found}, but the expert kernel needs")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"format": "int-quantized"}, "format' is 'int-quantized', but the expert kernel needs 'pack-quantized'"),
        ({"config_groups": {}}, "config_groups' is {}, but must describe the packed experts"),
        ({"quantization_status": "frozen"}, "quantization_status' is 'frozen', but the loader needs 'compressed'"),
    ],
)
def test_other_quantisations_are_refused(tmp_path: Path, change: dict[str, Any], part: str) -> None:
    refused(lambda: target(tmp_path, lambda text: text["quantization_config"].update(change)), part)


def test_quantised_activations_are_refused(tmp_path: Path) -> None:
    def change(text: dict[str, Any]) -> None:
        text["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}

    refused(lambda: target(tmp_path, change), "input_activations' is {'num_bits': 8}, but the expert kernel needs")


# --- drafter: honoured


def nested(**values: Any) -> Edit:
    """Changes inside dflash_config; None removes."""

    def edit(config: dict[str, Any]) -> None:
        for name, value in values.items():
            config["dflash_config"][name] = value

    return edit


def top(**values: Any) -> Edit:
    """Changes at the top; None counts as absent."""
    return lambda config: config.update(values)


def in_nested_block_size(config: dict[str, Any]) -> None:
    config["dflash_config"]["block_size"] = config.pop("block_size")


@pytest.mark.parametrize(
    "edit",
    [
        to_rope_parameters,
        in_nested_block_size,
        nested(block_size=8, num_target_layers=6, mask_token="<|MASK|>", attention_mode="gqa", causal=False),
        nested(projector_type=None, markov_rank=0, shift_label=False, pure_draft_prefix_len=0, output_multiplier=1.0),
        top(layer_types=None, use_sliding_window=None, sliding_window=None),
        top(layer_types=None, use_sliding_window=False, sliding_window=4096),
        top(use_sliding_window=True, sliding_window=4096),  # layer_types says full
        top(tie_word_embeddings=True, draft_vocab_size=1280, target_hidden_size=256, partial_rotary_factor=1.0),
        top(dtype="float32", is_causal=False, attention_value_scale=1),
    ],
)
def test_drafter_layouts_that_mean_the_same(tmp_path: Path, edit: Edit) -> None:
    assert drafter(tmp_path, edit) == dflash_config(micro_drafter())


SLIDING = top(layer_types=["sliding_attention"] * 2 + ["full_attention"], sliding_window=16, use_sliding_window=True)
DERIVED = top(layer_types=None, sliding_window=16, use_sliding_window=True, max_window_layers=2)


def both(*edits: Edit) -> Edit:
    """One edit after the other."""
    return lambda config: [edit(config) for edit in edits]


@pytest.mark.parametrize(
    ("edit", "switches", "windows", "causal"),
    [
        (SLIDING, {}, (16, 16, None), (True, True, False)),
        (SLIDING, {"window_offset": -1}, (15, 15, None), (True, True, False)),
        (SLIDING, {"causal_in_window": False}, (16, 16, None), (False, False, False)),
        (DERIVED, {}, (None, None, 16), (False, False, True)),
        (both(SLIDING, top(is_causal=False)), {}, (16, 16, None), (False, False, False)),
        (both(SLIDING, nested(causal=True)), {}, (16, 16, None), (True, True, True)),
        (both(SLIDING, nested(is_causal=False)), {"causal_in_window": True}, (16, 16, None), (True, True, False)),
        (both(SLIDING, nested(causal=True)), {"causal_in_window": False}, (16, 16, None), (False, False, True)),
        (top(causal=True), {}, (None,) * 3, (True,) * 3),
        (both(top(causal=False), nested(is_causal=False)), {}, (None,) * 3, (False,) * 3),
    ],
)
def test_windows_and_causality(tmp_path: Path, edit: Edit, switches, windows, causal) -> None:
    config = drafter(tmp_path, edit, **switches)
    assert (config.windows, config.causal) == (windows, causal)


def test_drafter_switches_and_rope(tmp_path: Path) -> None:
    production = 0.1 * math.log(64) + 1
    assert drafter(tmp_path, top(), rope_amplitude=production).rope.amplitude == production
    assert drafter(tmp_path, top(), tap_offset=1).target_layer_ids == (2, 3, 4)
    assert drafter(tmp_path, nested(final_logit_softcapping=30)).final_logit_softcapping == 30.0
    assert drafter(tmp_path, top(final_logit_softcapping=20.0)).final_logit_softcapping == 20.0
    plain = drafter(tmp_path, top(rope_scaling=None), rope_amplitude=1.5)
    assert plain.rope == Rope(64, 50000.0, amplitude=1.5)
    factor = drafter(tmp_path, lambda config: config["rope_scaling"].update(attention_factor=1.25))
    assert factor.rope.amplitude == 1.25
    no_all_dim = drafter(tmp_path, lambda config: config["rope_scaling"].pop("mscale_all_dim"))
    assert math.isclose(no_all_dim.rope.amplitude, production)


def test_published_drafter_layout(tmp_path: Path) -> None:
    """Facts of z-lab's Kimi drafter: 6 layers, block 8, taps 1 to 58 of 61."""
    change = {
        "num_hidden_layers": 6,
        "num_target_layers": 61,
        "vocab_size": 163840,
        "layer_types": ["full_attention"] * 6,
        "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    }
    config = drafter(tmp_path, top(**change))
    assert (config.target_layer_ids, config.mask_token_id) == ((1, 12, 24, 35, 47, 58), 163838)


# --- drafter: refused by name


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
     "num_key_value_heads", "head_dim", "rms_norm_eps", "num_target_layers", "rope_theta", "hidden_act", "block_size"],
)  # fmt: skip
def test_drafter_fields_that_must_be_there(tmp_path: Path, name: str) -> None:
    refused(lambda: drafter(tmp_path, lambda config: config.pop(name)), name, "is missing, but")
    refused(lambda: drafter(tmp_path, top(**{name: "x"})), name, "is 'x', but")


@pytest.mark.parametrize("name", sorted(VARIANT_FIELDS))
def test_variants_are_refused_by_name(tmp_path: Path, name: str) -> None:
    meaning = f"({VARIANT_FIELDS[name]}), but only DFlash v1 is supported; give a v1 drafter"
    refused(lambda: drafter(tmp_path, nested(**{name: 16})), f"'dflash_config.{name}' is 16, {meaning}")
    refused(lambda: drafter(tmp_path, top(**{name: 16})), f"'{name}' is 16, {meaning}")


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (top(architectures=["DFlash2DraftModel"]), ["architecture is ['DFlash2DraftModel'], but only", "(DFlash v1)"]),
        (top(architectures=["DSparkDraftModel"]), ["architecture is ['DSparkDraftModel']"]),
        (top(architectures=None), ["architecture is [], but only"]),
        (top(model_type="llama"), ["model_type' is 'llama', but the drafter needs 'qwen3'"]),
        (top(hidden_act="gelu"), ["hidden_act' is 'gelu', but the drafter needs 'silu'"]),
        (top(attention_bias=True), ["attention_bias' is True, but the drafter needs False"]),
        (top(dtype="float16"), ["dtype' is 'float16', but must be 'bfloat16' or 'float32'"]),
        (top(output_multiplier=0.2), ["output_multiplier' is 0.2, but a drafter made for Kimi needs 1.0"]),
        (nested(input_embedding_scale=16.0), ["'dflash_config.input_embedding_scale' is 16.0, but a drafter made for"]),
        (nested(attention_value_scale=0.5), ["attention_value_scale' is 0.5"]),
        (nested(attention_mode="mla"), ["attention_mode' is 'mla', but only grouped-query attention"]),
        (nested(wings=2), ["'dflash_config.wings' is 2, which is not known; remove it"]),
        (top(dflash_config=None), ["'dflash_config.mask_token_id' is missing"]),
        (top(dflash_config=[]), ["dflash_config' is [], but must be an object"]),
        (nested(target_layer_ids=None), ["'dflash_config.target_layer_ids' is missing, but the model cannot be built"]),
        (nested(target_layer_ids=[]), ["target_layer_ids' is [], but must be ascending layer numbers"]),
        (nested(target_layer_ids=[2, 1]), ["target_layer_ids' is [2, 1], but must be ascending"]),
        (nested(target_layer_ids=[1, 1]), ["target_layer_ids' is [1, 1], but must be ascending"]),
        (nested(target_layer_ids=["1"]), ["target_layer_ids' is ['1'], but must be ascending"]),
        (nested(target_layer_ids=[-1, 2]), ["target_layer_ids' is [-1, 2], but must be from 0 to 4"]),
        (nested(target_layer_ids=[1, 5]), ["target_layer_ids' is [1, 5], but must be from 0 to 4 (the last layer"]),
        (nested(mask_token_id=None), ["'dflash_config.mask_token_id' is missing, but the block", "add the id"]),
        (
            nested(mask_token_id=None, mask_token="<|MASK|>"),
            ["mask_token_id' is missing", "add the id (of '<|MASK|>')"],
        ),
        (nested(mask_token_id=1280), ["mask_token_id' is 1280, but must be at least 0 and below vocab_size 1280"]),
        (nested(mask_token_id="7"), ["mask_token_id' is '7', but must be an integer"]),
        (
            top(mask_token_id=5),
            ["'mask_token_id' is 5, but field 'dflash_config.mask_token_id' is 1278; keep the right"],
        ),
        (nested(block_size=7), ["'block_size' is 8, but field 'dflash_config.block_size' is 7; keep the right one"]),
        (top(block_size=1), ["block_size' is 1, but must be at least 2, the anchor and one draft"]),
        (nested(num_target_layers=7), ["num_target_layers' is 7, but field 'num_target_layers' is 6"]),
        (
            top(draft_vocab_size=640),
            ["draft_vocab_size' is 640, but a drafter that shares the target's head needs 1280"],
        ),
        (top(target_hidden_size=512), ["target_hidden_size' is 512, but a drafter that shares"]),
        (top(num_attention_heads=5), ["num_attention_heads' is 5, but must be a multiple of num_key_value_heads 2"]),
        (
            top(partial_rotary_factor=0.5),
            ["partial_rotary_factor' is 0.5, but a rotation over all dimensions needs 1.0"],
        ),
        (top(final_logit_softcapping=0.0), ["final_logit_softcapping' is 0.0, but must be above 0"]),
        (
            top(layer_types=["full_attention"]),
            ["layer_types' is ['full_attention'], but must name", "each of 3 layers"],
        ),
        (top(layer_types=["linear_attention"] * 3), ["layer_types' is ['linear_attention'"]),
        (top(layer_types=[["full_attention"]] * 3), ["layer_types' is [['full_attention']"]),
        (both(SLIDING, top(use_sliding_window=False)), ["use_sliding_window' is False, but layer_types names sliding"]),
        (both(SLIDING, top(sliding_window=None)), ["sliding_window' is missing"]),
        (both(SLIDING, top(sliding_window=0)), ["sliding_window' is 0, but must be above 0"]),
        (both(DERIVED, top(max_window_layers=None)), ["max_window_layers' is missing"]),
        (both(DERIVED, top(use_sliding_window=None)), ["sliding_window' is 16, but neither layer_types nor"]),
        (top(use_sliding_window="yes"), ["use_sliding_window' is 'yes', but must be true or false"]),
        (top(is_causal="no"), ["is_causal' is 'no', but must be true or false"]),
        (both(top(is_causal=True), nested(causal=False)), ["'dflash_config.causal': False", "contradict each other"]),
        (
            lambda config: config["rope_scaling"].update(type="linear", rope_type="linear"),
            ["'linear', but must be 'yarn'"],
        ),
        (top(rope_theta=None), ["rope_theta' is missing, but the model cannot be built"]),
    ],
)
def test_drafter_values_that_are_refused(tmp_path: Path, edit: Edit, parts: list[str]) -> None:
    refused(lambda: drafter(tmp_path, edit), *parts)


def test_switches_that_leave_the_range_are_refused(tmp_path: Path) -> None:
    refused(lambda: drafter(tmp_path, top(), tap_offset=2), "but with tap_offset 2 must be from 0 to 4")
    refused(lambda: drafter(tmp_path, top(), tap_offset=-2), "but with tap_offset -2 must be from 0 to 4")
    refused(lambda: drafter(tmp_path, SLIDING, window_offset=-16), "but with window_offset -16 must be above 0")


def test_mask_embedding_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"mask_embedding\.pt: a mask embedding of its own, but only DFlash v1"):
        drafter(tmp_path, top())


@pytest.mark.parametrize("name", ["num_target_layers", "hidden_size", "vocab_size"])
def test_pair_that_does_not_fit(tmp_path: Path, name: str) -> None:
    ours = drafter(tmp_path, lambda config: config.update({name: config[name] * 2}))
    with pytest.raises(UserError) as caught:
        check_pair(target_config(micro_target()), ours)
    values = f"its {name} is {getattr(ours, name)}, the target has {getattr(ours, name) // 2}"
    assert values in str(caught.value) and "give the drafter that was trained with this target" in str(caught.value)
