"""The same model on 1, 2, 4 and 8 forced CPU devices, in both expert layouts: logits, golden traces, sampling."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden_ref, micro_drafter, micro_target
from harness import decode
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from converters.dflash import drafter_parameters, load_drafter
from converters.kimi import load_target
from jddtree.config import dflash_config, target_config
from jddtree.decoding.costs import CostTable, Curve
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.program import Program
from jddtree.decoding.state import Capacity
from jddtree.errors import UserError
from jddtree.models.parameters import nest, target_parameters
from jddtree.models.target import Rows, Target
from jddtree.parallel.mesh import AXIS, make_mesh, total
from jddtree.parallel.partition import on_mesh, place, spec
from pallas_kernels import wide
from pallas_kernels.tree_attention import causal_words

CAPACITY = Capacity(sequences=2, rows=33, candidates=32, context=512, rounds=8)
MESHES = [(2, "tensor"), (4, "tensor"), (4, "expert"), (8, "tensor"), (8, "expert")]
LARGEST_DIFFERENCE = 1e-5  # logits reach 20: 1e-5 is five units in their last place


@pytest.fixture(scope="module")
def pair():
    """Configurations and host arrays of the micro pair, with the references' eps."""
    target, drafter = target_config(micro_target(), latent_norm_eps=1e-6), dflash_config(micro_drafter())
    return (
        target,
        drafter,
        load_target(micro_target(), target, np.float32)[0],
        load_drafter(micro_drafter(), drafter, np.float32)[0],
    )


def weights_on(pair, ranks, layout):
    target, drafter, target_arrays, drafter_arrays = pair
    mesh, layers = make_mesh(ranks), target.num_moe_layers
    return mesh, {
        "target": place(target_arrays, on_mesh(target_parameters(target), ranks, layout, layers), mesh),
        "drafter": place(drafter_arrays, on_mesh(drafter_parameters(drafter), ranks, layout, layers), mesh),
    }


@pytest.fixture(scope="module", params=MESHES, ids=lambda value: f"{value[0]}-{value[1]}")
def engine(request, pair):
    mesh, weights = weights_on(pair, *request.param)
    return Engine(Program(pair[0], pair[1], CAPACITY, axis=AXIS), weights, jnp.dtype("float32"), mesh)


@pytest.fixture(scope="module")
def alone(pair):
    """The engine of one device."""
    arrays = jax.device_put({"target": nest(pair[2]), "drafter": nest(pair[3])})
    return Engine(Program(pair[0], pair[1], CAPACITY), arrays, jnp.dtype("float32"))


@pytest.mark.parametrize("method, budget, name", [("dflash", 0, "dflash"), ("ddtree", 32, "ddtree_32")])
def test_golden_traces_hold_on_every_mesh(engine, cases, method, budget, name):
    """Two prompts, one of them beyond the yarn original length: ids and tokens per round are the reference's."""
    cases = [cases[1], cases[9]]
    runs = decode(engine, [Request(case["prompt"]["ids"], 97, method, budget) for case in cases])
    for case, run in zip(cases, runs, strict=True):
        lengths = case["decoders"][name]["lengths"]
        assert run.tokens[:96] == case["tokens"]
        assert run.lengths[:-1] == lengths[:-1] and len(run.lengths) == len(lengths)


def test_sampling_is_the_same_on_every_mesh(engine, alone, monkeypatch):
    """Position-keyed noise is made per id, so a rank's slice of it is the same numbers, in the draft too."""
    for one in (engine, alone):
        monkeypatch.setattr(one, "costs", CostTable((Curve(0, (1, 33), (1.0, 5.0)),), 0.1, "made up"))
    request = Request([1024, 542, 283], 40, "ddtree", 16, temperature=0.8, top_p=0.9, seed=3)
    split, whole = (decode(one, [request, replace(request, auto=True)]) for one in (engine, alone))
    assert split == whole and split[0].tokens == split[1].tokens


def test_mesh_without_a_drafter(pair, cases):
    mesh, weights = weights_on(pair, 2, "tensor")
    case = cases[1]
    capacity = Capacity(rows=1, candidates=1, context=128, rounds=8)
    engine = Engine(
        Program(pair[0], None, capacity, axis=AXIS), {"target": weights["target"]}, jnp.dtype("float32"), mesh
    )
    (run,) = decode(engine, [Request(case["prompt"]["ids"], 9, "ar")])
    assert run.tokens == case["tokens"][:9]


def logits(config, axis, weights):
    """float32 [1, 64, V]: those of a 64-token prompt in one chunk."""
    tokens = load_file(golden_ref() / "target_1.safetensors")["input_ids"][None]
    valid = jnp.ones(tokens.shape, bool)
    rows = Rows(jnp.arange(64, dtype=jnp.int32)[None], valid, causal_words(valid), jnp.zeros(1, jnp.int32))
    cache = jnp.zeros((config.num_hidden_layers, 1, 128, config.latent_size))
    target = Target(config, weights, axis=axis)
    return target.vocabulary.gather(target.logits(target(tokens, rows, cache).hidden))


@pytest.fixture(scope="module")
def whole(pair):
    """The logits of one device without a mesh."""
    return np.asarray(jax.jit(partial(logits, pair[0], None))(jax.device_put(nest(pair[2]))))


@pytest.mark.parametrize("ranks, layout", [(1, "tensor"), (1, "expert"), (2, "expert"), *MESHES])
def test_logits_equal_one_device(pair, whole, ranks, layout):
    """Sums are kept in float64."""
    mesh, weights = weights_on(pair, ranks, layout)
    specs = jax.tree.map(lambda array: array.sharding.spec, weights["target"])
    rank = partial(logits, pair[0], AXIS)
    sharded = jax.shard_map(rank, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    split = np.asarray(jax.jit(sharded)(weights["target"]))[..., : pair[0].vocab_size]
    assert np.abs(split - whole).max() <= LARGEST_DIFFERENCE


def test_padding_is_zeros_at_the_end(pair):
    """Eight ranks share four heads: the arrays hold four heads of zeros more, and nothing else changes."""
    table = target_parameters(pair[0])
    padded = on_mesh(table, 8, "tensor", pair[0].num_moe_layers)
    _, weights = weights_on(pair, 8, "tensor")
    k_up = np.asarray(weights["target"]["moe"]["k_up"])
    assert padded["moe.k_up"].shape[1] == 8 and table["moe.k_up"].shape[1] == 4
    assert (k_up[:, :4] == pair[2]["moe.k_up"]).all() and not k_up[:, 4:].any()


def test_every_rank_holds_its_share(pair):
    """K2.6 needs no padding on 8 ranks, and each holds an eighth of every split parameter."""
    _, weights = weights_on(pair, 2, "expert")
    gate_up = weights["target"]["experts"]["gate_up"]
    assert gate_up.addressable_shards[0].data.shape[1] * 2 == gate_up.shape[1] == 16
    assert spec(target_parameters(pair[0])["head"]) == P(AXIS)


def test_too_many_devices_are_refused():
    with pytest.raises(UserError, match="--mesh is 9, but 8 cpu"):
        make_mesh(9)


def test_partial_sums_are_not_bfloat16():
    with pytest.raises(ValueError, match="bfloat16"):
        total(jnp.zeros(3, jnp.bfloat16), None)


def test_products_keep_their_sums_in_float64():
    """2^30 + 1 - 2^30 is 0 in float32 in this order; bfloat16 operands are summed in float32."""
    x, weight = jnp.array([[2.0**15, 1.0, -(2.0**15)]]), jnp.array([[2.0**15, 1.0, 2.0**15]])
    exact = wide.product(x, weight, (1, 1))
    rounded = total(exact, None)
    assert exact.dtype == np.float64 and rounded.dtype == jnp.float32 and float(rounded[0, 0]) == 1
    half = wide.product(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), (1, 1))
    assert half.dtype == jnp.float32 == wide.sum_dtype(jnp.bfloat16)
