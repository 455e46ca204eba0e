"""The small kernels of a layer against their plain twins, interpreted, and lowered to CUDA at K2.6's
sizes.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jddtree.decoding.program import compiler_options
from jddtree.models.kernels import Kernels
from pallas_kernels.attention import launch as tree_attention_launch
from pallas_kernels.attention.draft import Block, draft_attention
from pallas_kernels.common import device, lowering
from pallas_kernels.common.addends import Addends, RoutedRows
from pallas_kernels.common.choice import layer_implementation
from pallas_kernels.common.stack import Place
from pallas_kernels.common.wide import added
from pallas_kernels.experts import launch as expert_launch
from pallas_kernels.experts.plan import make_plan, work_list
from pallas_kernels.experts.work_list import triton_work_list
from pallas_kernels.layer import launch as layer_launch
from pallas_kernels.layer.draft_heads import draft_heads
from pallas_kernels.layer.expert_choice import Router, expert_choice
from pallas_kernels.layer.gated_activation import gated_activation
from pallas_kernels.layer.head_projection import absorbed_queries, head_values
from pallas_kernels.layer.latent_projection import latent_projection
from pallas_kernels.layer.residual_norm import Taps, residual_norm
from pallas_kernels.layer.stack_matmul import stack_matmul

EPS = 1e-5
SECOND = Place(jnp.int32(1))
THIRD_OF_LATER = Place(jnp.int32(3), 1)  # the stacks begin with the model's layer 1
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 8e-3}  # of the largest value; a bfloat16 has 8 bits


class Numbers:
    """Random arrays, another one at each call."""

    def __init__(self, rows: int, dtype, seed: int = 0):
        self.rows, self.dtype, self.random = rows, dtype, np.random.default_rng(seed)

    def __call__(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.random.standard_normal(shape), self.dtype)

    def single(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.random.standard_normal(shape), jnp.float32)

    def turns(self, half: int) -> tuple[jax.Array, jax.Array]:
        angle = self.single(self.rows, half)
        return jnp.cos(angle), jnp.sin(angle)

    def live(self) -> jax.Array:
        return jnp.asarray(np.arange(self.rows) % 3 != 1, jnp.int32)


def products(n: Numbers, place: Place) -> Callable[[str], tuple]:
    x, weights = n(n.rows, 96), [n(4, 96, 96), n(4, 40, 96)]
    return lambda kernels: (added(stack_matmul(x, weights, place, kernels), jnp.dtype(jnp.float32)),)


def long_products(n: Numbers, place: Place) -> Callable[[str], tuple]:
    x, weights = n(n.rows, 1024), [n(4, 96, 1024)]
    return lambda kernels: (added(stack_matmul(x, weights, place, kernels), jnp.dtype(jnp.float32)),)


def norms(n: Numbers, place: Place) -> Callable[[str], tuple]:
    x, partial_sums, weights = n(n.rows, 96), (n.single(2, n.rows, 96), n.single(1, n.rows, 96)), n(4, 96)
    counts = jnp.asarray(n.random.integers(0, 2, (n.rows, 3)), jnp.int32)
    rows = jnp.where(counts[:, :, None] != 0, n(n.rows, 3, 96), jnp.nan).astype(n.dtype)
    taps = Taps(n(3, n.rows, 96), jnp.asarray([2, 2, 1, 0], jnp.int32))
    addends = Addends(partial_sums, RoutedRows(rows, counts))
    return lambda kernels: residual_norm(x, addends, weights, place, EPS, kernels, taps)


def first_norm(n: Numbers, place: Place) -> Callable[[str], tuple]:
    x, weights = n(n.rows, 96), n(4, 96)
    return lambda kernels: residual_norm(x, Addends(), weights, place, EPS, kernels)[:2]


def latents(n: Numbers, place: Place) -> Callable[[str], tuple]:
    made, weights, turns = n.single(3, n.rows, 96 + 64 + 32), (n(4, 96), n(4, 64)), n.turns(16)
    own, live = jnp.zeros((5, 1, n.rows + 3, 96), n.dtype), n.live()
    return lambda kernels: latent_projection(made, weights, place, turns, EPS, own, live, kernels)


def queries(n: Numbers, place: Place) -> Callable[[str], tuple]:
    made, k_up, turns = n.single(2, n.rows, 4 * 64), n(4, 4, 32, 64), n.turns(16)
    return lambda kernels: (absorbed_queries(made, k_up, place, turns, kernels),)


def values(n: Numbers, place: Place) -> Callable[[str], tuple]:
    out, v_up = n(n.rows, 4, 64), n(4, 4, 32, 64)
    return lambda kernels: (head_values(out, v_up, place, kernels),)


def choices(n: Numbers, place: Place) -> Callable[[str], tuple]:
    made, bias, router = n.single(3, n.rows, 24 + 2 * 40), n.single(4, 24), Router(4, True, 2.5)
    return lambda kernels: expert_choice(made, bias, place, router, jnp.dtype(n.dtype), kernels)


def activations(n: Numbers, place: Place) -> Callable[[str], tuple]:
    beside, before = n.single(3, n.rows, 2 * 40), n.single(3, 2, n.rows, 600)
    return lambda kernels: tuple(
        gated_activation(parts, jnp.dtype(n.dtype), kernels) for parts in (beside, before)
    )


def block_heads(n: Numbers, place: Place) -> Callable[[str], tuple]:
    made, weights, turns = n.single(3, n.rows, (4 + 2 * 2) * 32), (n(4, 32), n(4, 32)), n.turns(16)
    return lambda kernels: draft_heads(made, weights, place, turns, EPS, 2, kernels)


@pytest.mark.parametrize(
    "make",
    [products, long_products, norms, first_norm, latents, queries, values, choices, block_heads, activations],
)
@pytest.mark.parametrize(("rows", "place"), [(1, SECOND), (18, THIRD_OF_LATER)], ids=["1", "18"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_kernel_is_its_twin(make, rows: int, place: Place, dtype) -> None:
    call = make(Numbers(rows, dtype), place)
    plain, kernel = (jax.jit(functools.partial(call, kernels))() for kernels in ("xla", "triton"))
    for wanted, found in zip(plain, kernel, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        wanted, found = np.asarray(wanted, np.float32), np.asarray(found, np.float32)
        limit = TOLERANCE[dtype] * max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)


@pytest.mark.parametrize("layer", [0, 1, 2], ids=["all", "window of 5", "window of 90, causal"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_draft_attention_is_its_twin(layer: int, groups: int, dtype) -> None:
    """Two sequences, one of them longer than a block of either twin and the other than nothing; the rest is
    NaN.
    """
    n, context = Numbers(8, dtype), 200
    lengths = jnp.asarray([context - 30, 3], jnp.int32)
    unknown = (jnp.arange(context)[None] >= lengths[:, None])[None, :, :, None, None]
    keys, values = (jnp.where(unknown, jnp.nan, n(3, 2, context, groups, 32)).astype(dtype) for _ in range(2))
    block = Block(
        n(2, 8, 4, 32),
        (n(2, 8, groups, 32), n(2, 8, groups, 32)),
        (keys, values),
        jnp.int32(layer),
        lengths,
        jnp.asarray([np.iinfo(np.int32).max, 5, 90], jnp.int32),
        jnp.asarray([0, 0, 1], jnp.int32),
    )
    made = [
        jax.jit(functools.partial(draft_attention, implementation=name))(block) for name in ("xla", "triton")
    ]
    wanted, found = made
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    wanted, found = np.asarray(wanted, np.float32), np.asarray(found, np.float32)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[dtype] * np.abs(wanted).max())


def test_products_are_those_of_float64() -> None:
    n = Numbers(5, jnp.float32)
    x, weights = n(5, 96), [n(4, 96, 96), n(4, 40, 96)]
    found = stack_matmul(x, weights, THIRD_OF_LATER, "triton").sum(axis=0)
    exact = np.asarray(x, np.float64) @ np.concatenate([np.asarray(w, np.float64)[2] for w in weights]).T
    np.testing.assert_allclose(found, exact, atol=2e-5)


def test_dead_rows_leave_the_latents_alone() -> None:
    n = Numbers(6, jnp.float32)
    made = n.single(1, 6, 96 + 64 + 32).at[:, 1].set(jnp.nan)
    own, live = jnp.zeros((2, 2, 64, 96)), jnp.asarray([1, 0, 1, 1, 1, 1], jnp.int32)
    for kernels in ("xla", "triton"):
        arguments = (made, (n(1, 96), n(1, 64)), Place(jnp.int32(1), 1), n.turns(16), EPS, own, live, kernels)
        found = np.asarray(latent_projection(*arguments)[1])
        assert np.isfinite(found).all()
        assert found[1, 0, 0].any() and found[1, 1, 2].any() and not found[1, 0, 1].any()
        assert not found[0].any() and not found[1, :, 3:].any()


def test_equal_scores_choose_the_lower_expert() -> None:
    made, bias = jnp.zeros((1, 2, 24 + 8)), jnp.zeros((1, 24)).at[0, 7].set(1.0)
    for kernels in ("xla", "triton"):
        router = Router(4, True, 1.0)
        ids, weights, _ = expert_choice(
            made, bias, Place(jnp.int32(0)), router, jnp.dtype(jnp.float32), kernels
        )
        np.testing.assert_array_equal(ids, [[7, 0, 1, 2]] * 2)
        np.testing.assert_allclose(weights, 0.25, rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.sampled_from([2, 9, 33]),
    experts=st.integers(3, 24),
    tile=st.sampled_from([8, 16]),
    seed=st.integers(0, 2**31),
)
def test_work_list_is_the_plain_one(tokens: int, experts: int, tile: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids = np.stack([random.permutation(experts)[:3] for _ in range(tokens)]).astype(np.int32)
    ids[random.random(ids.shape) < 0.1] = -5
    valid = (random.random(tokens) < 0.8).astype(np.int32)
    plan = make_plan(tokens, 3, 20, tile)
    routed = (valid != 0)[:, None] & (ids >= 0) & (ids < 20)
    entries, counts = map(np.asarray, _interpreted_list(ids, valid, plan))
    np.testing.assert_array_equal(counts, routed)
    np.testing.assert_array_equal(entries[: plan.tiles * tile], _plain_list(ids, routed, plan))


_interpreted_list = jax.jit(functools.partial(triton_work_list, interpret=True), static_argnums=2)
_plain_list = jax.jit(work_list, static_argnums=2)


def test_loads_in_flight_fit_shared_memory() -> None:
    for rows in (1, 40, 64, 72, 128):
        launch = layer_launch.layer_launch().matmul(rows, 7168, [1536, 576])
        assert launch.parts == 4 and launch.stages >= 3
        assert (
            launch.stages * 2 * launch.step * (launch.row_tile + max(8, 1 << (rows - 1).bit_length()))
            <= 227 * 1024
        )


@pytest.mark.parametrize(
    "generation, kilobytes", [("sm_80", 163), ("sm_90", 227), ("sm_100", 227), ("sm_120", 99)]
)
def test_products_fit_the_shared_memory_of_every_generation(generation: str, kilobytes: int) -> None:
    """What CUDA's table of compute capabilities lets one block of threads have."""
    for rows in (1, 9, 33, 128):
        for columns, weight_rows in ((7168, 2112), (1536, 1536), (1024, 7168), (256, 7168), (96, 40)):
            launch = layer_launch.layer_launch(generation).matmul(rows, columns, [weight_rows])
            stage = 2 * launch.step * (launch.row_tile + max(8, 1 << (rows - 1).bit_length()))
            assert launch.stages >= 1 and launch.stages * stage <= kilobytes * 1024


@pytest.mark.parametrize(
    "capability, generation",
    [("8.0", "sm_80"), ("8.9", "sm_80"), ("9.0", "sm_90"), ("10.3", "sm_100"), ("12.1", "sm_120")],
)
def test_generation_is_the_newest_that_is_not_newer(capability: str, generation: str, monkeypatch) -> None:
    card = SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    assert device.gpu_generation.__wrapped__() == generation
    card.compute_capability = "7.5"
    with pytest.raises(ValueError, match="compute capability 7.5 is below 8.0"):
        device.gpu_generation.__wrapped__()


def test_every_generation_has_every_table() -> None:
    for table in (expert_launch.GENERATIONS, layer_launch.GENERATIONS, tree_attention_launch.GENERATIONS):
        assert tuple(name for name, _ in table) == device.GENERATIONS
    assert set(device.MULTIPROCESSORS) == set(device.SHARED_BYTES) == set(device.GENERATIONS)


def test_parts_follow_from_the_sizes() -> None:
    """Two programs on each multiprocessor at most, three steps in each, and few parts for what adds them
    up.
    """
    for columns, rows in (
        (7168, 2112),
        (1536, 1536),
        (1024, 7168),
        (7168, 896),
        (256, 7168),
        (7168, 4608),
        (2304, 7168),
    ):
        table = layer_launch.layer_launch()
        launch = table.matmul(40, columns, [rows])
        steps, tiles = columns // launch.step, -(-rows // launch.row_tile)
        assert columns % (launch.step * launch.parts) == 0 and launch.parts <= layer_launch.MOST_PARTS
        programs = launch.parts * tiles
        enough = steps // launch.parts >= layer_launch.LEAST_STEPS
        assert launch.parts == 1 or (enough and programs <= table.programs)


def test_layers_with_an_odd_size_have_no_kernels_at_all() -> None:
    """Else XLA's twin would stand among kernels that let one another be launched early."""
    shape = jax.ShapeDtypeStruct
    whole = {"o": shape((2, 96, 64), jnp.bfloat16), "k_up": shape((2, 4, 32, 64), jnp.bfloat16)}
    whole |= {"post_norm": shape((2, 96), jnp.bfloat16), "forced": shape((2, 8, 3), jnp.int32)}
    fitting = lambda name, group: Kernels.for_weights(name, [group]).implementation
    assert [fitting(name, whole) for name in ("auto", "triton", "xla")] == ["auto", "triton", "xla"]
    for odd in ({"o": shape((2, 96, 80), jnp.bfloat16)}, {"k_up": shape((2, 4, 24, 64), jnp.bfloat16)}):
        assert fitting("auto", whole | odd) == "xla"


class TestSelection:
    def test_on_a_cpu(self) -> None:
        single = jnp.dtype(jnp.float32)
        assert [layer_implementation(name, single, 8) for name in ("auto", "xla", "triton")] == [
            "xla",
            "xla",
            "triton",
        ]
        assert layer_implementation("triton", single, 129) == "xla"
        assert layer_implementation("triton", single, 129, None) == "triton"

    def test_on_a_gpu(self, monkeypatch) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert layer_implementation("auto", jnp.dtype(jnp.bfloat16), 8) == "triton"
        assert layer_implementation("triton", jnp.dtype(jnp.float32), 8) == "xla"

    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match="one of auto, xla, triton, mosaic, got 'cuda'"):
            layer_implementation("cuda", jnp.dtype(jnp.float32), 8)


def test_stack_of_other_columns() -> None:
    with pytest.raises(ValueError, match=r"\[layers, rows, 96\].*\(4, 40, 64\)"):
        stack_matmul(jnp.zeros((2, 96)), [jnp.zeros((4, 40, 64))], SECOND)


@pytest.mark.parametrize("rows", [1, 40])
def test_kernels_lower_to_cuda(rows: int, monkeypatch) -> None:
    """One rank of eight: hidden 7168, 8 heads, 384 experts, 256 shared columns."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    half, single = (
        functools.partial(lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype), kind)
        for kind in (jnp.bfloat16, jnp.float32)
    )
    whole = functools.partial(lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32))
    turns, router = (single(rows, 32), single(rows, 32)), Router(8, True, 2.8)

    def layer(layer, x, weights, latents, live, turns):
        place = Place(layer, 1)
        made = stack_matmul(x, weights["qkv"], place)
        low, latents = latent_projection(made, weights["norms"], place, turns, EPS, latents, live)
        queries = absorbed_queries(stack_matmul(low, [weights["q_b"]], place), weights["k_up"], place, turns)
        values = head_values(queries[..., :512], weights["v_up"], place)
        parts = stack_matmul(values, [weights["o"]], place)
        x, normed, _ = residual_norm(x, Addends((parts,)), weights["norm"], place, EPS)
        made = stack_matmul(normed, weights["router"], place)
        return x, latents, expert_choice(made, weights["bias"], place, router, jnp.dtype(jnp.bfloat16))

    weights = {
        "qkv": [half(60, 1536, 7168), half(60, 576, 7168)],
        "norms": (half(60, 1536), half(60, 512)),
        "q_b": half(60, 1536, 1536),
        "k_up": half(60, 8, 128, 512),
        "v_up": half(60, 8, 128, 512),
        "o": half(60, 7168, 1024),
        "norm": half(60, 7168),
        "bias": single(60, 384),
        "router": [half(60, 384, 7168), half(60, 256, 7168), half(60, 256, 7168)],
    }
    arguments = (whole(), half(rows, 7168), weights, half(61, 1, 64, 576), whole(rows), turns)
    assert _cuda_module(layer, arguments).count(f"@{lowering.TRITON_TARGET}") == 9


@pytest.mark.parametrize("overlap_next", [True, False])
def test_only_kernels_for_kernels_are_launched_past(overlap_next: bool, monkeypatch) -> None:
    """What XLA's kernels read must be complete before they begin; jax 0.10 launches nothing early."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    half = functools.partial(lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype), jnp.bfloat16)

    def products(x, stack):
        return stack_matmul(x, [stack], SECOND, overlap_next=overlap_next)

    module = _cuda_module(products, (half(8, 256), half(2, 128, 256)))
    assert ("griddepcontrol.launch_dependents" in module) == (overlap_next and device.JAX_VERSION >= (0, 11))


def test_options_of_one_row(monkeypatch) -> None:
    """All layers in one CUDA graph, unless whoever runs it has chosen what graphs hold."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    unrolled = "xla_gpu_command_buffer_unroll_loops"
    assert [unrolled in compiler_options(rows) for rows in (None, 1, 8)] == [
        False,
        device.JAX_VERSION >= (0, 11),
        False,
    ]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert unrolled not in compiler_options(1)


def _cuda_module(function: Callable, arguments: tuple) -> str:
    check = jax.export.DisabledSafetyCheck.custom_call(lowering.TRITON_TARGET)
    with lowering.quiet_triton(), lowering.cuda_target():
        exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[check])
        return exported(*arguments).mlir_module()


def test_draft_kernels_lower_to_cuda(monkeypatch) -> None:
    """One rank of eight: blocks of 8 rows, 8 heads of 128, one key head, 131,072 tokens."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    half, single, whole = (
        functools.partial(lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype), kind)
        for kind in (jnp.bfloat16, jnp.float32, jnp.int32)
    )

    def attend(layer, parts, norms, turns, caches, numbers):
        queries, *own = (made[None] for made in draft_heads(parts, norms, Place(layer), turns, EPS, 1))
        return draft_attention(Block(queries, (own[0], own[1]), caches, layer, *numbers))

    caches = (half(6, 1, 131072, 1, 128), half(6, 1, 131072, 1, 128))
    turns, numbers = (single(8, 64), single(8, 64)), (whole(1), whole(6), whole(6))
    arguments = (whole(), single(8, 8, 1280), (half(6, 128), half(6, 128)), turns, caches, numbers)
    assert _cuda_module(attend, arguments).count(f"@{lowering.TRITON_TARGET}") == 3
