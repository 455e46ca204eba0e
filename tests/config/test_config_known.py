"""Every field of a config.json is read, known to change nothing, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import micro_drafter, micro_target, official_dir
from test_config import drafter, nested, refused, target, top, write

from jddtree.config import dflash_config, read_json, target_config
from jddtree.config.known_fields import FIXED, NEUTRAL

UNKNOWN = "which is not known; remove it if it does not change the result"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave' is False, but the loader, which takes rotary rows"),
        ({"mlp_bias": True}, "mlp_bias' is True, but the feed-forward blocks needs False"),
        ({"head_dim": 128}, "head_dim' is 128, but a rotation of qk_rope_head_dim dimensions needs 32"),
        (
            {"qk_head_dim": 32},
            "qk_head_dim' is 32, but a key of qk_nope_head_dim and qk_rope_head_dim needs 64",
        ),
        ({"num_local_experts": 8}, "num_local_experts' is 8, but a router over n_routed_experts needs 16"),
        ({"sliding_window": 4096}, f"sliding_window' is 4096, {UNKNOWN}"),
        ({"use_qk_norm": False}, f"use_qk_norm' is False, {UNKNOWN}"),
        ({"attn_logit_softcapping": 50.0}, f"attn_logit_softcapping' is 50.0, {UNKNOWN}"),
        ({"swiglu_limit": 7.0}, f"swiglu_limit' is 7.0, {UNKNOWN}"),
        ({"index_topk": 2048}, f"index_topk' is 2048, {UNKNOWN}"),
        (
            {"repetition_penalty": 1.1},
            "repetition_penalty' is 1.1, but this project, which decodes token by token,",
        ),
        ({"num_beams": 4}, "num_beams' is 4, but this project"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads' is {'0': [1]}, but this project"),
        ({"suppress_tokens": [7]}, f"suppress_tokens' is [7], {UNKNOWN}"),
        ({"rope_theta": 1.0}, "rope_theta' is 1.0, but must be above 1"),
        ({"rms_norm_eps": 1e-45}, "rms_norm_eps' is 1e-45, but must be 0 or from 1.2e-38"),
        ({"routed_scaling_factor": 10**299}, "routed_scaling_factor' is 1"),
        (
            {"max_position_embeddings": 2**31},
            "max_position_embeddings' is 2147483648, but must be at most 2147483647",
        ),
        ({"num_hidden_layers": 2000}, "num_hidden_layers' is 2000, but must be at most 1024"),
        ({"n_routed_experts": 10**6}, "n_routed_experts' is 1000000, but must be at most 21845"),
        ({"text_config": {}}, f"text_config' is {{}}, {UNKNOWN}"),
    ],
)
def test_target_fields_that_would_change_the_result(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    refused(lambda: target(tmp_path, lambda text: text.update(change)), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden_size": 512},
            "field 'hidden_size' is 512, but field 'text_config.hidden_size' is 256; keep",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6}},
            "but field 'text_config.rope_parameters' is missing; keep",
        ),
        (
            {"rope_interleave": False},
            "field 'rope_interleave' is False, but field 'text_config.rope_inter",
        ),
        ({"logit_scale": 0.1}, f"'logit_scale' is 0.1, {UNKNOWN}"),
    ],
)
def test_fields_beside_text_config(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    refused(lambda: target(tmp_path, lambda text: text["outer"].update(change)), message)


def edit_quantisation(text: dict[str, Any], place: str, change: dict[str, Any]) -> None:
    """Change quantization_config itself, its group or the group's weights."""
    config = text["quantization_config"]
    group = config["config_groups"]["group_0"]
    {"config": config, "group": group, "weights": group["weights"]}[place].update(change)


ROTATION = {
    "config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}
}


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (
            "config",
            {"transform_config": ROTATION},
            "but the model here has no transforms of weights or activations",
        ),
        (
            "config",
            {"transform_config": {"type": "hadamard"}},
            "transform_config' is {'type': 'hadamard'}, but the",
        ),
        ("config", {"transform_config": [1]}, "transform_config' is [1], but must be an object"),
        (
            "config",
            {"kv_cache_scheme": {"num_bits": 8}},
            "kv_cache_scheme' is {'num_bits': 8}, but the cache here",
        ),
        (
            "config",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format' is 'sparse-24-bitm",
        ),
        (
            "config",
            {"sparsity_config": {"targets": ["Linear"]}},
            "sparsity_config.format' is missing, but the loader",
        ),
        (
            "config",
            {"smoothing": 0.5},
            "smoothing' is 0.5, which is not known; remove it if it does not change",
        ),
        (
            "group",
            {"format": "int-quantized"},
            "group_0.format' is 'int-quantized', but the expert kernel needs 'pack",
        ),
        (
            "group",
            {"output_activations": {"num_bits": 8}},
            "output_activations' is {'num_bits': 8}, but the expert",
        ),
        ("group", {"rotation": "hadamard"}, "group_0.rotation' is 'hadamard', which is not known"),
        (
            "weights",
            {"block_structure": [128, 128]},
            "block_structure' is [128, 128], but the expert kernel needs",
        ),
        ("weights", {"packed_dim": 0}, "weights.packed_dim' is 0, which is not known"),
        ("weights", {"dynamic": "local"}, "weights.dynamic' is 'local', but the expert kernel needs False"),
    ],
)
def test_quantisations_that_would_be_another_model(
    tmp_path: Path, place: str, change: Any, message: str
) -> None:
    refused(lambda: target(tmp_path, lambda text: edit_quantisation(text, place, change)), message)


def test_a_second_group_of_another_format_is_refused(tmp_path: Path) -> None:
    def add(text: dict[str, Any]) -> None:
        groups = text["quantization_config"]["config_groups"]
        groups["group_1"] = groups["group_0"] | {"format": "float-quantized"}

    refused(
        lambda: target(tmp_path, add),
        "config_groups.group_1.format' is 'float-quantized', but the expert kernel",
    )


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (
            "config",
            {
                "transform_config": {},
                "sparsity_config": {},
                "version": "0.12.2",
                "global_compression_ratio": 2.0,
            },
        ),
        ("config", {"transform_config": {"config_groups": {}}, "sparsity_config": {"format": "dense"}}),
        ("group", {"format": "pack-quantized"}),
        ("weights", {"scale_dtype": None, "zp_dtype": "torch.int8"}),
    ],
)
def test_what_newer_libraries_write_for_the_same_weights(
    tmp_path: Path, place: str, change: dict[str, Any]
) -> None:
    edit = lambda text: edit_quantisation(text, place, change)
    assert target(tmp_path, edit) == target_config(micro_target())


def test_fields_that_say_the_same_again(tmp_path: Path) -> None:
    same = {
        "rope_interleave": True,
        "mlp_bias": False,
        "head_dim": 32,
        "qk_head_dim": 64,
        "num_local_experts": 16,
    }
    same |= {name: "x" for name in NEUTRAL - {"architectures", "model_type", "vision_config"}} | dict(FIXED)
    assert target(tmp_path, lambda text: text.update(same)) == target_config(micro_target())
    outer = {"hidden_size": 256, "rope_theta": 50000.0, "torch_dtype": "bfloat16"}
    assert target(tmp_path, lambda text: text["outer"].update(outer)) == target_config(micro_target())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            top(rope_interleave=True),
            "rope_interleave' is True, but the drafter, which rotates in half-split order,",
        ),
        (top(mlp_bias=True), "mlp_bias' is True, but the drafter needs False"),
        (top(logit_scale=0.5), f"logit_scale' is 0.5, {UNKNOWN}"),
        (top(use_qk_norm=False), f"use_qk_norm' is False, {UNKNOWN}"),
        (top(attention_chunk_size=64), f"attention_chunk_size' is 64, {UNKNOWN}"),
        (
            top(target_layer_ids=[0, 1, 2]),
            "target_layer_ids' is [0, 1, 2], but field 'dflash_config.target_layer_ids'",
        ),
        (top(block_size=4096), "block_size' is 4096, but must be at most 128"),
        (top(num_hidden_layers=10**6), "num_hidden_layers' is 1000000, but must be at most 1024"),
        (nested(use_aux_hidden_state=False), f"'dflash_config.use_aux_hidden_state' is False, {UNKNOWN}"),
        (
            lambda config: config["rope_scaling"].update(mscale=-1.0),
            "mscale' is -1.0, but must be at least 0",
        ),
    ],
)
def test_drafter_fields_that_would_change_the_result(tmp_path: Path, edit, message: str) -> None:
    refused(lambda: drafter(tmp_path, edit), message)


def test_drafter_fields_that_say_the_same_again(tmp_path: Path) -> None:
    same = top(rope_interleave=False, mlp_bias=False, target_layer_ids=[1, 2, 3], **FIXED)
    assert drafter(tmp_path, same) == dflash_config(micro_drafter())


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    refused(
        lambda: target(tmp_path, lambda text: text.update(hidden_act="x" * 10**6)),
        "xxx..., but the expert kernel",
    )


@pytest.mark.skipif(official_dir() is None, reason="the official config.json is not here")
def test_the_published_fields_are_known(tmp_path: Path) -> None:
    values = read_json(official_dir() / "config.json")
    assert target_config(write(tmp_path, values)).vocab_size == 163840
    text = values["text_config"] | {"quantization_config": values["text_config"]["quantization_config"]}
    assert target_config(write(tmp_path, json.loads(json.dumps(text)))).num_moe_layers == 60
