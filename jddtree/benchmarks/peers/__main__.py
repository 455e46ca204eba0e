"""Measure the peers, or prepare for it: a table and one JSON object on stdout.

    pip download --no-deps vllm==0.23.0
    python -m jddtree.benchmarks.peers unpack vllm-0.23.0-*.whl FOLDER
    python -m jddtree.benchmarks.peers kernels --folder FOLDER --output docs/results/peers-kernels-h200.json
    python -m jddtree.benchmarks.peers step --folder FOLDER --output docs/results/peers-step-h200.json

Needs torch 2.11 with CUDA 13 and a GPU. `bench kernels` and `bench step` take either file, or FOLDER, as
--peers.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jddtree import results
from jddtree.benchmarks.kernels.printing import head, line
from jddtree.benchmarks.kernels.roofline import k26_rank
from jddtree.benchmarks.kernels.routings import routing
from jddtree.benchmarks.kernels.sizes import CONTEXTS, TOKENS, check_output, numbers
from jddtree.benchmarks.peers import library
from jddtree.errors import UserError
from jddtree.results import Row

WORLD = 8
HEADS = (8, 64)
STEP_TOKENS, STEP_CONTEXT = (1, 9, 17, 33, 65), 4096
COLUMNS = {
    "kernel": ("kernel", 14, ""),
    "stage": ("stage", 6, ""),
    "tokens": ("tokens", 6, "d"),
    "context": ("context", 7, "d"),
    "heads": ("heads", 5, "d"),
    "routing": ("routing", 8, ""),
    "experts": ("experts", 7, ".1f"),
    "peer": ("peer", 26, ""),
    "time_us": ("us", 8, ".1f"),
    "kernel_us": ("kernels", 8, ".1f"),
    "time_ms": ("ms", 7, ".2f"),
    "failure": ("failure", 7, ""),
}


def arguments() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m jddtree.benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    unpack = commands.add_parser("unpack", help="take the kernels out of a wheel of vLLM")
    unpack.add_argument("wheel", type=Path)
    unpack.add_argument("folder", type=Path)
    kernels = commands.add_parser("kernels", help="Marlin's GEMMs and FlashMLA")
    kernels.add_argument("--tokens", help="default 1,9,17,33,65,128,512")
    kernels.add_argument("--context", help="keys that attention reads, default 2048,16384,131072")
    kernels.add_argument("--heads", help="default 8,64")
    kernels.add_argument("--routing", default="uniform,skewed", help="as of bench kernels")
    step = commands.add_parser("step", help="a whole pass of one rank of eight")
    step.add_argument("--tokens", help="default 1,9,17,33,65")
    step.add_argument("--context", type=int, default=STEP_CONTEXT, help="keys, a multiple of 64")
    for command in (kernels, step):
        command.add_argument("--folder", type=Path, help=f"vLLM's kernels; default ${library.VARIABLE}")
        command.add_argument("--output", type=Path, help="also write the rows to this results file")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    chosen = arguments().parse_args(given)
    try:
        if chosen.command == "unpack":
            library.unpack(chosen.wheel, chosen.folder)
            return 0
        return _measure(chosen)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _measure(chosen: argparse.Namespace) -> int:
    """The options are checked before torch is imported; the file is written again after every row"""
    measured = {"kernels": _kernels, "step": _step}[chosen.command](chosen)
    check_output(chosen.output)
    card, versions = library.load(library.folder_of(chosen.folder))
    sys.stdout.write(head(COLUMNS) + "\n")
    rows: list[Row] = []
    for row in measured:
        rows.append(row)
        sys.stdout.write(line(row, COLUMNS) + "\n")
        sys.stdout.flush()
        if chosen.output is not None:
            results.write_record(chosen.output, results.record(rows, card, versions))
    sys.stdout.write(json.dumps(results.record(rows, card, versions)) + "\n")
    failed = [row for row in rows if "failure" in row]
    if failed:
        raise UserError(f"{len(failed)} of {len(rows)} rows failed, first: {failed[0]['failure']}")
    return 0


def _kernels(chosen: argparse.Namespace) -> Iterator[Row]:
    tokens = numbers("--tokens", chosen.tokens, TOKENS, 4096)
    contexts = numbers("--context", chosen.context, CONTEXTS, 2**21)
    heads = numbers("--heads", chosen.heads, HEADS, 128)
    routings = tuple(routing(name.strip()) for name in chosen.routing.split(","))
    _check_pages(contexts)

    def rows() -> Iterator[Row]:
        from jddtree.benchmarks.peers import kernel_times as kernels

        yield from kernels.expert_rows(k26_rank(WORLD), tokens, routings)
        yield from kernels.attention_rows(tokens, contexts, heads)

    return rows()


def _step(chosen: argparse.Namespace) -> Iterator[Row]:
    tokens = numbers("--tokens", chosen.tokens, STEP_TOKENS, 256)
    _check_pages([chosen.context])
    if chosen.context < max(tokens):
        raise UserError(f"--context is {chosen.context}, but must hold the {max(tokens)} rows of --tokens")

    def rows() -> Iterator[Row]:
        from jddtree.benchmarks.peers import rank_step

        yield from rank_step.measure(tokens, chosen.context)

    return rows()


def _check_pages(contexts: Sequence[int]) -> None:
    for context in contexts:
        if context < 64 or context % 64:
            raise UserError(
                f"--context is {context}, but FlashMLA reads pages of 64 keys: give a multiple of 64"
            )


if __name__ == "__main__":
    sys.exit(main())
