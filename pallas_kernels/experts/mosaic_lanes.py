"""What one lane of the Mosaic expert kernels does, written with MLIR builders for Lane lowering semantics.

Maths and layout are those of lanes.py: (w >> 4j) & 0x000F000F | 0x43004300 is two bf16 numbers
128 + q of the M operand of mma.sync m16n8k16, a group's sum starts at -136 * sum(x), the scale multiplies the
group's float32 sum.
  words in shared memory    int32 [row tiles, groups, units * 128], lane 4g + t at (u, lane * 4)
  scales                    int32 [row tiles, groups, 32] (units 2: low half unit 0, high half unit 1)
                            int32 [row tiles, groups / 2, 32] (units 1: low half the even group)
  activations               bf16 [groups, 256], lane 4g + t at lane * 8: token g, columns 8t..8t+7
  accumulator               float32 [256, 8] in Layout.WGMMA, a carrier only: 8 registers of two float32, in
                            order (unit, mt, r8)
Warp w multiplies units 2w and 2w + 1 of the program's eight; unit row 4g + 2 mt + r8, token columns 2t and 2t
+ 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, memref, vector
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.experts.plan import Plan

ACCUMULATOR = plgpu.Layout.WGMMA
REF = plgpu.RefType()
MINUS_136 = 0xC308C308  # bf16 twice
MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, "
    "{$10,$11,$12,$13};",
    "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
)


@dataclass(frozen=True)
class Weights:
    """A program's eight units as they are stored: row tiles times units of a row tile."""

    row_tiles: int
    units: int

    def word_slot(self, groups: int) -> tuple[int, int, int]:
        return self.row_tiles, groups, self.units * 128

    def scale_slot(self, groups: int) -> tuple[int, int, int]:
        return self.row_tiles, groups * self.units // 2, 32


def multiply_groups(weights: Weights, groups: int) -> Callable[..., jax.Array]:
    """words, scales, activations of `groups` groups, accumulator -> accumulator plus their product."""

    @plgpu.inline_mgpu(
        arg_types=(REF, REF, REF, ACCUMULATOR),
        return_type=plgpu.ShapeDtypeStruct((256, 8), jnp.float32, layout=ACCUMULATOR),
    )
    def multiply(_: Any, words: Any, scales: Any, x: Any, sums: Any) -> Any:
        warp = _warp()
        lane = _lane()
        flat = [_at(register, half) for register in sums.registers.flatten() for half in range(2)]
        totals = [flat[4 * m : 4 * m + 4] for m in range(4)]  # m = unit * 2 + mt; rows r8 = 0, 0, 1, 1
        for group in range(groups):
            operand = _words(_load(x, [_c(group), _mul(lane, 8)], 8, ir.BF16Type.get()), 4)
            start = _group_start(operand)
            for unit in range(2):
                word = _words(_load(words, _word_index(weights, warp, lane, group, unit), 4, _i32()), 4)
                scale = _unit_scales(scales, weights, warp, lane, group, unit)
                for mt in range(2):
                    part = _tile(word[2 * mt : 2 * mt + 2], operand, start)
                    total = totals[unit * 2 + mt]
                    totals[unit * 2 + mt] = [
                        _fma(part[k], scale[2 * mt + k // 2], total[k]) for k in range(4)
                    ]
        mu.warpgroup_barrier()  # all warps are done with the slot: TMA may refill it
        return _fragments(totals, sums)

    return multiply


def stage_tokens(groups: int, plan: Plan, pairs_per_row: int) -> Callable[..., None]:
    """source [rows, groups * 32], entries [8], staged [groups, 256]: row pair // pairs_per_row of each entry,
    in operand order.

    Places without a pair repeat the tile's first.
    """

    @plgpu.inline_mgpu(arg_types=(REF, REF, REF))
    def stage(_: Any, source: Any, entries: Any, staged: Any) -> None:
        lane = _lane()
        warp = _warp()
        of_token = memref.load(entries, [_index(_token(lane))])
        entry = arith.select(_not_negative(of_token), of_token, memref.load(entries, [_index(_c(0))]))
        row = arith.divui(_pair(entry, plan), _c(pairs_per_row))
        for base in range(0, groups, 16):  # four loads in flight before their stores
            mine = [_add(_c(group), warp) for group in range(base, min(base + 16, groups), 4)]
            columns = [_add(_mul(group, 32), _mul(_quad(lane), 8)) for group in mine]
            values = [_load(source, [row, column], 8, ir.BF16Type.get()) for column in columns]
            for group, value in zip(mine, values, strict=True):
                vector.store(value, staged, [_index(group), _index(_mul(lane, 8))])
        mu.warpgroup_barrier()

    return stage


def store_partial(plan: Plan) -> Callable[..., None]:
    """out float32 [2, pairs, 128] (gate, up), entries [8], accumulator: writes the rows of real pairs."""

    @plgpu.inline_mgpu(arg_types=(REF, REF, ACCUMULATOR))
    def store(_: Any, out: Any, entries: Any, sums: Any) -> None:
        def write(pair: Any, unit: int, values: list[Any]) -> None:
            column = _add(_mul(_warp(), 32), _mul(_token(_lane()), 4))
            vector.store(
                _vector(values, ir.F32Type.get()), out, [_index(_c(unit)), _index(pair), _index(column)]
            )

        _for_real_pairs(entries, sums, plan, write)

    return store


def store_weighted(plan: Plan) -> Callable[..., None]:
    """out bf16 [pairs, 256], entries [8], routing weights [pairs], accumulator:
    writes weight * row of real pairs.
    """

    @plgpu.inline_mgpu(arg_types=(REF, REF, REF, ACCUMULATOR))
    def store(_: Any, out: Any, entries: Any, weights: Any, sums: Any) -> None:
        def write(pair: Any, unit: int, values: list[Any]) -> None:
            weight = memref.load(weights, [_index(pair)])
            kind = ir.BF16Type.get()
            scaled = [arith.truncf(kind, arith.mulf(value, weight)) for value in values]
            column = _add(_mul(_warp(), 64), _c(unit * 32), _mul(_token(_lane()), 4))
            vector.store(_vector(scaled, kind), out, [_index(pair), _index(column)])

        _for_real_pairs(entries, sums, plan, write)

    return store


def _for_real_pairs(
    entries: Any, sums: Any, plan: Plan, write: Callable[[Any, int, list[Any]], None]
) -> None:
    registers = sums.registers.flatten()
    for half in range(2):
        entry = memref.load(entries, [_index(_add(_mul(_quad(_lane()), 2), _c(half)))])
        with mu.when(_not_negative(entry)):
            for unit in range(2):
                write(_pair(entry, plan), unit, [_at(registers[unit * 4 + i], half) for i in range(4)])


def _word_index(weights: Weights, warp: Any, lane: Any, group: int, unit: int) -> list[Any]:
    if weights.units == 2:
        return [warp, _c(group), _add(_c(unit * 128), _mul(lane, 4))]
    return [_add(_mul(warp, 2), _c(unit)), _c(group), _mul(lane, 4)]


def _unit_scales(scales: Any, weights: Weights, warp: Any, lane: Any, group: int, unit: int) -> list[Any]:
    """Scales of rows 4g..4g+3 of the unit, float32."""
    rows = _mul(_token(lane), 4)
    if weights.units == 2:  # the units of a row tile share a word
        index = [warp, _c(group), rows]
        high = unit == 1
    else:  # two groups of a unit do
        index = [_add(_mul(warp, 2), _c(unit)), _c(group // 2), rows]
        high = group % 2 == 1
    bits = _words(_load(scales, index, 4, _i32()), 4)
    halves = [arith.andi(word, _c(0xFFFF0000)) if high else arith.shli(word, _c(16)) for word in bits]
    return [arith.bitcast(ir.F32Type.get(), half) for half in halves]


def _group_start(operand: list[Any]) -> list[Any]:
    """-136 * (sum of x over the group)"""
    f32 = ir.F32Type.get()
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))  # type: ignore[call-arg, arg-type]
    minus = [_c(MINUS_136)] * 4
    return _mma(minus, operand[2:], _mma(minus, operand[:2], [zero] * 4))


def _tile(word: list[Any], operand: list[Any], start: list[Any]) -> list[Any]:
    """16 rows of a group: start + (128 + q) * x"""
    part = start
    for k in range(2):
        low = 2 * k
        high = 2 * k + 1
        a = [_nibbles(word[0], low), _nibbles(word[1], low), _nibbles(word[0], high), _nibbles(word[1], high)]
        part = _mma(a, operand[low : low + 2], part)
    return part


def _nibbles(word: Any, j: int) -> Any:
    """Two bf16 128 + q from nibbles j and j + 4."""
    if j:
        word = arith.shrui(word, _c(4 * j))
    return _asm(_i32(), [word, _c(0x000F000F), _c(0x43004300)], "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r")


def _mma(a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    f32 = ir.F32Type.get()
    result = _asm(llvm.StructType.get_literal([f32] * 4), [*a, *b, *c], *MMA)
    return [llvm.extractvalue(f32, result, [k]) for k in range(4)]


def _fma(a: Any, b: Any, c: Any) -> Any:
    return _asm(ir.F32Type.get(), [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")


def _fragments(totals: list[list[Any]], like: Any) -> Any:
    pairs = [_vector(totals[m][2 * r : 2 * r + 2], ir.F32Type.get()) for m in range(4) for r in range(2)]
    registers = np.array(pairs, dtype=object).reshape(like.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _lane() -> Any:
    return arith.andi(mu.thread_idx(), _c(31))


def _warp() -> Any:
    return arith.andi(arith.shrui(mu.thread_idx(), _c(5)), _c(3))


def _token(lane: Any) -> Any:
    return arith.shrui(lane, _c(2))


def _quad(lane: Any) -> Any:
    return arith.andi(lane, _c(3))


def _pair(entry: Any, plan: Plan) -> Any:
    return arith.andi(entry, _c(2**plan.pair_bits - 1))


def _not_negative(value: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.sge, value, _c(0))


def _asm(result: Any, operands: list[Any], code: str, constraints: str) -> Any:
    return llvm.inline_asm(result, operands, code, constraints, has_side_effects=False)


def _load(ref: Any, index: list[Any], size: int, kind: Any) -> Any:
    return vector.load(ir.VectorType.get((size,), kind), ref, [_index(i) for i in index])


def _words(value: Any, count: int) -> list[Any]:
    value = vector.bitcast(ir.VectorType.get((count,), _i32()), value)
    return [_at(value, k) for k in range(count)]


def _vector(values: list[Any], kind: Any) -> Any:
    return vector.from_elements(ir.VectorType.get((len(values),), kind), values)


def _at(value: Any, k: int) -> Any:
    return vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([k]))


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _c(value: int) -> Any:
    signed = value if value < 2**31 else value - 2**32
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), signed))  # type: ignore[call-arg, arg-type]


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _add(*values: Any) -> Any:
    return values[0] if len(values) == 1 else arith.addi(values[0], _add(*values[1:]))


def _mul(value: Any, factor: int) -> Any:
    return arith.muli(value, _c(factor))
