"""`bench kernels`: the roofline card, a row per kernel and size as it is measured, one JSON object as the
last line.
"""

import json
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

from jddtree import results
from jddtree.benchmarks.clocks import cupti as timing
from jddtree.benchmarks.kernels import peer_times as kernels_peers
from jddtree.benchmarks.kernels import printing as table
from jddtree.benchmarks.kernels import sizes as kernels_settings
from jddtree.benchmarks.kernels import suite as kernels
from jddtree.benchmarks.kernels.sizes import Settings
from jddtree.cli.bench_options import KernelOptions
from jddtree.cli.ending import interrupts
from jddtree.errors import UserError
from jddtree.results import Row


def run(options: KernelOptions) -> None:
    """Run the command. UserError at the end when a configuration failed."""
    interrupts.keep()
    timing.keep_kernels_apart()
    known = kernels_peers.read(options.peers)  # before JAX takes the device
    settings = kernels_settings.settings(
        world=options.world,
        tokens=options.tokens,
        context=options.context,
        heads=options.heads,
        routing_names=options.routing,
        kernels=options.kernels,
        check=options.check,
        on_gpu=jax.default_backend() == "gpu",
    )
    kernels_settings.check_output(options.output)
    rows = _measure(settings, known, options.output)
    print(json.dumps(results.record(rows)))
    _require_all(rows)


def _measure(settings: Settings, peers: list[Row], output: Path | None) -> list[Row]:
    """Print while measuring, and keep the file up to date, so that what ends the run early costs one
    configuration.
    """
    print(
        f"{results.card()}, jax {jax.__version__}, python {platform.python_version()}, seed {settings.seed}\n"
    )
    ceilings, rows = kernels.ceilings(settings)
    if ceilings is not None:
        rates = (
            f"copy {ceilings.copy / 1e12:.2f} TB/s (read plus written), read {ceilings.read / 1e12:.2f} TB/s"
        )
        print(f"Measured: {rates}, bfloat16 matmul {ceilings.matmul / 1e12:.0f} TFLOP/s\n")
    print(table.head(table.CARD))
    for row in kernels.card(settings, ceilings):
        print(table.line(row, table.CARD))
    print("\n" + table.head(table.RESULTS), flush=True)
    for group in kernels.measure(settings, ceilings, peers):
        for row in group:
            print(table.line(row, table.RESULTS), flush=True)
        rows += group
        if output is not None:
            results.write(output, rows)
    print()
    return rows


def _require_all(rows: Sequence[Row]) -> None:
    failed = [row for row in rows if "failure" in row]
    if failed:
        first = failed[0]
        where = f"{first['kernel']} {first['implementation']} at {first['tokens']} tokens"
        raise UserError(f"{len(failed)} of {len(rows)} rows failed, first {where}: {first['failure']}")
