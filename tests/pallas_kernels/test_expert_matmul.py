"""pallas_kernels/experts/api.py: every implementation keeps the same contract, on any routing."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import whole_packing as packing
from jax import lax
from jax.sharding import PartitionSpec as P
from whole_packing import to_words

from pallas_kernels.common import device, lowering
from pallas_kernels.common.stack import Place
from pallas_kernels.experts import launch
from pallas_kernels.experts.api import PackedExperts, expert_rows
from pallas_kernels.experts.plan import make_plan, work_list
from pallas_kernels.experts.triton import expert_rows_triton

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 2, 16, 4, 256, 128  # the micro model's sizes

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def on_hopper() -> bool:
    return jax.default_backend() == "gpu" and device.gpu_generation() == "sm_90" and device.mosaic_supported()


class Weights:
    """Random experts: packed, and as float64 [E, N, K], rounded to bfloat16 (the checkpoint's meaning) or
    exact.
    """

    def __init__(self, experts: int, hidden: int, intermediate: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        shapes = [(experts, intermediate, hidden)] * 2 + [(experts, hidden, intermediate)]
        codes = [rng.integers(0, 16, shape) for shape in shapes]
        scales = [
            (rng.random((*s[:2], s[2] // 32)) * 0.02 + 0.001).astype(ml_dtypes.bfloat16) for s in shapes
        ]
        words = [to_words(code) for code in codes]
        arrays = packing.pack_gate_up(words[0], scales[0], words[1], scales[1]) + packing.pack_down(
            words[2], scales[2]
        )
        self.packed = PackedExperts(*map(jnp.asarray, arrays))
        self.exact = [
            (c - 8.0) * np.repeat(s.astype(np.float64), 32, 2) for c, s in zip(codes, scales, strict=True)
        ]
        self.rounded = [
            w.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) for w in self.exact
        ]


@functools.cache
def micro() -> Weights:
    return Weights(LAYERS * EXPERTS, HIDDEN, INTERMEDIATE)


class Rows:
    """Operands of one call, valid rows random."""

    def __init__(
        self,
        rows: int,
        dtype: jnp.dtype = jnp.bfloat16,
        seed: int = 0,
        top_k: int = TOP_K,
        hidden: int = HIDDEN,
    ) -> None:
        rng = np.random.default_rng([rows, seed])
        self.x = np.asarray(rng.standard_normal((rows, hidden)), dtype)
        self.ids = np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(rows)]).astype(np.int32)
        self.weights = rng.random((rows, top_k)).astype(np.float32)
        self.valid = np.ones(rows, bool)

    def skew(self) -> "Rows":
        """All rows choose the same experts."""
        self.ids[:] = self.ids[0]
        return self

    def invalidate(self, *rows: int) -> "Rows":
        """Rows that are not valid, with the worst contents."""
        for row in rows:
            self.valid[row] = False
            self.x[row], self.weights[row], self.ids[row] = np.nan, np.nan, -(2**31) + row
        return self

    def operands(self) -> tuple[jax.Array, ...]:
        return tuple(map(jnp.asarray, (self.x, self.ids, self.weights, self.valid)))

    def oracle(self, weights: list[np.ndarray], first: int, num_experts: int = EXPERTS) -> np.ndarray:
        out = np.zeros(self.x.shape)
        for token in np.flatnonzero(self.valid):
            x = self.x[token].astype(np.float64)
            for choice, expert in enumerate(self.ids[token]):
                if 0 <= expert < num_experts:
                    gate, up, down = (w[first + expert] for w in weights)
                    z = gate @ x
                    out[token] += self.weights[token, choice] * (down @ (z / (1 + np.exp(-z)) * (up @ x)))
        return out


def expert_mlp(x, ids, weights, valid, experts, first_expert, *, num_experts, out_dtype=None, **options):
    """The routed sum of the layer that begins at `first_expert`, a multiple of num_experts."""
    place = Place(lax.div(jnp.asarray(first_expert, jnp.int32), jnp.int32(num_experts)))
    addends = expert_rows(x, ids, weights, valid, experts, place, num_experts=num_experts, **options)
    return addends.total(out_dtype or x.dtype)


@functools.cache
def layer(implementation: str, num_experts: int = EXPERTS):  # type: ignore[no-untyped-def]
    return jax.jit(functools.partial(expert_mlp, num_experts=num_experts, implementation=implementation))


def error(result: jax.Array, expected: np.ndarray) -> float:
    """Relative error; infinite unless every value is finite."""
    difference = np.linalg.norm(np.asarray(result, np.float64) - expected) / np.linalg.norm(expected)
    return float(difference) if np.isfinite(difference) else np.inf


@pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        "triton",
        pytest.param("mosaic", marks=pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")),
    ],
)
class TestExpertMlp:
    def check(self, implementation: str, rows: Rows, layer_index: int = 1) -> jax.Array:
        first = layer_index * EXPERTS
        result = layer(implementation)(*rows.operands(), micro().packed, jnp.int32(first))
        weights = micro().rounded if implementation == "xla" else micro().exact
        assert result.shape == rows.x.shape and result.dtype == rows.x.dtype
        assert error(result, rows.oracle(weights, first)) < (4e-3 if rows.x.dtype == jnp.bfloat16 else 1e-5)
        assert not np.asarray(result, np.float32)[~rows.valid].any()
        return result

    @pytest.mark.parametrize("rows", [1, 40])
    def test_against_oracle(self, implementation: str, rows: int) -> None:
        self.check(implementation, Rows(rows))

    def test_float32(self, implementation: str) -> None:
        if implementation == "mosaic":
            pytest.skip("bfloat16 only")
        self.check(implementation, Rows(40, jnp.float32).invalidate(0, 7))

    def test_more_rows_of_an_expert_than_a_tile(self, implementation: str) -> None:
        self.check(implementation, Rows(40).skew())

    def test_invalid_rows_may_hold_anything(self, implementation: str) -> None:
        rows = Rows(40).invalidate(0, 3, 39)
        clean = Rows(40)
        clean.valid[:] = rows.valid
        np.testing.assert_array_equal(self.check(implementation, rows), self.check(implementation, clean))

    def test_no_valid_row(self, implementation: str) -> None:
        rows = Rows(40).invalidate(*range(40))
        result = layer(implementation)(*rows.operands(), micro().packed, jnp.int32(0))
        assert not np.asarray(result, np.float32).any()

    def test_rows_do_not_see_each_other(self, implementation: str) -> None:
        """A value that is not finite stays in its row."""
        rows = Rows(40)
        expected = np.asarray(layer(implementation)(*rows.operands(), micro().packed, jnp.int32(0)))
        rows.x[5] = np.inf
        result = np.asarray(layer(implementation)(*rows.operands(), micro().packed, jnp.int32(0)))
        np.testing.assert_array_equal(np.delete(result, 5, 0), np.delete(expected, 5, 0))
        assert not np.isfinite(result[5].astype(np.float32)).all()

    def test_repeats_are_identical(self, implementation: str) -> None:
        results = [self.check(implementation, Rows(40, seed=1)) for _ in range(3)]
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])

    def test_stacked_layers_in_a_scan(self, implementation: str) -> None:
        rows = Rows(1)

        def step(_: None, first: jax.Array) -> tuple[None, jax.Array]:
            out = expert_mlp(
                *rows.operands(), micro().packed, first, num_experts=EXPERTS, implementation=implementation
            )
            return None, out

        firsts = jnp.arange(LAYERS, dtype=jnp.int32) * EXPERTS
        result = jax.jit(lambda f: lax.scan(step, None, f)[1])(firsts)
        for index in range(LAYERS):
            np.testing.assert_array_equal(result[index], self.check(implementation, rows, index))

    def test_expert_parallel_halves(self, implementation: str) -> None:
        """Two ranks with half of the experts each; ids that are not a rank's own are not routed there."""
        rows, half, total = Rows(40).invalidate(2), EXPERTS // 2, 0.0
        for rank in range(2):
            x, ids, weights, valid = rows.operands()
            packed = PackedExperts(*(array[EXPERTS + rank * half :][:half] for array in micro().packed))
            out = layer(implementation, half)(x, ids - rank * half, weights, valid, packed, jnp.int32(0))
            total = total + np.asarray(out, np.float64)
        assert (
            error(total, rows.oracle(micro().rounded if implementation == "xla" else micro().exact, EXPERTS))
            < 4e-3
        )

    def test_tensor_parallel_slices(self, implementation: str) -> None:
        """Two ranks with half of the intermediate columns each, float32 partial sums added by psum."""
        if implementation == "mosaic":
            pytest.skip("needs 128 columns a rank")
        rows = Rows(9, jnp.float32).invalidate(2)
        mesh = jax.make_mesh(
            (2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
        )

        def rank(*operands: jax.Array) -> jax.Array:
            call = functools.partial(expert_mlp, num_experts=EXPERTS, implementation=implementation)
            return lax.psum(call(*operands[:4], PackedExperts(*operands[4:]), jnp.int32(EXPERTS)), "model")

        specs = (P(),) * 4 + (P(None, "model"),) * 2 + (P(None, None, "model"),) * 2
        split = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
        result = jax.block_until_ready(split(*rows.operands(), *micro().packed))
        weights = micro().rounded if implementation == "xla" else micro().exact
        assert error(result, rows.oracle(weights, EXPERTS)) < 1e-5

    def test_float32_result_of_bfloat16_rows(self, implementation: str) -> None:
        rows = Rows(40)
        call = jax.jit(
            functools.partial(
                expert_mlp, num_experts=EXPERTS, implementation=implementation, out_dtype=jnp.float32
            )
        )
        result = call(*rows.operands(), micro().packed, jnp.int32(0))
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(
            result.astype(jnp.bfloat16), layer(implementation)(*rows.operands(), micro().packed, jnp.int32(0))
        )


class TestTritonVariants:
    """Launch settings that the micro sizes do not reach, interpreted."""

    @pytest.mark.parametrize(
        ("tile", "split", "down_programs", "intermediate"), [(16, 1, 2, 64), (8, 2, 4, 320), (16, 2, 1, 320)]
    )
    def test_against_oracle(self, tile: int, split: int, down_programs: int, intermediate: int) -> None:
        weights = Weights(EXPERTS, 128, intermediate, seed=tile)
        rows = Rows(24, jnp.float32, top_k=3, hidden=128).invalidate(4)
        rows.ids[:12] = rows.ids[0]
        x, ids, routing, valid = rows.operands()
        entry = replace(launch.HOPPER[0], tile=tile, split=split, down_programs=down_programs)
        options = {"num_experts": EXPERTS, "launch": entry, "interpret": True}
        call = lambda *operands: expert_rows_triton(*operands, Place(jnp.int32(0)), **options)
        result = jax.jit(call)(x, ids, routing, valid, weights.packed).total()
        assert error(result, rows.oracle(weights.exact, 0)) < 1e-5


class TestWorkList:
    @pytest.mark.parametrize("tile", [8, 16])
    @pytest.mark.parametrize("case", ["uniform", "one expert", "half routed", "none", "one token"])
    def test_every_pair_once(self, tile: int, case: str) -> None:
        rng = np.random.default_rng(tile)
        tokens = 1 if case == "one token" else 37
        ids = np.stack([rng.permutation(24)[:3] for _ in range(tokens)]).astype(np.int32)
        routed = np.full(ids.shape, case != "none")
        if case == "one expert":
            ids[:] = 23
        if case == "half routed":
            routed = rng.random(ids.shape) < 0.5
            ids[~routed] = -5
        plan = make_plan(tokens, 3, 24, tile)
        entries = np.asarray(work_list(jnp.asarray(ids), jnp.asarray(routed), plan)).reshape(plan.tiles, tile)
        pairs = entries[entries >= 0] & (2**plan.pair_bits - 1)
        assert sorted(pairs) == list(np.flatnonzero(routed))
        tiles = [row[row >= 0] for row in entries]
        assert all((row[: len(mine)] == mine).all() for row, mine in zip(entries, tiles, strict=True))
        experts = [mine >> plan.pair_bits for mine in tiles if len(mine)]
        assert all((e == e[0]).all() and np.all(np.diff(t) > 0) for e, t in zip(experts, tiles, strict=False))
        numbers = [int(e[0]) for e in experts]
        assert len(numbers) == np.sum(-(-np.bincount(ids[routed], minlength=24) // tile))
        if tokens > 1:  # one token's experts stand in its own order
            assert numbers == sorted(numbers)
        np.testing.assert_array_equal(entries[entries >= 0] >> plan.pair_bits, ids.reshape(-1)[pairs])

    @pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (2, 8), (33, 8), (512, 8), (512, 16), (3, 16)])
    def test_room_for_the_worst_routing(self, tokens: int, tile: int) -> None:
        """As many experts as possible with one pair more than whole tiles."""
        plan = make_plan(tokens, 8, 384, tile)
        alone = min(384, plan.pairs)
        worst = alone + (plan.pairs - alone) // tile
        assert worst <= plan.tiles <= plan.pairs

    def test_too_many_pairs(self) -> None:
        with pytest.raises(ValueError, match="4194304 tokens of top 8 among 384 experts"):
            make_plan(1 << 22, 8, 384, 8)


class TestLaunchTable:
    @pytest.mark.parametrize("generation", [name for name, _ in launch.GENERATIONS])
    @pytest.mark.parametrize(
        ("hidden", "intermediate"), [(7168, 256), (7168, 512), (7168, 2048), (256, 128), (64, 64)]
    )
    def test_entries_fit(self, generation: str, hidden: int, intermediate: int) -> None:
        for rows in (1, 2, 9, 33, 34, 512, 4096):
            entry = launch.expert_launch(rows, hidden, intermediate, generation)
            assert hidden // 32 % (entry.split * launch.STEP_GROUPS) == 0
            assert hidden // 32 % entry.down_programs == 0

    def test_nearest_entry(self) -> None:
        table = dict(launch.GENERATIONS)["sm_90"]
        assert [e.rows for e in table] == sorted(e.rows for e in table)
        for entry in table:
            assert launch.expert_launch(entry.rows, 7168, 256, "sm_90") == entry


def table_entries() -> list[launch.ExpertLaunch]:
    return sorted(
        {entry for _, table in launch.GENERATIONS for entry in table},
        key=lambda entry: (entry.rows, repr(entry)),
    )


def lower_for_cuda(entry: launch.ExpertLaunch, implementation: str, experts: int, intermediate: int) -> str:
    """StableHLO of a layer of 60 stacked layers at K2.6's sizes."""
    rows, top_k, hidden, total = entry.rows, 8, 7168, 60 * experts
    struct = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    word = functools.partial(struct, jnp.int32)
    row_tiles, groups = intermediate // 32, hidden // 32
    packed = PackedExperts(
        word(total, row_tiles, groups, 256),
        word(total, row_tiles, groups, 32),
        word(total, groups, row_tiles, 128),
        word(total, groups, row_tiles // 2, 32),
    )
    fitted = launch.fit(entry, hidden, intermediate)
    if implementation == "mosaic":
        from pallas_kernels.experts.mosaic import expert_rows_mosaic

        kernels = functools.partial(expert_rows_mosaic, num_experts=experts)
    else:
        kernels = functools.partial(expert_rows_triton, num_experts=experts, launch=fitted, interpret=False)
    call = lambda *operands: kernels(*operands[:-1], Place(operands[-1]))
    shapes = (
        struct(jnp.bfloat16, rows, hidden),
        word(rows, top_k),
        struct(jnp.float32, rows, top_k),
        struct(jnp.bool_, rows),
        packed,
        word(),
    )
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(t)
        for t in (lowering.TRITON_TARGET, lowering.MOSAIC_TARGET)
    ]
    with lowering.quiet_triton(), lowering.cuda_target():
        return jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=checks)(
            *shapes
        ).mlir_module()


class TestCrossLowering:
    """Every launch setting lowers to CUDA without a GPU."""

    @pytest.mark.parametrize(
        "entry", table_entries(), ids=lambda entry: f"{entry.rows}rows-split{entry.split}-tile{entry.tile}"
    )
    def test_triton(self, entry: launch.ExpertLaunch) -> None:
        assert lower_for_cuda(entry, "triton", 384, 256).count(f"@{lowering.TRITON_TARGET}") == (
            3 if entry.rows == 1 else 4 if entry.rows <= 128 else 2
        )

    def test_triton_whole_experts(self) -> None:
        assert (
            lower_for_cuda(table_entries()[-1], "triton", 48, 2048).count(f"@{lowering.TRITON_TARGET}") == 2
        )

    @pytest.mark.skipif(not device.mosaic_supported(), reason="needs jax 0.11")
    @pytest.mark.parametrize(
        "entry", [e for e in table_entries() if e.rows >= 65], ids=lambda entry: f"{entry.rows}rows"
    )
    def test_mosaic(self, entry: launch.ExpertLaunch) -> None:
        assert lower_for_cuda(entry, "mosaic", 384, 256).count(f"@{lowering.MOSAIC_TARGET}") == 2


class TestArguments:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x": jnp.zeros((3, 128))}, r"\[rows, 256\].*\(3, 128\)"),
            ({"x": jnp.zeros((3, 256), jnp.float16)}, "float16"),
            ({"ids": jnp.zeros((2, 4), jnp.int32)}, r"int32 \[3, k\].*\(2, 4\)"),
            ({"weights": jnp.zeros((3, 5))}, r"\(3, 4\) like ids.*\(3, 5\)"),
            ({"valid": jnp.ones(3, jnp.float32)}, r"int32 \[3\].*float32"),
            ({"num_experts": 33}, "num_experts 33 must be between 1 and the 32"),
            ({"implementation": "cuda"}, "'cuda'"),
        ],
    )
    def test_errors_name_values(self, change: dict, message: str) -> None:
        arguments = dict(zip(("x", "ids", "weights", "valid"), Rows(3).operands(), strict=True))
        arguments |= {
            "experts": micro().packed,
            "first_expert": jnp.int32(0),
            "num_experts": EXPERTS,
        } | change
        with pytest.raises(ValueError, match=message):
            expert_mlp(**arguments)

    def test_packed_arrays_that_do_not_fit(self) -> None:
        packed = micro().packed
        call = functools.partial(
            expert_mlp, *Rows(3).operands(), first_expert=jnp.int32(0), num_experts=EXPERTS
        )
        with pytest.raises(ValueError, match=r"down_scale must be int32 \(32, 8, 2, 32\)"):
            call(experts=packed._replace(down_scale=packed.down_scale[:, :, :1]))
        with pytest.raises(ValueError, match="hidden size 256 and intermediate size 96"):
            call(experts=packed._replace(gate_up=packed.gate_up[:, :3]))

    def test_default_is_plain_on_cpu(self) -> None:
        if jax.default_backend() != "cpu":
            pytest.skip("CPU only")
        operands = (*Rows(3).operands(), micro().packed, jnp.int32(0))
        plain = jax.make_jaxpr(functools.partial(expert_mlp, num_experts=EXPERTS))(*operands)
        assert "pallas_call" not in str(plain)
