"""A look into the routing of a target: what chooses experts beside the router, and has the choice reported."""

import jax

from jddtree.models.parameters import Tree
from pallas_kernels.selection import Place


class Observer:
    """Given to a target, it has `Scored.experts` filled; without one the target keeps no choice of experts.

    A subclass may send rows elsewhere. Observers are part of a compiled program, so they hold no arrays.
    """

    def route(self, ids: jax.Array, arrays: Tree, place: Place) -> jax.Array:
        """The experts that rows of the layer at `place` go to, int32 [T, k].

        ids: int32 [T, k], the router's choice; arrays: the parameters of the MoE layers, by name.
        """
        return ids
