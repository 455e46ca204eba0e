"""`bench step`: hands its options to `jddtree.benchmarks.step`, which runs where Typer is missing as well."""

from collections.abc import Mapping
from typing import Any

from jddtree.benchmarks import step


def run(options: Mapping[str, Any]) -> int:
    """Run with the options of `jddtree.cli.main.bench_step`; returns the exit code."""
    given = {name: value for name, value in options.items() if value is not None and name != "profile"}
    words = [f"--{name}={value}" for name, value in given.items()]
    return step.main([*words, "--profile" if options["profile"] else "--no-profile"])
