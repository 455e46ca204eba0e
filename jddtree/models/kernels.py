"""How the formulas of the models run: one value that a model makes once, and that its layers call.

It knows what the kernels ask of their surroundings, so that no layer has to:
* which implementation runs; a model of which one size fits no kernel has none at all, as its twin, which XLA
  makes, must not stand among kernels that overlap;
* whether the next kernel may begin before one ends (`overlap_next`), which only a kernel of ours may:
  `matmul` is read by one, `linear` by XLA, and what a block gives by one unless ranks add it up first;
* the mesh axis that sums over ranks run over;
* that a pass of a single row is one CUDA graph (`one_graph`), and that the tree's own latents stand in whole
  tiles.
Rows are flat: T are those of all sequences, one after the other. Weights are stacks over layers, place says
which.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jddtree.errors import UserError
from jddtree.parallel.mesh import psum_float32
from pallas_kernels.attention import api as tree_attention
from pallas_kernels.attention.draft import Block, draft_attention
from pallas_kernels.common import wide
from pallas_kernels.common.addends import Addends
from pallas_kernels.common.choice import layer_implementation, on_gpu
from pallas_kernels.common.stack import Place
from pallas_kernels.experts.api import PackedExperts, expert_rows, mosaic_fits
from pallas_kernels.layer.draft_heads import Heads, draft_heads
from pallas_kernels.layer.expert_choice import Router, expert_choice
from pallas_kernels.layer.gated_activation import gated_activation
from pallas_kernels.layer.head_projection import absorbed_queries, head_values, takes_factor
from pallas_kernels.layer.latent_projection import latent_projection
from pallas_kernels.layer.residual_norm import Taps, residual_norm
from pallas_kernels.layer.stack_matmul import stack_matmul, takes_columns

CosSin = tuple[jax.Array, jax.Array]


def one_graph(rows: int) -> bool:
    """Whether a pass of so many rows, on one device, is one CUDA graph from its first layer to what follows
    the last.

    It is faster for one row, slower for more.
    """
    return rows == 1


@dataclass(frozen=True)
class Kernels:
    """implementation: one of `pallas_kernels.common.choice.IMPLEMENTATIONS`;
    axis: the mesh axis, None on one device.
    """

    implementation: str = "auto"
    axis: str | None = None

    @classmethod
    def for_weights(
        cls,
        implementation: str,
        groups: Iterable[Mapping[str, jax.Array]],
        axis: str | None = None,
        other_sizes_fit: bool = True,
    ) -> "Kernels":
        """Those for a model with these groups of stacks, "xla" where one has a size that a kernel does not
        take.

        Raises UserError where "mosaic" is asked for and such a size is there.
        """
        if other_sizes_fit and all(_fits(group) for group in groups):
            return cls(implementation, axis)
        if implementation == "mosaic":
            raise _not_mosaic("no kernel takes the sizes of this model")
        return cls("xla", axis)

    # Products.

    def matmul(self, x: jax.Array, stacks: Sequence[jax.Array], place: Place) -> jax.Array:
        """x [T, K] times the layer of stacks [L, N_i, K]: partial sums [parts, T, sum of N_i].
        A kernel must read them.
        """
        return stack_matmul(x, stacks, place, self.implementation)

    def project_out(self, x: jax.Array, stack: jax.Array, place: Place) -> Addends:
        """x [T, K] times the layer of a stack [L, H, K], the last product of a block; a rank's part of it."""
        return Addends((stack_matmul(x, [stack], place, self.implementation, overlap_next=self._alone),))

    def linear(self, x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        """x [T, K] times weights [1, N_i, K], rounded to the dtype of x, [T, sum of N_i]."""
        return wide.added(self._for_xla(x, weights), x.dtype)

    def row_parallel_linear(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x [T, K] times weight [1, N, K], rounded to the dtype of x; each rank has some of the K columns."""
        (summed,) = self.all_reduce(Addends((self._for_xla(x, [weight]),))).partial_sums
        return wide.added(summed, x.dtype)

    def _for_xla(self, x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        """Partial sums of a product outside the layers, which XLA adds up"""
        return stack_matmul(x, weights, Place(jnp.int32(0)), self.implementation, overlap_next=False)

    # The residual stream.

    def all_reduce(self, addends: Addends) -> Addends:
        """What a block gives, the same on every rank; without an axis it is added up where it is read."""
        if self.axis is None:
            return addends
        return Addends((psum_float32(addends.total(addends.dtype), self.axis)[None],))

    def add_norm(
        self, x: jax.Array, addends: Addends, norms: jax.Array, place: Place, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """x + addends, and its RMS norm with the layer's weights of norms [L, H]; [T, H] each."""
        x, normed, _ = residual_norm(x, addends, norms, place, eps, self.implementation)
        return x, normed

    def end_layer(
        self, x: jax.Array, addends: Addends, norms: jax.Array, place: Place, eps: float, taps: Taps
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `add_norm`, and the buffer of taps with x in the layer's slot;
        the last kernel of a loop over layers.
        """
        overlap = not one_graph(x.shape[0])  # what follows is XLA's there
        x, normed, buffer = residual_norm(
            x, addends, norms, place, eps, self.implementation, taps, overlap_next=overlap
        )
        assert buffer is not None  # taps were given
        return x, normed, buffer

    # Latent attention.

    def latent_norms(
        self,
        parts: jax.Array,
        norms: tuple[jax.Array, jax.Array],
        place: Place,
        cos_sin: CosSin,
        eps: float,
        latents: jax.Array,
        valid: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The query latent, normed, and `latents` with the rows' own; as `latent_projection`."""
        return latent_projection(parts, norms, place, cos_sin, eps, latents, valid, self.implementation)

    def absorbed_queries(self, parts: jax.Array, k_up: jax.Array, place: Place, cos_sin: CosSin) -> jax.Array:
        """Queries in the latent space [T, heads, D + R], of the product with q_b."""
        return absorbed_queries(parts, k_up, place, cos_sin, self.implementation)

    def head_values(self, out: jax.Array, v_up: jax.Array, place: Place) -> jax.Array:
        """Values of all heads [T, heads * V], of latent outputs [T, heads, D]."""
        return head_values(out, v_up, place, self.implementation)

    def tree_latents(self, cache: jax.Array, batch: int, count: int) -> jax.Array:
        """Room for the own latents of `count` rows of each sequence in all layers,
        zeros [layers, B, P, D + R].
        """
        whole_tiles = layer_implementation(self.implementation, cache.dtype, batch * count) == "triton"
        places = tree_attention.padded_rows(count) if whole_tiles else count
        return jnp.zeros((cache.shape[0], batch, places, cache.shape[3]), cache.dtype)

    def attention(
        self,
        queries: jax.Array,
        cache: jax.Array,
        layer: jax.Array,
        lengths: jax.Array,
        latents: jax.Array,
        ancestors: jax.Array,
        *,
        latent_size: int,
        scale: float,
        query_bits: jax.Array,
    ) -> jax.Array:
        """Latent outputs [T, heads, D]; queries [T, heads, D + R], the others as in `tree_attention`."""
        shape = (*ancestors.shape[:2], *queries.shape[1:])
        implementation = self._attention_implementation(queries, cache, latent_size)
        out = tree_attention.tree_attention(
            queries.reshape(shape),
            cache,
            layer,
            lengths,
            latents,
            ancestors,
            latent_size=latent_size,
            scale=scale,
            implementation=implementation,
            query_bits=query_bits,
        )
        return out.reshape(queries.shape[0], *out.shape[2:])

    def _attention_implementation(self, queries: jax.Array, cache: jax.Array, latent_size: int) -> str:
        """Float32 on a GPU is for reference, in attention as in the kernels of a layer"""
        if self.implementation == "mosaic":
            width, capacity = cache.shape[3], cache.shape[2]
            misfit = tree_attention.mosaic_misfit(queries.dtype, latent_size, width, capacity)
            if misfit or not on_gpu():
                raise _not_mosaic(f"attention {misfit or 'needs a GPU'}")
        if on_gpu() and queries.dtype == jnp.float32:
            return "auto" if self.implementation == "triton" else self.implementation
        return self.implementation

    # Feed-forward blocks.

    def gated_mlp(self, x: jax.Array, stacks: Sequence[jax.Array], place: Place) -> Addends:
        """down(silu(gate x) * up x) of the layer at `place`, no biases; a rank's part where the width is
        split.

        x: [T, H]; stacks: gate, up and down, each [layers, out, in].
        """
        gate, up, down = stacks
        activated = self.gated_activation(self.matmul(x, [gate, up], place), x.dtype)
        return self.project_out(activated, down, place)

    def gated_activation(self, parts: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """silu(gate) * up [T, I], of the product with both."""
        return gated_activation(parts, dtype, self.implementation)

    def route(
        self, parts: jax.Array, bias: jax.Array, place: Place, router: Router, dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Experts of each row, ids int32 and weights float32 [T, k],
        and the shared expert's activation [T, I].
        """
        return expert_choice(parts, bias, place, router, dtype, self.implementation)

    def experts(
        self,
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        valid: jax.Array,
        packed: PackedExperts,
        place: Place,
        num_experts: int,
    ) -> Addends:
        """What the routed experts give; arguments as in `expert_rows`."""
        if self.implementation == "mosaic" and not mosaic_fits(x.dtype, packed.hidden, packed.intermediate):
            sizes = f"{x.dtype}, hidden {packed.hidden} and intermediate {packed.intermediate}"
            raise _not_mosaic(f"experts need bfloat16 and multiples of 256 and 128, got {sizes}")
        return expert_rows(
            x,
            ids,
            weights,
            valid,
            packed,
            place,
            num_experts=num_experts,
            implementation=self.implementation,
            overlap_next=self._alone,
        )

    # The drafter.

    def draft_heads(
        self,
        parts: jax.Array,
        norms: tuple[jax.Array, jax.Array],
        place: Place,
        cos_sin: CosSin,
        eps: float,
        key_heads: int,
    ) -> Heads:
        """Queries, keys and values of a block's rows, of the product with q, k and v."""
        return draft_heads(parts, norms, place, cos_sin, eps, key_heads, self.implementation)

    def draft_attention(self, block: Block) -> jax.Array:
        """What the heads give, [B, n, heads * D]."""
        return draft_attention(block, self.implementation)

    @property
    def _alone(self) -> bool:
        """Whether what a block gives is read by our kernels: XLA adds up what ranks give"""
        return self.axis is None


def _fits(group: Mapping[str, jax.Array]) -> bool:
    """Whether the kernels take all products and head factors of a group of stacks"""
    floating = [array for array in group.values() if jnp.issubdtype(array.dtype, jnp.floating)]
    products = [array for array in floating if array.ndim == 3]
    factors = [group[name] for name in ("k_up", "v_up") if name in group]
    return all(takes_columns(array.shape[2]) for array in products) and all(map(takes_factor, factors))


def _not_mosaic(reason: str) -> UserError:
    return UserError(f"--kernels is mosaic, but {reason}; give --kernels auto")
