"""One rank of eight of Kimi K2.6 composed of the kernels that public CUDA engines use, as one CUDA graph.

cuBLAS in bfloat16, Marlin's expert GEMMs and FlashMLA, 61 layers with random weights. Norms have no weights,
keys are not rotated and nothing is summed over ranks: the peer does less than the step that it stands beside.
A row has stage "verify", tokens, context, routing, experts (distinct ones of a layer, a mean), peer and
time_ms.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional

from jddtree.benchmarks.kernels.failures import attempt
from jddtree.benchmarks.kernels.roofline import k26_rank
from jddtree.benchmarks.kernels.routings import Routing, touched
from jddtree.benchmarks.peers import clock, flash_mla, marlin
from jddtree.results import Row

PEER = "cuBLAS + Marlin + FlashMLA"
SIZES = k26_rank(8)
LAYERS, DENSE_LAYERS = 61, 1
QUERY_RANK, HEAD, VALUE = 1536, 128, 128
ROTATED = flash_mla.WIDTH - flash_mla.LATENT
DENSE, VOCABULARY = 18432 // SIZES.world, 163840 // SIZES.world
EPSILON = 1e-5
BLOCK = 8  # of Marlin: the fastest at these numbers of tokens


class Attention(NamedTuple):
    """Weights bfloat16 [outputs, inputs]; k_up [heads, 128, 512], v_up [heads, 512, 128]."""

    q_a: torch.Tensor
    kv_a: torch.Tensor
    q_b: torch.Tensor
    k_up: torch.Tensor
    v_up: torch.Tensor
    out: torch.Tensor


class Gated(NamedTuple):
    """The dense or the shared block: gate and up in one matrix, and down."""

    gate_up: torch.Tensor
    down: torch.Tensor


class Routed(NamedTuple):
    """Router float32 [experts, hidden], its bias, and the experts."""

    router: torch.Tensor
    bias: torch.Tensor
    experts: marlin.Experts


class Layer(NamedTuple):
    """gated: the dense block of a layer without `routed`, else the shared expert."""

    attention: Attention
    gated: Gated
    routed: Routed | None


class Rank(NamedTuple):
    """All that a rank holds; head bfloat16 [ids, hidden]."""

    layers: list[Layer]
    head: torch.Tensor


class Batch(NamedTuple):
    """What one pass is over: rows bfloat16 [tokens, hidden]; a cache and expert ids int32 [tokens, top_k] for
    each layer; planned: FlashMLA's schedule; weights float32 [tokens, top_k] and Marlin's workspace, of all
    layers.
    """

    rows: torch.Tensor
    caches: list[flash_mla.Cache]
    ids: list[torch.Tensor]
    planned: Any
    weights: torch.Tensor
    space: torch.Tensor


def measure(tokens: Sequence[int], context: int) -> Iterator[Row]:
    """A row for each number of tokens over a cache of `context` keys, these included; one that fails has
    "failure".
    """
    torch.manual_seed(0)
    rank, space = random_rank(), marlin.workspace()
    for count in tokens:
        row = {"stage": "verify", "tokens": count, "context": context, "routing": "uniform", "peer": PEER}
        yield from attempt(row, partial(_measure, row, rank, space))


def random_rank() -> Rank:
    """About 70 GB of weights on the device."""
    return Rank([_layer(number) for number in range(LAYERS)], _normal(VOCABULARY, SIZES.hidden))


def step(rank: Rank, batch: Batch) -> torch.Tensor:
    """The most probable id of every row, int64 [tokens]."""
    rows = batch.rows
    for layer, cache, ids in zip(rank.layers, batch.caches, batch.ids, strict=True):
        rows = rows + _attention(_norm(rows), layer.attention, cache, batch.planned)
        normed = _norm(rows)
        if layer.routed is not None:
            work = marlin.work(ids, batch.weights, SIZES.experts, BLOCK, batch.space)
            rows = rows + _routed(normed, layer.routed, work)
        rows = rows + _gated(normed, layer.gated)
    return functional.linear(_norm(rows), rank.head).argmax(-1)


def _measure(row: Row, rank: Rank, space: torch.Tensor) -> list[Row]:
    drawn = Routing("uniform").draw(row["tokens"], SIZES.experts, SIZES.top_k, count=LAYERS)
    batch = _batch(row["tokens"], row["context"], drawn, space)
    row |= {"experts": float(np.mean([touched(ids) for ids in drawn]))}
    return [row | {"time_ms": clock.graph_us([partial(step, rank, batch)], least=1) / 1e3}]


def _batch(tokens: int, context: int, drawn: Sequence[np.ndarray], space: torch.Tensor) -> Batch:
    """drawn: routings, used by turns where they are fewer than layers."""
    weights = torch.rand(tokens, SIZES.top_k, device="cuda") / SIZES.top_k
    ids = [torch.from_numpy(np.ascontiguousarray(one)).cuda() for one in drawn]
    by_turns = [ids[layer % len(ids)] for layer in range(LAYERS)]
    caches = [flash_mla.random_cache(context) for _ in range(LAYERS)]
    return Batch(_normal(tokens, SIZES.hidden), caches, by_turns, flash_mla.schedule(), weights, space)


def _attention(rows: torch.Tensor, weights: Attention, cache: flash_mla.Cache, planned: Any) -> torch.Tensor:
    """Writes the rows' latents over the last keys of the cache."""
    count = len(rows)
    queries = functional.linear(_norm(functional.linear(rows, weights.q_a)), weights.q_b)
    queries = queries.view(count, SIZES.rank_heads, HEAD + ROTATED)
    latents = functional.linear(rows, weights.kv_a)
    normed = torch.cat([_norm(latents[:, : flash_mla.LATENT]), latents[:, flash_mla.LATENT :]], -1)
    cache.latents.view(-1, flash_mla.WIDTH)[-count:].copy_(normed)
    absorbed = torch.einsum("chd,hdk->chk", queries[..., :HEAD], weights.k_up)
    absorbed = torch.cat([absorbed, queries[..., HEAD:]], -1)[None]
    results = flash_mla.attention(absorbed, cache, planned)[0]
    values = torch.einsum("chk,hkd->chd", results, weights.v_up)
    return functional.linear(values.reshape(count, -1), weights.out)


def _routed(rows: torch.Tensor, weights: Routed, work: marlin.Work) -> torch.Tensor:
    """The router's work is done, and its choice replaced by the experts of the work list."""
    scores = torch.sigmoid(functional.linear(rows.float(), weights.router))
    torch.topk(scores + weights.bias, SIZES.top_k)
    activated = _activated(marlin.gate_up(rows, weights.experts.gate_up, work))
    by_pair = marlin.down(activated, weights.experts.down, work)
    return by_pair.view(len(rows), SIZES.top_k, SIZES.hidden).sum(1)


def _gated(rows: torch.Tensor, weights: Gated) -> torch.Tensor:
    return functional.linear(_activated(functional.linear(rows, weights.gate_up)), weights.down)


def _activated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def _norm(rows: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(rows, (rows.shape[-1],), None, EPSILON)


def _layer(number: int) -> Layer:
    if number < DENSE_LAYERS:
        return Layer(_random_attention(), _random_gated(DENSE), None)
    router = _normal(SIZES.experts, SIZES.hidden).float()
    routed = Routed(router, torch.zeros(SIZES.experts, device="cuda"), marlin.random_experts(SIZES))
    return Layer(_random_attention(), _random_gated(SIZES.intermediate), routed)


def _random_attention() -> Attention:
    hidden, heads = SIZES.hidden, SIZES.rank_heads
    return Attention(
        _normal(QUERY_RANK, hidden),
        _normal(flash_mla.WIDTH, hidden),
        _normal(heads * (HEAD + ROTATED), QUERY_RANK),
        _normal(heads, HEAD, flash_mla.LATENT),
        _normal(heads, flash_mla.LATENT, VALUE),
        _normal(hidden, heads * VALUE),
    )


def _random_gated(columns: int) -> Gated:
    return Gated(_normal(2 * columns, SIZES.hidden), _normal(SIZES.hidden, columns))


def _normal(*shape: int) -> torch.Tensor:
    return 0.02 * torch.randn(*shape, dtype=torch.bfloat16, device="cuda")
