"""Random checkpoints in the exact Hugging Face layout, of any size: a target with INT4 experts, and its DFlash drafter.

For tests and measurements where the published weights are too large. Configuration, names, shapes and types are those
of Kimi K2.6 and of z-lab's drafters; weights are random, so the text is noise, but every number is one that a model may
have. Memory stays at a few chunks. From a shell: python -m converters.synthetic --help
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from converters.checkpoint import Progress
from converters.dflash import expected_tensors as drafter_tensors
from converters.kimi import PREFIX, expected_tensors
from converters.random_tensors import Tensor, write_shards
from jddtree.config import DFlashConfig, TargetConfig, dflash_config, read_json, target_config
from jddtree.errors import UserError

COPIED = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "micro": {},
    "k2.6": {  # the published text_config, where it differs from the bundled one
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
}


def write_checkpoint(
    directory: Path,
    config: TargetConfig | Mapping[str, Any],
    seed: int = 0,
    *,
    shards: int = 4,
    preset: str = "micro",
    base: Path | None = None,
    tokenizer: Path | None = None,
    vision: bool = False,
    progress: Progress | None = None,
) -> TargetConfig:
    """Write a random target checkpoint into a new or empty folder and return its configuration.

    config: values of text_config that replace those of the preset ("micro" or "k2.6") or of the folder `base`; of a
    TargetConfig those that text_config has. shards: files of about equal size. tokenizer: folder of the tokenizer,
    chat template and generation_config.json; None takes those of `base`, else the bundled ones. vision: also write a
    vision tower and projector, which text models skip.
    Raises UserError for a folder that is not empty, a preset that does not exist and values that make no model.
    """
    directory = _new_folder(directory)
    values = _write_config(directory, preset, config, base or _bundled("target"))
    _copy_tokenizer(tokenizer or base or _bundled("target"), directory)
    made = target_config(directory)
    tensors = target_list(made) + (vision_list(values["vision_config"], made) if vision else [])
    write_shards(directory, tensors, seed, shards, progress)
    return made


def preset_config(preset: str, values: Mapping[str, Any]) -> TargetConfig:
    """The configuration that `write_checkpoint` would write, with `values` of text_config replaced; no file is kept."""
    with tempfile.TemporaryDirectory() as folder:
        _write_config(Path(folder), preset, values, _bundled("target"))
        return target_config(Path(folder))


def write_drafter(
    directory: Path,
    target: TargetConfig,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    shards: int = 1,
    progress: Progress | None = None,
) -> DFlashConfig:
    """Write a random DFlash (v1) drafter for a target into a new or empty folder and return its configuration.

    config: values that replace those of the bundled drafter's config.json; `target_layer_ids` and `mask_token_id` too.
    Hidden size, vocabulary and number of target layers are the target's; by default three of its layers are tapped.
    Raises UserError for a folder that is not empty and values that make no drafter.
    """
    directory, given = _new_folder(directory), dict(config or {})
    values = read_json(_bundled("drafter") / "config.json")
    nested = values["dflash_config"]
    nested["target_layer_ids"] = given.pop("target_layer_ids", _taps(target.num_hidden_layers))
    nested["mask_token_id"] = given.pop("mask_token_id", nested["mask_token_id"])
    values["hidden_size"], values["vocab_size"] = target.hidden_size, target.vocab_size
    values["num_target_layers"] = target.num_hidden_layers
    values |= given
    layers = values["num_hidden_layers"]
    values |= {"layer_types": ["full_attention"] * layers, "max_window_layers": layers}
    _write_json(directory / "config.json", values)
    made = dflash_config(directory)
    tensors = [Tensor(name, dtype, shape) for name, (dtype, shape) in sorted(drafter_tensors(made).items())]
    write_shards(directory, tensors, seed, shards, progress)
    return made


def target_list(config: TargetConfig) -> list[Tensor]:
    """Text tensors in the order of the published files: layers first, inside them by name."""
    expected = expected_tensors(config)
    layers: dict[str, list[str]] = {}
    for name in sorted(expected):
        parts = name.split(".")
        layers.setdefault(parts[2] if parts[1] == "layers" else "", []).append(name)
    order = [*sorted((layer for layer in layers if layer), key=int), ""]
    return [_text_tensor(name, expected) for layer in order for name in layers[layer]]


def vision_list(values: Mapping[str, Any], config: TargetConfig) -> list[Tensor]:
    """Tensors of vision tower and projector (facts: the published index), all bfloat16."""
    width, inner, patch = values["vt_hidden_size"], values["vt_intermediate_size"], values["patch_size"]
    merged = values["mm_hidden_size"] * values["merge_kernel_size"][0] * values["merge_kernel_size"][1]
    weights: dict[str, tuple[int, ...]] = {}
    for layer in range(values["vt_num_hidden_layers"]):
        start = f"vision_tower.encoder.blocks.{layer}."
        weights |= {f"{start}{norm}": (width,) for norm in ("norm0", "norm1")}
        weights |= {f"{start}wqkv": (3 * width, width), f"{start}wo": (width, width)}
        weights |= {f"{start}mlp.fc0": (inner, width), f"{start}mlp.fc1": (width, inner)}
    weights |= {"vision_tower.encoder.final_layernorm": (width,), "mm_projector.pre_norm": (values["mm_hidden_size"],)}
    weights |= {"mm_projector.proj.0": (merged, merged), "mm_projector.proj.2": (config.hidden_size, merged)}
    weights |= {"vision_tower.patch_embed.proj": (width, 3, patch, patch)}
    shapes = {f"{name}.weight": shape for name, shape in weights.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in weights.items()}
    position = (values["init_pos_emb_height"], values["init_pos_emb_width"], width)
    shapes["vision_tower.patch_embed.pos_emb.weight"] = position
    return [Tensor(name, "BF16", shape) for name, shape in sorted(shapes.items())]


def _text_tensor(name: str, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> Tensor:
    dtype, shape = expected[name]
    given: tuple[int, ...] = ()
    if name.endswith("weight_shape"):
        rows, words = expected[name.removesuffix("shape") + "packed"][1]
        given = (rows, words * 8)
    return Tensor(PREFIX + name, dtype, shape, given)


def _taps(layers: int) -> list[int]:
    """Up to three layers, spread over all but the last one."""
    last = layers - 2
    return sorted({0, last // 2, last})


def _new_folder(directory: Path) -> Path:
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is no empty folder; give a new one")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _write_config(directory: Path, preset: str, config: TargetConfig | Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Write config.json and return its values"""
    if preset not in PRESETS:
        raise UserError(f"preset is {preset!r}, but must be one of {', '.join(PRESETS)}")
    values = read_json(base / "config.json")
    text = values["text_config"]
    if isinstance(config, TargetConfig):
        config = {item.name: getattr(config, item.name) for item in fields(config) if item.name in text}
    text |= {**PRESETS[preset], **config}
    _write_json(directory / "config.json", values)
    return values


def _copy_tokenizer(source: Path, directory: Path) -> None:
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _bundled(part: str) -> Path:
    return Path(str(files("jddtree") / "assets" / "micro" / part))


def _assignments(texts: list[str]) -> dict[str, Any]:
    """["hidden_size=512", ...] to values; what is not JSON is a text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise UserError(f"--set {text!r} must be like hidden_size=512")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m converters.synthetic", description="Write a random checkpoint in the Hugging Face layout."
    )
    parser.add_argument("out", type=Path, help="folder of the target, new or empty")
    parser.add_argument("--preset", choices=PRESETS, default="micro", help="sizes to start from")
    parser.add_argument("--base", type=Path, help="folder with the config.json to start from")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="replace a value of text_config"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer; default: the bundled one")
    parser.add_argument("--vision", action="store_true", help="also write a vision tower and projector")
    parser.add_argument("--drafter", type=Path, help="also write a drafter for it into this folder")
    parser.add_argument(
        "--set-drafter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="the same for the drafter",
    )
    given = parser.parse_args(arguments)
    try:
        made = write_checkpoint(
            given.out, _assignments(given.set), given.seed, shards=given.shards, preset=given.preset, base=given.base,
            tokenizer=given.tokenizer, vision=given.vision,
        )  # fmt: skip
        if given.drafter is not None:
            write_drafter(given.drafter, made, _assignments(given.set_drafter), given.seed)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
