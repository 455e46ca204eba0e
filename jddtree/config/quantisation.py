"""Which quantisation a target may declare: INT4 experts as `compressed-tensors` packs them, and nothing
beside them.

Source of the names: `QuantizationConfig`, `QuantizationScheme` and `QuantizationArgs` of compressed-tensors.
Which tensors are packed is not taken from here but from the checkpoint: exactly the routed experts must be.
"""

from jddtree.config.fields import Fields
from jddtree.errors import UserError

GROUP_SIZE = 32
PACKING = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE}
FORMAT = "pack-quantized"
KERNEL = "the expert kernel"
CONFIG_FIELDS = (
    "quant_method",
    "format",
    "quantization_status",
    "config_groups",
    "ignore",
    "kv_cache_scheme",
    "sparsity_config",
    "transform_config",
    "global_compression_ratio",
    "version",
)
GROUP_FIELDS = ("targets", "weights", "input_activations", "output_activations", "format")
WEIGHT_FIELDS = (
    *PACKING,
    "dynamic",
    "actorder",
    "block_structure",
    "observer",  # it and its arguments: how scales were found
    "observer_kwargs",
    "scale_dtype",  # of the tensors, which the loader compares
    "zp_dtype",  # of zero points, of which a symmetric packing has none
)
UNKNOWN = "which is not known; remove it if it does not change the weights"


def check_quantisation(outer: Fields, text: Fields) -> None:
    """Refuse all but symmetric INT4 with a scale for each 32 columns, by UserErrors that name the field.

    The file may say so at the top, in text_config, or in both.
    """
    places = [place for place in (outer, text) if "quantization_config" in place]
    if not places:
        raise UserError(
            f"{outer.path}: no quantization_config, neither at the top nor in text_config; give the INT4 "
            "release"
        )
    for place in places:
        _check_config(place.section("quantization_config"))


def _check_config(config: Fields) -> None:
    config.require("quant_method", "compressed-tensors", KERNEL, present=True)
    config.require("format", FORMAT, KERNEL, present=True)
    config.require("quantization_status", "compressed", "the loader")
    config.reject("kv_cache_scheme", "but the cache here is not quantised")
    _check_beside(config)
    config.reject_others(CONFIG_FIELDS, UNKNOWN)
    groups = config.section("config_groups")
    if not groups.values:
        raise config.error("config_groups", "but must describe the packed experts")
    for name in groups.values:
        _check_group(groups.section(name))


def _check_beside(config: Fields) -> None:
    """Sparse weights and rotated ones; objects that ask for nothing are what the library writes without
    them.
    """
    sparsity, transforms = config.section("sparsity_config"), config.section("transform_config")
    sparsity.require("format", "dense", "the loader", present=bool(sparsity.values))
    if transforms.section("config_groups").values or set(transforms.values) - {"config_groups"}:
        raise config.error(
            "transform_config", "but the model here has no transforms of weights or activations"
        )


def _check_group(group: Fields) -> None:
    group.require("format", FORMAT, KERNEL)
    for name in ("input_activations", "output_activations"):
        group.reject(name, f"but {KERNEL} needs activations that are not quantised")
    group.reject_others(GROUP_FIELDS, UNKNOWN)
    weights = group.section("weights")
    for name, value in PACKING.items():
        weights.require(name, value, KERNEL, present=True)
    weights.require("dynamic", False, KERNEL)
    weights.reject("actorder", f"but {KERNEL} needs columns in their own order")
    weights.reject("block_structure", f"but {KERNEL} needs groups of columns")
    weights.reject_others(WEIGHT_FIELDS, UNKNOWN)
