"""What splitting a model over devices costs, and that it changes nothing: rows of
docs/results/mesh-h200x2.json.

python -m jddtree.benchmarks.mesh [--preset NAMES] [--mesh N] [--parts NAMES] [--output FILE], as `run.py
bench mesh` but without its command line's packages. Rows by "part": "sum" and "low_rank" (`mesh_chains`),
"tokens" and "step" (`mesh_step`), "kernels" (`mesh_kernels`). Kernels are profiled in a process of their own,
without command buffers and before this one takes the devices; `--parts kernels` alone is such a process.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from converters.synthetic import preset_config
from jddtree import results
from jddtree.benchmarks.clocks import cupti as timing
from jddtree.benchmarks.kernels.sizes import check_output, names
from jddtree.benchmarks.mesh import agreement as mesh_step
from jddtree.benchmarks.mesh import chains as mesh_chains
from jddtree.benchmarks.mesh import rank_kernels as mesh_kernels
from jddtree.benchmarks.mesh.device_weights import random_target
from jddtree.config import TargetConfig, target_config
from jddtree.errors import UserError
from jddtree.limits import check_sizes
from jddtree.loading import bundled, load
from jddtree.models.parameters import Tree
from jddtree.parallel.mesh import make_mesh
from jddtree.results import Row

SEED = 0
PARTS = ("sum", "low_rank", "tokens", "step", "kernels")
MODULE = "jddtree.benchmarks.mesh"


@dataclass(frozen=True)
class Preset:
    """Sizes to measure. trained: the weights of the bundled target instead of random ones; chains: also
    measure these, at the target's widths; length: steps of a chain; steps: rows of a verify step.
    """

    config: TargetConfig
    trained: bool
    chains: tuple[int, ...]
    length: int
    steps: tuple[int, ...]
    context: int
    tokens: int


def preset(name: str) -> Preset:
    """Raises UserError for a name that is not known."""
    if name == "micro":
        return Preset(target_config(bundled("target")), True, (), 0, (1, 9, 33), 1024, 64)
    if name == "k2.6-4layer":
        config = preset_config("k2.6", {"num_hidden_layers": 4})
        return Preset(config, False, (1, 9, 33, 65), 122, (1, 9, 33), 4096, 32)
    if name == "tiny":
        return Preset(preset_config("micro", {"num_hidden_layers": 2}), False, (3,), 4, (3,), 16, 4)
    raise UserError(f"--preset is {name!r}, but must be of micro, k2.6-4layer, tiny")


def measure(presets: Sequence[str], devices: int, parts: Sequence[str] = PARTS) -> Iterator[Row]:
    """The rows of each preset as they are measured. Raises UserError for a mesh of one device."""
    if devices < 2:
        raise UserError(f"--mesh is {devices}, but bench mesh compares one device with at least 2")
    mesh = make_mesh(devices)
    for name, sizes in [(name, preset(name)) for name in presets]:
        for row in _measure(sizes, mesh, parts):
            yield {"preset": name} | row


def _measure(sizes: Preset, mesh: Mesh, parts: Sequence[str]) -> Iterator[Row]:
    config = sizes.config
    if sizes.chains and "sum" in parts:
        yield from mesh_chains.measure_reductions(mesh, sizes.chains, config.hidden_size, sizes.length)
    if sizes.chains and "low_rank" in parts:
        low = config.q_lora_rank + config.latent_size
        yield from mesh_chains.measure_low_rank(mesh, sizes.chains, config.hidden_size, low, sizes.length)
    weights: Callable[[jnp.dtype, Mesh | None], Tree] = _trained
    if not sizes.trained:
        weights = partial(_random, config)
    steps, tokens = sizes.steps if "step" in parts else (), sizes.tokens if "tokens" in parts else 0
    if steps or tokens:
        yield from mesh_step.measure(config, weights, mesh.size, steps, sizes.context, tokens)
    if "kernels" in parts:
        yield from mesh_kernels.measure(config, weights, mesh.size, max(sizes.steps), sizes.context)


def _trained(dtype: jnp.dtype, mesh: Mesh | None) -> Tree:
    return load(dtype=dtype.name, mesh=1 if mesh is None else mesh.size, with_drafter=False).weights["target"]


def _random(config: TargetConfig, dtype: jnp.dtype, mesh: Mesh | None) -> Tree:
    return random_target(config, dtype, mesh, SEED)


def run(presets: str | None, devices: int | None, parts: str | None, output: Path | None) -> None:
    """Print each row as it is measured, then one JSON object; keep the file up to date, so that an early end
    costs one row.
    """
    check_output(output)
    wanted = names("--parts", parts, PARTS)
    rows = []
    for row in _rows(presets, devices, wanted):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if output is not None:
            results.write(output, rows)
    print(json.dumps(results.record(rows)))


def _rows(presets: str | None, devices: int | None, parts: Sequence[str]) -> Iterator[Row]:
    if parts == ("kernels",):
        timing.keep_kernels_apart()
    elif "kernels" in parts:
        yield from _kernels(presets, devices)
        parts = [part for part in parts if part != "kernels"]
    default = "micro,k2.6-4layer" if jax.default_backend() == "gpu" else "tiny"
    given = [name.strip() for name in (presets or default).split(",")]
    yield from measure(given, devices or len(jax.devices()), parts)


def _kernels(presets: str | None, devices: int | None) -> list[Row]:
    """The rows of a process that profiles; what it says on stderr is shown"""
    given = {"preset": presets, "mesh": devices, "parts": "kernels"}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    made = subprocess.run(
        [sys.executable, "-m", MODULE, *options], stdout=subprocess.PIPE, text=True, check=False
    )
    if made.returncode:
        raise UserError(
            f"the process that profiles kernels ended with {made.returncode}; its message is above"
        )
    return json.loads(made.stdout.splitlines()[-1])["rows"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command without typer; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--preset")
    parser.add_argument("--mesh", type=int)
    parser.add_argument("--parts", help=f"{','.join(PARTS)}; default all")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    try:
        check_sizes(vars(given))
        run(given.preset, given.mesh, given.parts, given.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
