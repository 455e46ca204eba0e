"""`bench mesh` on two of eight CPU devices: every form of a sum is the same sum, weights are those of one
device.
"""

import json
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jddtree.benchmarks.mesh import __main__ as mesh
from jddtree.benchmarks.mesh import agreement as mesh_step
from jddtree.benchmarks.mesh import chains as mesh_chains
from jddtree.benchmarks.mesh import rank_kernels as mesh_kernels
from jddtree.benchmarks.mesh.device_weights import random_normed, random_target
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
        "nothing",
        "psum_f32",
        "psum_bf16",
        "gather_sum_f32",
        "scatter_gather_f32",
        "permute_add_f32",
    }
    spec = jax.sharding.PartitionSpec("model")
    for name, form in forms.items():
        np.testing.assert_allclose(
            mesh_chains.chain(devices, form, 3)(x), x, rtol=1e-2 if "bf16" in name else 1e-6
        )
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
    """Padding aside, the arrays of four ranks are those of one device, with the variance that they should
    have.
    """
    config = mesh.preset("tiny").config
    alone = random_target(config, jnp.dtype("float32"), None, 3)
    split = random_target(config, jnp.dtype("float32"), make_mesh(4), 3, layout)
    for wanted, found in zip(jax.tree.leaves(alone), jax.tree.leaves(split), strict=True):
        found = (
            np.asarray(found).reshape(-1, *wanted.shape[1:])
            if found.ndim > wanted.ndim
            else np.asarray(found)
        )
        assert np.array_equal(found[tuple(map(slice, wanted.shape))], wanted)
    assert np.std(alone["moe"]["o"]) * np.sqrt(alone["moe"]["o"].shape[-1]) == pytest.approx(1, rel=0.02)
    other = random_target(config, jnp.dtype("float32"), None, 4)
    assert not np.array_equal(alone["experts"]["down"], other["experts"]["down"])


def test_comparisons_name_the_first_difference():
    assert mesh_step.compare_tokens([1, 2, 3], [1, 2, 3])["first_difference"] is None
    assert mesh_step.compare_tokens([1, 2, 3], [1, 5, 4]) == {
        "tokens": 3,
        "tokens_identical": False,
        "first_difference": 1,
    }
    found = mesh_step.compare_logits(np.array([[1.0, -3.0], [0.0, 2.0]]), np.array([[1.0, -2.5], [2.0, 1.0]]))
    assert found == {"largest_logit_difference": 2.0, "largest_logit": 3.0, "same_argmax": 1}


def traced(kernels):
    """Planes of two devices whose streams hold (name, nanoseconds) twice over, with a line and a plane to
    leave out.
    """
    events = [
        SimpleNamespace(name=name, duration_ns=nanoseconds, start_ns=-number)
        for number, (name, nanoseconds) in enumerate(kernels * 2)
    ]
    stream, other = (SimpleNamespace(name=name, events=events) for name in ("Stream #20(Compute)", "XLA Ops"))
    planes = [SimpleNamespace(name=f"/device:GPU:{number}", lines=[stream, other]) for number in range(2)]
    return SimpleNamespace(planes=[*planes, SimpleNamespace(name="/host:CPU", lines=[stream])])


def test_every_kernel_of_a_step_is_listed_by_device():
    """Counts, medians and totals per step, and shares of the device's time; all streams of GPU planes,
    nothing else.
    """
    found = mesh_kernels.events_of(traced([("psum_3", 3000), ("fusion_3", 500), ("psum_3", 1000)]))
    assert [name for _, name, _ in found[:2]] == ["psum_3", "psum_3"] and found[-1][1:] == ("psum_3", 3000)
    rows = mesh_kernels.summarise(found, 2)
    named = [(row["device"], row["kernel"]) for row in rows]
    assert named == [
        (f"/device:GPU:{number}", name) for number in range(2) for name in ("fusion_3", "psum_3")
    ]
    assert rows[1] == rows[3] | {"device": "/device:GPU:0"} and rows[1]["share"] == pytest.approx(8 / 9)
    assert (rows[1]["per_step"], rows[1]["median_us"], rows[1]["total_us_per_step"]) == (2, 2.0, 4.0)


def test_kernels_of_the_mesh_alone_are_marked():
    """By name without the compiler's numbers; all of them are kept, and the longest of the others."""
    both = [(f"gemm_{letter}_{number}", 100 + number) for number, letter in enumerate("abcdefghijkl")]
    alone = mesh_kernels.summarise(mesh_kernels.events_of(traced(both)), 2)
    names = {mesh_kernels.plain(row["kernel"]) for row in alone}
    assert "gemm_a" in names and mesh_kernels.plain("nvjet_64x8.2_3") == "nvjet_64x8"
    numbered = [(f"{name}_7", time) for name, time in both]
    split = mesh_kernels.summarise(
        mesh_kernels.events_of(traced([*numbered, ("psum_1", 2), ("psum_2", 1)])), 2
    )
    rows = [row for row in mesh_kernels.rows_of(split, names) if row["device"] == "/device:GPU:1"]
    assert [row["kernel"] for row in rows if row["only_on_mesh"]] == ["psum_1", "psum_2"]
    assert [row["kernel"] for row in rows if not row["only_on_mesh"]] == [
        f"gemm_{letter}_{number}_7" for number, letter in reversed(list(enumerate("abcdefghijkl"))[2:])
    ]
    assert not any(row["only_on_mesh"] for row in mesh_kernels.rows_of(split, None))


def test_tiny_run_gives_every_part_and_keeps_no_array(command, tmp_path):
    output, before = tmp_path / "mesh.json", len(jax.live_arrays())
    code, lines, errors = command(
        "--preset", "tiny", "--mesh", "2", "--parts", "sum,low_rank,tokens,step", "--output", output
    )
    assert (code, errors) == (0, [])
    rows = json.loads(lines[-1])["rows"]
    assert rows == json.loads(output.read_text())["rows"] == [json.loads(line) for line in lines[:-1]]
    assert {row["part"] for row in rows} == {"sum", "low_rank", "tokens", "step"}
    assert len(jax.live_arrays()) <= before + 8
    exact = [row for row in rows if row.get("dtype") == "float32"]
    assert [row["tokens_identical"] for row in exact if row["part"] == "tokens"] == [True]
    (split,) = [row for row in exact if row["part"] == "step" and row["devices"] == 2]
    assert split["largest_logit_difference"] <= 1e-5 < split["largest_logit"] and split["same_argmax"] == 3


def test_kernels_alone_are_profiled_without_command_buffers(command, monkeypatch):
    """A profile without GPU planes is a failure of its row; other parts come after a process that
    profiles.
    """
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(mesh_kernels, "compile_steps", lambda case, rows, cache: {rows[0]: lambda *_: cache})
    code, lines, errors = command("--preset", "tiny", "--mesh", "2", "--parts", "kernels")
    assert (code, errors) == (0, []) and "--xla_gpu_enable_command_buffer= " in os.environ["XLA_FLAGS"]
    rows = json.loads(lines[-1])["rows"]
    assert [row["devices"] for row in rows] == [1, 2] and all("GPU" in row["failure"] for row in rows)


def test_other_parts_wait_for_the_process_that_profiles(command, monkeypatch):
    """Its rows come first; when it fails, the command says where to look."""
    started = []

    def run(arguments, **_):
        started.append(arguments[1:])
        return SimpleNamespace(returncode=len(started) - 1, stdout='x\n{"rows": [{"part": "kernels"}]}\n')

    monkeypatch.setenv("JDDTREE_COMMIT", "stated")  # or git would be run to find it
    monkeypatch.setattr(mesh.subprocess, "run", run)
    monkeypatch.setattr(
        mesh, "measure", lambda presets, devices, parts: iter([{"part": part} for part in parts])
    )
    code, lines, _ = command("--preset", "tiny", "--mesh", "2", "--parts", "sum,kernels")
    assert code == 0 and json.loads(lines[-1])["rows"] == [{"part": "kernels"}, {"part": "sum"}]
    assert started == [["-m", "jddtree.benchmarks.mesh", "--preset=tiny", "--mesh=2", "--parts=kernels"]]
    code, lines, errors = command("--preset", "tiny", "--mesh", "2")
    assert (code, lines) == (1, []) and "profiles kernels ended with 1" in errors[0]


def test_module_is_the_command(monkeypatch, capsys):
    """`python -m jddtree.benchmarks.mesh` takes the same options and ends with the same errors."""
    assert mesh.main(["--preset", "huge", "--mesh", "2", "--parts", "sum"]) == 1
    assert capsys.readouterr().err.startswith("error: --preset is 'huge'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "1", "--parts", "sum"), "--mesh is 1"),
        (("--mesh", "9", "--parts", "sum"), "--mesh is 9"),
        (("--preset", "large", "--mesh", "2", "--parts", "sum"), "--preset is 'large'"),
        (("--parts", "sums"), "--parts is 'sums'"),
        (("--output", "."), "--output . is a folder"),
    ],
)
def test_arguments_that_cannot_be_used(command, arguments, message):
    code, lines, errors = command(*arguments)
    assert (code, lines) == (1, []) and errors[0].startswith(f"error: {message}")
