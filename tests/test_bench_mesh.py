"""`bench mesh` on two of eight CPU devices: every form of a sum is the same sum, weights are those of one device."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jddtree.benchmarks import mesh, mesh_chains, mesh_kernels, mesh_step
from jddtree.benchmarks.mesh_weights import random_normed, random_target
from jddtree.cli.main import app, guarded
from jddtree.parallel.mesh import make_mesh


@pytest.fixture
def command(capsys):
    """Run `bench mesh` in this process -> exit code, lines of stdout, last line of stderr."""

    def run(*arguments):
        code = guarded(lambda: app(["bench", "mesh", *map(str, arguments)], standalone_mode=False))
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.strip().splitlines()[-1:]

    return run


def test_every_form_is_the_sum_over_ranks():
    """A chain of means over equal partials changes nothing, and each form adds what differs by rank."""
    devices = make_mesh(2)
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    forms = mesh_chains.reductions(2)
    assert set(forms) == {
        "nothing", "psum_f32", "psum_bf16", "gather_sum_f32", "scatter_gather_f32", "permute_add_f32"
    }  # fmt: skip
    spec = jax.sharding.PartitionSpec("model")
    for name, form in forms.items():
        np.testing.assert_allclose(mesh_chains.chain(devices, form, 3)(x), x, rtol=1e-2 if "bf16" in name else 1e-6)
        split = jax.shard_map(form, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
        parts = np.stack([x, 2 * x]).reshape(6, 16)
        wanted = 2 * parts if name == "nothing" else np.concatenate([3 * x] * 2)
        np.testing.assert_allclose(split(parts), wanted, rtol=1e-2 if "bf16" in name else 1e-6)
    assert "permute_add_f32" not in mesh_chains.reductions(4)


def test_low_rank_forms_compute_the_same():
    devices = make_mesh(2)
    x, weights = (random_normed(shape, jnp.dtype("bfloat16"), devices, 1) for shape in ((3, 64), (8, 32, 64)))
    whole, split = (mesh_chains.low_rank_chain(devices, split, 2)(x, weights) for split in (False, True))
    np.testing.assert_allclose(whole.astype(jnp.float32), split.astype(jnp.float32), rtol=0.05, atol=0.02)
    assert np.abs((whole - x).astype(jnp.float32)).max() > 0.1


@pytest.mark.parametrize("layout", ["tensor", "expert"])
def test_random_weights_do_not_depend_on_the_mesh(layout):
    """Padding aside, the arrays of four ranks are those of one device, with the variance that they should have."""
    config = mesh.preset("tiny").config
    alone = random_target(config, jnp.dtype("float32"), None, 3)
    split = random_target(config, jnp.dtype("float32"), make_mesh(4), 3, layout)
    for wanted, found in zip(jax.tree.leaves(alone), jax.tree.leaves(split), strict=True):
        found = np.asarray(found).reshape(-1, *wanted.shape[1:]) if found.ndim > wanted.ndim else np.asarray(found)
        assert np.array_equal(found[tuple(map(slice, wanted.shape))], wanted)
    assert np.std(alone["moe"]["o"]) * np.sqrt(alone["moe"]["o"].shape[-1]) == pytest.approx(1, rel=0.02)
    other = random_target(config, jnp.dtype("float32"), None, 4)
    assert not np.array_equal(alone["experts"]["down"], other["experts"]["down"])


def test_comparisons_name_the_first_difference():
    assert mesh_step.compare_tokens([1, 2, 3], [1, 2, 3])["first_difference"] is None
    assert mesh_step.compare_tokens([1, 2, 3], [1, 5, 4]) == {
        "tokens": 3, "tokens_identical": False, "first_difference": 1
    }  # fmt: skip
    found = mesh_step.compare_logits(np.array([[1.0, -3.0], [0.0, 2.0]]), np.array([[1.0, -2.5], [2.0, 1.0]]))
    assert found == {"largest_logit_difference": 2.0, "largest_logit": 3.0, "same_argmax": 1}


def test_collectives_are_found_by_device():
    """Kernels of collectives on the streams of GPU planes; other lines repeat them, other kernels are not counted."""
    event = lambda name, nanoseconds: SimpleNamespace(name=name, duration_ns=nanoseconds)
    stream = SimpleNamespace(
        name="Stream #20(Compute)",
        events=[event("ncclDevKernel_AllReduce_Sum_f32", 2000), event("fusion_3", 9), event("OneShotKernel", 500)] * 4,
    )
    other = SimpleNamespace(name="XLA Ops", events=stream.events)
    planes = [SimpleNamespace(name=f"/device:GPU:{number}", lines=[stream, other]) for number in range(2)]
    host = SimpleNamespace(name="/host:CPU", lines=[stream])
    rows = mesh_kernels.summarise(mesh_kernels.events_of(SimpleNamespace(planes=[*planes, host])), 2)
    assert [(row["device"], row["kernel"]) for row in rows] == [
        (f"/device:GPU:{number}", name)
        for number in range(2)
        for name in ("OneShotKernel", "ncclDevKernel_AllReduce_Sum_f32")
    ]
    assert rows[1]["per_step"] == 2 and rows[1]["median_us"] == 2.0 and rows[1]["total_us_per_step"] == 4.0


def test_tiny_run_gives_every_part_and_keeps_no_array(command, tmp_path):
    output, before = tmp_path / "mesh.json", len(jax.live_arrays())
    code, lines, errors = command("--preset", "tiny", "--mesh", "2", "--output", output)
    assert (code, errors) == (0, [])
    rows = json.loads(lines[-1])["rows"]
    assert rows == json.loads(output.read_text())["rows"] == [json.loads(line) for line in lines[:-1]]
    assert {row["part"] for row in rows} == {"sum", "low_rank", "tokens", "step", "kernels"}
    assert len(jax.live_arrays()) <= before + 8
    exact = [row for row in rows if row.get("dtype") == "float32"]
    assert [row["tokens_identical"] for row in exact if row["part"] == "tokens"] == [True]
    (split,) = [row for row in exact if row["part"] == "step" and row["devices"] == 2]
    assert split["largest_logit_difference"] <= 1e-5 < split["largest_logit"] and split["same_argmax"] == 3
    assert all("GPU" in row["failure"] for row in rows if row["part"] == "kernels")


def test_module_is_the_command(monkeypatch, capsys):
    """`python -m jddtree.benchmarks.mesh` takes the same options and ends with the same errors."""
    assert mesh.main(["--preset", "huge", "--mesh", "2"]) == 1
    assert capsys.readouterr().err.startswith("error: --preset is 'huge'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "1"), "--mesh is 1"),
        (("--mesh", "9"), "--mesh is 9"),
        (("--preset", "large", "--mesh", "2"), "--preset is 'large'"),
        (("--output", "."), "--output . is a folder"),
    ],
)
def test_arguments_that_cannot_be_used(command, arguments, message):
    code, lines, errors = command(*arguments)
    assert (code, lines) == (1, []) and errors[0].startswith(f"error: {message}")
