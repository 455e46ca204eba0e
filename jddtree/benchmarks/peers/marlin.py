"""Marlin's W4A16 GEMM over experts, as vLLM calls it: 4-bit weights with a bfloat16 scale for 32 of them.

Weights are random and in Marlin's own order already, so nothing here says that a result is right; times do
not depend on values.
"""

from typing import NamedTuple

import torch
from vllm.scalar_type import scalar_types

from jddtree.benchmarks.kernels.roofline import GROUP, Sizes

TILE = 16  # input rows that share a row of packed words
PER_WORD = 8


class Matrix(NamedTuple):
    """Weights of all experts: words int32 [experts, inputs / 16, 2 outputs], scales bfloat16 [experts, inputs
    / 32, outputs].
    """

    words: torch.Tensor
    scales: torch.Tensor

    @property
    def inputs(self) -> int:
        return self.words.shape[1] * TILE

    @property
    def outputs(self) -> int:
        return self.scales.shape[2]


class Experts(NamedTuple):
    """gate_up: hidden to twice the rank's columns; down: back again."""

    gate_up: Matrix
    down: Matrix


class Work(NamedTuple):
    """Pairs of token and expert by expert in blocks of `block`, as moe_align_block_size lists them; weights
    float32 [tokens, top_k]; space int32, what the GEMM's blocks synchronise in.
    """

    block: int
    pairs: torch.Tensor
    experts: torch.Tensor
    count: torch.Tensor
    weights: torch.Tensor
    space: torch.Tensor


def random_experts(sizes: Sizes) -> Experts:
    """One layer of a rank on the device."""
    gate_up = random_matrix(sizes.experts, sizes.hidden, 2 * sizes.intermediate)
    return Experts(gate_up, random_matrix(sizes.experts, sizes.intermediate, sizes.hidden))


def random_matrix(experts: int, inputs: int, outputs: int, deviation: float = 0.002) -> Matrix:
    """Random words, and scales from 0 to `deviation`."""
    shape = experts, inputs // TILE, outputs * TILE // PER_WORD
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
    scales = torch.rand(experts, inputs // GROUP, outputs, dtype=torch.bfloat16, device="cuda")
    return Matrix(words, scales * deviation)


def work(ids: torch.Tensor, weights: torch.Tensor, experts: int, block: int, space: torch.Tensor) -> Work:
    """The list for expert ids int32 [tokens, top_k]."""
    places = list_length(ids.numel(), experts, block)
    pairs = torch.empty(places, dtype=torch.int32, device="cuda")
    chosen = torch.empty(-(-places // block), dtype=torch.int32, device="cuda")
    count = torch.empty(1, dtype=torch.int32, device="cuda")
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, pairs, chosen, count, None)
    return Work(block, pairs, chosen, count, weights, space)


def list_length(pairs: int, experts: int, block: int) -> int:
    """Places that the list has at most: every expert's pairs are filled up to whole blocks."""
    return min(pairs * block, pairs + experts * (block - 1))


def workspace() -> torch.Tensor:
    """Zeros that the GEMM leaves as zeros."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    return torch.zeros(4 * count, dtype=torch.int32, device="cuda")


def gate_up(rows: torch.Tensor, matrix: Matrix, listed: Work) -> torch.Tensor:
    """bfloat16 [tokens * top_k, outputs] of rows [tokens, inputs]."""
    return _gemm(rows, matrix, listed, top_k=listed.weights.shape[1], weighted=False)


def down(rows: torch.Tensor, matrix: Matrix, listed: Work) -> torch.Tensor:
    """bfloat16 [tokens * top_k, outputs] of rows [tokens * top_k, inputs], times the weights."""
    return _gemm(rows, matrix, listed, top_k=1, weighted=True)


def _gemm(rows: torch.Tensor, matrix: Matrix, listed: Work, top_k: int, weighted: bool) -> torch.Tensor:
    """Arguments in the order of the operator: bias, the scale of activations, zero points and permutations
    are None; then the shape, full K, no atomic additions, sums in float32, no zero points as floats, and
    tiles of its own choice.
    """
    out = torch.empty(listed.weights.numel(), matrix.outputs, dtype=torch.bfloat16, device="cuda")
    return torch.ops._moe_C.moe_wna16_marlin_gemm(
        rows,
        out,
        matrix.words,
        None,
        matrix.scales,
        None,
        None,
        None,
        None,
        None,
        listed.space,
        listed.pairs,
        listed.experts,
        listed.count,
        listed.weights,
        listed.block,
        top_k,
        weighted,
        scalar_types.uint4b8.id,
        rows.shape[0],
        matrix.outputs,
        matrix.inputs,
        True,
        False,
        True,
        False,
        -1,
        -1,
        -1,
    )
