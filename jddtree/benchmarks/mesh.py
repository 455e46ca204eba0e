"""What splitting a model over devices costs, and that it changes nothing: rows of docs/results/mesh-h200x2.json.

python -m jddtree.benchmarks.mesh [--preset NAMES] [--mesh N] [--output FILE], as `run.py bench mesh` but without its
command line's packages. Rows by "part": "sum" and "low_rank" (`mesh_chains`), "tokens", "step" and "kernels"
(`mesh_step`).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from converters.synthetic import preset_config
from jddtree.benchmarks import mesh_chains, mesh_step, results
from jddtree.benchmarks.kernels_settings import check_output
from jddtree.benchmarks.mesh_weights import random_target
from jddtree.benchmarks.results import Row
from jddtree.config import TargetConfig, target_config
from jddtree.errors import UserError
from jddtree.loading import bundled, load
from jddtree.models.parameters import Tree
from jddtree.parallel.mesh import make_mesh

SEED = 0


@dataclass(frozen=True)
class Preset:
    """Sizes to measure. trained: the weights of the bundled target instead of random ones; chains: also measure these,
    at the target's widths; length: steps of a chain; steps: rows of a verify step.
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


def measure(names: Sequence[str], devices: int) -> Iterator[Row]:
    """The rows of each preset as they are measured. Raises UserError for a mesh of one device."""
    if devices < 2:
        raise UserError(f"--mesh is {devices}, but bench mesh compares one device with at least 2")
    mesh = make_mesh(devices)
    for name, sizes in [(name, preset(name)) for name in names]:
        for row in _measure(sizes, mesh):
            yield {"preset": name} | row


def _measure(sizes: Preset, mesh: Mesh) -> Iterator[Row]:
    config = sizes.config
    if sizes.chains:
        low = config.q_lora_rank + config.latent_size
        yield from mesh_chains.measure_reductions(mesh, sizes.chains, config.hidden_size, sizes.length)
        yield from mesh_chains.measure_low_rank(mesh, sizes.chains, config.hidden_size, low, sizes.length)
    weights: Callable[[jnp.dtype, Mesh | None], Tree] = _trained
    if not sizes.trained:
        weights = partial(_random, config)
    yield from mesh_step.measure(config, weights, mesh.size, sizes.steps, sizes.context, sizes.tokens)


def _trained(dtype: jnp.dtype, mesh: Mesh | None) -> Tree:
    return load(dtype=dtype.name, mesh=1 if mesh is None else mesh.size, with_drafter=False).weights["target"]


def _random(config: TargetConfig, dtype: jnp.dtype, mesh: Mesh | None) -> Tree:
    return random_target(config, dtype, mesh, SEED)


def run(presets: str | None, devices: int | None, output: Path | None) -> None:
    """Print each row as it is measured, then one JSON object; keep the file up to date, so that an early end costs one
    row.
    """
    check_output(output)
    default = "micro,k2.6-4layer" if jax.default_backend() == "gpu" else "tiny"
    names = [name.strip() for name in (presets or default).split(",")]
    rows = []
    for row in measure(names, devices or len(jax.devices())):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if output is not None:
            results.write(output, rows)
    print(json.dumps(results.record(rows)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command without typer; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jddtree.benchmarks.mesh", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--preset")
    parser.add_argument("--mesh", type=int)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    try:
        run(given.preset, given.mesh, given.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
