"""The rotation of a model, from `rope_scaling` with `rope_theta` (older files) or `rope_parameters` (newer
ones).

YaRN: Peng et al., arXiv 2309.00071. A scaling rule, a key or a contradiction that this project does not know
is a `UserError`: rotations that differ slightly still give fluent text, so nothing here is guessed.
"""

import math
from dataclasses import dataclass

from jddtree.config.fields import Fields, agreed
from jddtree.errors import UserError

PLAIN_KEYS = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
YARN_KEYS = (
    *PLAIN_KEYS,
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding with YaRN scaling; `factor` 1 is plain rope.

    dim: rotated dimensions. amplitude: what cos and sin are multiplied by.
    """

    dim: int
    theta: float
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 m ln s + 1 (YaRN, section 3.4), and 1 where nothing is scaled."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def read_rope(fields: Fields, dim: int, amplitude: float | None = None) -> tuple[Rope, float]:
    """The rotation of `dim` dimensions, and mscale_all_dim (0 where the file gives none).

    amplitude: overrides the file; None takes attention_factor, else the ratio of mscale to mscale_all_dim.
    Raises UserError without theta, for an unknown rule or key, and where two places of the file disagree.
    """
    if dim % 2:
        raise UserError(
            f"{fields.path}: {dim} rotary dimensions, but they must come in pairs (head_dim, "
            "qk_rope_head_dim)"
        )
    scaling = _scaling(fields)
    place = agreed("rope_theta", fields, scaling)
    if (theta := place.positive("rope_theta", float)) <= 1:
        raise place.error("rope_theta", "but must be above 1")
    for place in (fields, scaling):
        place.require("partial_rotary_factor", 1.0, "a rotation over all dimensions")
    if (kind := _kind(scaling)) == "default":
        scaling.reject_others(
            PLAIN_KEYS, "which has no meaning for rope type 'default'; set the type or remove it"
        )
        return Rope(dim, theta, amplitude=1.0 if amplitude is None else amplitude), 0.0
    if kind != "yarn":
        name = "rope_type" if "rope_type" in scaling else "type"
        raise scaling.error(name, "but must be 'yarn' or 'default'")
    return _yarn(scaling, dim, theta, amplitude)


def _scaling(fields: Fields) -> Fields:
    """The object that describes the scaling; empty for plain rope."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    for name, value in new.values.items():
        if isinstance(value, dict):
            raise new.error(name, "but one rotation for all layers is needed")
    if not new.values or not old.values:
        return new if new.values else old
    left, right = (
        {k: v for k, v in x.values.items() if k not in ("rope_theta", "type", "rope_type")}
        for x in (new, old)
    )
    if left != right or _kind(new) != _kind(old):
        raise fields.error(
            "rope_scaling", f"but field 'rope_parameters' is {new.values!r}; keep the right one"
        )
    return new


def _kind(scaling: Fields) -> str:
    kinds = {scaling.get(name, str) for name in ("rope_type", "type") if name in scaling}
    if len(kinds) > 1:
        raise scaling.error(
            "type", f"but field {scaling.label('rope_type')!r} is {scaling.values['rope_type']!r}"
        )
    if not kinds and set(scaling.values) - set(PLAIN_KEYS):
        raise scaling.error("rope_type", "but the scaling cannot be read without it; add 'yarn' or 'default'")
    return kinds.pop() if kinds else "default"


def _mscale(scaling: Fields, name: str, default: float) -> float:
    value: float = scaling.get(name, float, default=default)
    if value < 0:
        raise scaling.error(name, "but must be at least 0")
    return value


def _yarn(scaling: Fields, dim: int, theta: float, amplitude: float | None) -> tuple[Rope, float]:
    scaling.reject_others(YARN_KEYS, "which is not known; remove it if it does not change the rotation")
    scaling.require("truncate", True, "the YaRN ramp, which is rounded outward,")
    factor = scaling.positive("factor", float)
    if factor < 1.0:
        raise scaling.error("factor", "but must be at least 1")
    mscale, all_dim = _mscale(scaling, "mscale", 1.0), _mscale(scaling, "mscale_all_dim", 0.0)
    if amplitude is None:
        ratio = yarn_mscale(factor, mscale) / (yarn_mscale(factor, all_dim) if all_dim else 1.0)
        amplitude = scaling.positive("attention_factor", float, default=ratio)
    rope = Rope(
        dim=dim,
        theta=theta,
        factor=factor,
        original_positions=scaling.positive("original_max_position_embeddings"),
        beta_fast=scaling.positive("beta_fast", float, default=32.0),
        beta_slow=scaling.positive("beta_slow", float, default=1.0),
        amplitude=amplitude,
    )
    return rope, all_dim
