"""Decoding with the bundled micro model: tokens per second, acceptance, and the gap between dispatches.

The same prompts are decoded with engines that run R rounds a dispatch. A dispatch takes R rounds and a gap,
so the line through the dispatch times at several R has the time of a round as its slope and the gap as its
value at R = 0.

With a mesh the target and drafter are split over its devices, and every row says whether the tokens are those
of one device: same_as_one_device, and first_difference, [prompt, place] of the first token that is not.

python -m jddtree.benchmarks.decoding.dispatches --prompts ids.json --output docs/results/decode-h200.json
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from converters.dflash import drafter_parameters, load_drafter
from converters.kimi import load_target
from jddtree import results, strict_json
from jddtree.benchmarks.kernels.sizes import check_output, numbers
from jddtree.benchmarks.step.rank.presets import bundled
from jddtree.config import dflash_config, target_config
from jddtree.decoding.calibration import read_calibration
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.program import Program
from jddtree.decoding.state import Capacity
from jddtree.errors import UserError
from jddtree.limits import check_sizes
from jddtree.models.parameters import Tree, nest, target_parameters
from jddtree.models.partition import on_mesh, place
from jddtree.parallel.mesh import AXIS, make_mesh
from jddtree.results import Row
from jddtree.serving.generation import timed
from jddtree.stats import economy
from pallas_kernels.common.choice import IMPLEMENTATIONS

ROUNDS = (1, 2, 4, 8, 16)
CONTEXT = 1024
COLUMNS = {
    "rounds_per_dispatch": "d",
    "rounds": "d",
    "nodes_per_round": ".1f",
    "acceptance_length": ".2f",
    "expected_tokens_per_round": ".2f",
    "tokens_per_s": ".1f",
    "dispatch_ms": ".3f",
    "round_ms": ".3f",
    "gap_ms": ".3f",
    "gap_percent": ".1f",
    "compile_s": ".1f",
    "same_tokens": "",
}


class Decoded(NamedTuple):
    """tokens: of every prompt; seconds: of every dispatch that ran all its rounds; spent: of all dispatches;
    found: what `stats.economy` says of all rounds.
    """

    tokens: list[list[int]]
    rounds: int
    seconds: list[float]
    spent: float
    found: dict[str, float | None]


def engines(
    dtype: str, budget: int, rounds: Sequence[int], kernels: str = "auto", mesh: Mesh | None = None
) -> Iterator[tuple[int, Engine]]:
    """An engine over the bundled pair for each number of rounds per dispatch; mesh: None is one device."""
    target, drafter = target_config(bundled("target")), dflash_config(bundled("drafter"))
    kind, axis = np.dtype(jnp.dtype(dtype)), None if mesh is None else AXIS
    arrays = (
        load_target(bundled("target"), target, kind)[0],
        load_drafter(bundled("drafter"), drafter, kind)[0],
    )
    tables = target_parameters(target), drafter_parameters(drafter)

    def put(part: int) -> Tree:
        if mesh is None:
            return jax.device_put(nest(arrays[part]))
        return place(arrays[part], on_mesh(tables[part], mesh.size, "tensor", target.num_moe_layers), mesh)

    weights = {"target": put(0), "drafter": put(1)}
    rows = max(-(-(budget + 1) // 8) * 8, drafter.block_size)
    calibration = read_calibration(bundled("target").parent / "calibration.json")
    for count in rounds:
        capacity = Capacity(rows=rows, candidates=rows - 1, context=CONTEXT, rounds=count)
        program = Program(target, drafter, capacity, kernels, axis)
        yield count, Engine(program, weights, jnp.dtype(dtype), mesh, calibration)


def measure(
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    budget: int,
    made: Iterator[tuple[int, Engine]],
    alone: Engine | None = None,
) -> list[Row]:
    """A row for each engine; prompts: token ids; alone: an engine on one device, to compare those of a mesh
    with.
    """
    requests = [Request(prompt, max_tokens, budget=budget) for prompt in prompts]
    one_device = None if alone is None else _decode(alone, requests).tokens
    rows, expected = [], None
    for count, engine in made:
        decode = partial(_decode, engine, requests)
        decode()
        found = decode()
        expected = expected or found.tokens
        if not found.seconds:
            raise UserError(
                f"no dispatch ran all its {count} rounds with {max_tokens} tokens; raise --max-tokens"
            )
        emitted = sum(map(len, found.tokens)) - len(prompts)
        rows.append(
            {
                "rounds_per_dispatch": count,
                "budget": budget,
                "rounds": found.rounds,
                "acceptance_length": emitted / found.rounds,
                **found.found,
                "dispatch_ms": 1e3 * statistics.median(found.seconds),
                "compile_s": engine.compile_seconds,
                "same_tokens": found.tokens == expected,
                **_compared(engine, found.tokens, one_device),
            }
        )
    return with_gaps(rows)


def with_gaps(rows: Sequence[Row]) -> list[Row]:
    """The rows with round_ms and gap_ms of the line through all dispatch times, least squares, and
    gap_percent.
    """
    if len(rows) < 2:
        raise UserError("gaps follow from at least 2 numbers of rounds per dispatch, 1 was given")
    slope, gap = np.polyfit(
        [row["rounds_per_dispatch"] for row in rows], [row["dispatch_ms"] for row in rows], 1
    )
    gap = max(float(gap), 0.0)
    return [
        row | {"round_ms": float(slope), "gap_ms": gap, "gap_percent": 100 * gap / row["dispatch_ms"]}
        for row in rows
    ]


def read_ids(path: Path) -> list[list[int]]:
    """Prompts from a JSON list of lists of token ids."""
    try:
        prompts = strict_json.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--prompts {path} cannot be read: {error}") from None
    if (
        not isinstance(prompts, list)
        or not prompts
        or not all(isinstance(prompt, list) and prompt for prompt in prompts)
    ):
        raise UserError(f"--prompts {path} must hold a JSON list of lists of token ids")
    return prompts


def _decode(engine: Engine, requests: Sequence[Request]) -> Decoded:
    tokens, seconds, spent = [], [], 0.0
    nodes: list[int] = []
    emitted: list[int] = []
    plans: list[tuple[float, float]] = []
    for request in requests:
        dispatches = engine.decode([request])
        ids = next(dispatches).ids()
        for took, dispatch in timed(dispatches):
            rounds = dispatch.tokens[0]
            spent += took
            nodes += dispatch.nodes[0]
            plans += dispatch.plans[0]
            emitted += map(len, rounds)
            if len(rounds) == engine.program.capacity.rounds:
                seconds.append(took)
            ids += dispatch.ids()
        tokens.append(ids)
    found = economy(nodes, emitted, [tokens for tokens, _ in plans], [seconds for _, seconds in plans], spent)
    return Decoded(tokens, len(emitted), seconds, spent, found)


def _compared(engine: Engine, tokens: list[list[int]], one_device: list[list[int]] | None) -> Row:
    if one_device is None or engine.mesh is None:
        return {}
    places = (
        [prompt, place]
        for prompt, pair in enumerate(zip(tokens, one_device, strict=True))
        for place, (found, wanted) in enumerate(zip_longest(*pair))
        if found != wanted
    )
    first = next(places, None)
    return {"mesh": engine.mesh.size, "same_as_one_device": first is None, "first_difference": first}


def bundled_prompts() -> list[list[int]]:
    """The bundled prompts as token ids."""
    # Imported on use: a GPU machine that only measures may lack what tokenizers need.
    from jddtree.inputs import read_prompts
    from jddtree.loading import load

    return read_prompts(load(with_drafter=False), None)


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jddtree.benchmarks.decoding.dispatches", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--prompts", type=Path, help="JSON list of lists of token ids; default the bundled prompts"
    )
    parser.add_argument("--rounds", default=",".join(map(str, ROUNDS)), help="rounds per dispatch")
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kernels", default="auto", choices=IMPLEMENTATIONS)
    parser.add_argument("--mesh", type=int, help="split over so many devices, and compare with one")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(given)
    try:
        check_sizes(vars(chosen))
        check_output(chosen.output)
        prompts = read_ids(chosen.prompts) if chosen.prompts else bundled_prompts()
        counts = numbers("--rounds", chosen.rounds, ROUNDS, 64)
        made = partial(engines, chosen.dtype, chosen.budget, kernels=chosen.kernels)
        mesh, alone = None if chosen.mesh is None else make_mesh(chosen.mesh), None
        if mesh is not None:
            _, alone = next(made(counts[:1]))
        rows = measure(prompts, chosen.max_tokens, chosen.budget, made(counts, mesh=mesh), alone)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if chosen.output is not None:
        results.write(chosen.output, rows)
    columns = COLUMNS if mesh is None else COLUMNS | {"same_as_one_device": ""}
    sys.stdout.write(f"{results.table(rows, columns)}\n{json.dumps(results.record(rows))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
