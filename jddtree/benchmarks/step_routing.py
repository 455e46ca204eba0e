"""Which experts the rows of `bench step` go to: chosen by the benchmark, while the router's own work is still done.

Random weights route almost uniformly whatever the text, and a choice that is known says which bytes must be read. The
chosen experts are data of the compiled step, one leaf more in the weights of the MoE layers.
"""

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jddtree.benchmarks import kernels_routing, step_trace
from jddtree.benchmarks.kernels_routing import Routing
from jddtree.config import TargetConfig
from jddtree.errors import UserError
from jddtree.models.observer import Observer
from jddtree.models.parameters import Tree
from pallas_kernels.selection import Place

DRAWN = {"uniform": "uniform", "zipf": "skewed"}  # a Zipf law is what `kernels_routing` calls skewed
NAMES = (*DRAWN, "trace")
LEAF = "forced_experts"


class ForcedExperts(Observer):
    """Sends rows to the experts in `forced_experts` int32 [layers of the model, rows, k], with the router's weights.

    The table, made by `with_experts`, has entries of dense layers too: an index that is computed would be one more
    kernel.
    """

    def route(self, ids: jax.Array, arrays: Tree, place: Place) -> jax.Array:
        """The router runs in full, since its weights need its choice; only the numbers of the experts are replaced."""
        return lax.dynamic_index_in_dim(arrays[LEAF], place.layer, keepdims=False)


FORCED = ForcedExperts()


def experts(name: str, config: TargetConfig, rows: int, seed: int) -> np.ndarray:
    """The experts of every MoE layer and row, int32 [MoE layers, rows, k].

    name: "uniform", "zipf" (an expert's popularity falls as 1 / rank, another order in each layer) or "trace"
    (`step_trace`).
    Raises UserError for another name.
    """
    if name not in NAMES:
        raise UserError(f"--routing is {name!r}, but must be one of {', '.join(NAMES)}")
    count, sizes = config.num_moe_layers, (config.n_routed_experts, config.num_experts_per_tok)
    if name == "trace":
        return step_trace.mapped(step_trace.load(), count, rows, *sizes, seed)
    routing = Routing(DRAWN[name])
    if rows == 1:  # `Routing` draws disjoint ones for a single row, as many as fit
        return np.stack([routing.draw(2, *sizes, seed + layer, 1)[0][:1] for layer in range(count)])
    return np.stack(routing.draw(rows, *sizes, seed, count))


def touched(chosen: np.ndarray, tokens: int) -> float:
    """Distinct experts of a layer that the first `tokens` rows use, a mean over layers."""
    return float(np.mean([kernels_routing.touched(layer[:tokens]) for layer in chosen]))


def touched_of_busiest(chosen: np.ndarray, tokens: int, experts: int, ranks: int) -> float:
    """Distinct experts of the rank that has most of them, where each of `ranks` holds as many of a layer's `experts`
    as the others; a mean over layers.
    """
    held = experts // ranks
    most = [np.bincount(np.unique(layer[:tokens]) // held, minlength=ranks).max() for layer in chosen]
    return float(np.mean(most))


def with_experts(weights: Tree, chosen: np.ndarray, sharding: NamedSharding | None = None) -> Tree:
    """The weights with the experts that rows shall use, the same on every rank of a mesh, to whose devices `sharding`
    puts them; arrays are shared.
    """
    target = weights["target"]
    dense = len(target.get("dense", {}).get("q_a", ()))
    chosen = np.pad(chosen, ((dense, 0), (0, 0), (0, 0)))
    return weights | {"target": target | {"moe": target["moe"] | {LEAF: jax.device_put(chosen, sharding)}}}
