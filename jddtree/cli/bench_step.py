"""`bench step`, `bench round` and `bench decode`: hand their options to modules that run without Typer as well."""

from collections.abc import Mapping
from typing import Any

from jddtree.cli import interrupts

ROUND_STAGES = "verify,draft,build,walk,commit,round"


def run_step(options: Mapping[str, Any]) -> int:
    """Run `jddtree.benchmarks.step` with the options of `jddtree.cli.main.bench_step`; returns the exit code."""
    from jddtree.benchmarks.step import __main__ as step

    interrupts.keep()
    return step.main(_words(options))


def run_decode(options: Mapping[str, Any]) -> int:
    """Run `jddtree.benchmarks.decoding.dispatches` with the options of `jddtree.cli.main.bench_decode`; returns the exit code."""
    from jddtree.benchmarks.decoding import dispatches as decode

    return decode.main(_words(options))


def _words(options: Mapping[str, Any]) -> list[str]:
    """The options as words of a command line; None is left out, a flag has no value"""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words
