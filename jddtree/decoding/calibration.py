"""What a node's score is really worth: the chance that the target accepts it.

The drafter scores a node by the product of its slots' probabilities. Its slots are independent, so they
describe what follows the top-1 chain (the spine) and not what follows a sibling, and no drafter is exactly as
sure as it is right. The chance is a logistic function of the score, the depth and whether the path left the
spine. With p = exp(score) its terms ln p and -ln (1 - p) are those of beta calibration (Kull, Silva Filho and
Flach, AISTATS 2017), and the weights 0, 1, 1, 0, 0, 0 give p itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jddtree import strict_json
from jddtree.decoding.tree import Tree
from jddtree.errors import UserError

FEATURES = ("one", "ln p", "-ln (1 - p)", "depth - 1", "off spine", "off spine * ln p")
TRUSTING = (0.0, 1.0, 1.0, 0.0, 0.0, 0.0)
MODES = ("greedy", "sampled", "coupled")
LARGEST = 1e6  # of a weight: times any feature it is finite in float32
SUREST = 1e-6  # no score is taken as surer than 1 minus this


@dataclass(frozen=True)
class Calibration:
    """Weights of `FEATURES` by how a sequence is decoded: "greedy", "sampled" (temperature above 0, draft
    without the noise) or "coupled" (draft with it). A mode that is missing takes scores at their word.
    """

    weights: Mapping[str, Sequence[float]]

    def of(self, temperature: float, coupling: bool) -> Sequence[float]:
        """The weights of a sequence."""
        return self.weights.get(mode_of(temperature, coupling), TRUSTING)


UNCALIBRATED = Calibration({})


def mode_of(temperature: float, coupling: bool) -> str:
    """One of `MODES`."""
    if temperature == 0:
        return "greedy"
    return "coupled" if coupling else "sampled"


def read_calibration(path: Path) -> Calibration:
    """The calibration in a JSON file {"features": [..], "weights": {mode: [..]}}.

    Raises UserError for a file that cannot be read or holds something else.
    """
    try:
        return _calibration(strict_json.read(path))
    except OSError as error:
        raise UserError(f"--calibration {path} cannot be read ({error.strerror}); check the path") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(
            f"--calibration {path} is no calibration of this version; make one with run.py calibrate"
        ) from None


def _calibration(values: Any) -> Calibration:
    """The calibration of a file's value. Raises ValueError, TypeError, KeyError or AttributeError when it is
    none.
    """
    weights = {mode: [_weight(value) for value in row] for mode, row in values["weights"].items()}
    if values["features"] != list(FEATURES) or not set(weights) <= set(MODES):
        raise ValueError("other features or modes")
    if any(len(row) != len(FEATURES) for row in weights.values()):
        raise ValueError("a weight for every feature is needed")
    return Calibration(weights)


def _weight(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= LARGEST:
        raise ValueError(f"{value!r} is no weight")
    return float(value)


def features(scores: jax.Array, depths: jax.Array, off_spine: jax.Array) -> jax.Array:
    """What the chance depends on, float32 [..., 6], in the order of `FEATURES`.

    scores: float32, log-probability of the whole path; depths: int32, from 1; off_spine: bool; all of one
    shape.
    """
    p = jnp.minimum(jnp.exp(scores), 1 - SUREST)
    log_p = jnp.log(jnp.maximum(p, 1e-30))
    off = off_spine.astype(jnp.float32)
    deeper = (depths - 1).astype(jnp.float32)
    return jnp.stack([jnp.ones_like(p), log_p, -jnp.log1p(-p), deeper, off, off * log_p], axis=-1)


def chances(tree: Tree, weights: jax.Array) -> jax.Array:
    """The chance that each node is accepted, float32 [B, C]; 0 for the root and padding.

    weights: float32 [B, features].
    """
    given = features(tree.scores, tree.depths, ~on_spine(tree))
    nodes = tree.valid & (tree.depths > 0) & ~jnp.isnan(tree.scores)
    return jnp.where(nodes, jax.nn.sigmoid((given * weights[:, None]).sum(-1)), 0.0)


def on_spine(tree: Tree) -> jax.Array:
    """Whether each row lies on the drafter's top-1 chain, bool [B, C]; the root does.

    No prefix of a depth is likelier than the chain's, and ties go to the lowest ranks, so the chain's node is
    the first row of its depth.
    """
    same = (tree.depths[:, :, None] == tree.depths[:, None, :]) & tree.valid[:, None, :]
    earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1)
    return tree.valid & ~(same & earlier[None]).any(2)
