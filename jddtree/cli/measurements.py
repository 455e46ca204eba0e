"""`bench`: every measurement that a user can run, with the module that does it."""

from collections.abc import Callable
from importlib import import_module

import typer

from jddtree.cli.bench_options import (
    AutoOptions,
    CouplingOptions,
    KernelOptions,
    MethodsOptions,
    SpeculationOptions,
    StartOptions,
)
from jddtree.cli.checks import checked, output_file
from jddtree.cli.ending import interrupts
from jddtree.cli.options import ModelOptions
from jddtree.command import command

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure: a table, then one JSON object as the last line.",
)
HERE = "jddtree.cli.bench"
THERE = "jddtree.benchmarks"
CHECK = checked(output_file)

bench.command(
    "generate", help="Rounds, acceptance length and speed of ar, chain and tree over a set of prompts."
)(command(f"{HERE}.methods_table:run", ModelOptions, MethodsOptions, check=CHECK))
bench.command(
    "kernels", help="Time the GPU kernels against what the card can do, and check them. Needs a GPU."
)(command(f"{HERE}.kernel_table:run", KernelOptions, check=CHECK))
bench.command(
    "speculation", help="What the trees are worth: acceptance, ranks, calibration, experts, budgets."
)(command(f"{HERE}.tree_worth:run", ModelOptions, SpeculationOptions, check=CHECK))
bench.command(
    "coupling", help="Tokens per round with and without drafting by the target's own sampling noise."
)(command(f"{HERE}.coupled:run", ModelOptions, CouplingOptions, check=CHECK))
bench.command(
    "start", help="Seconds from the command to its first character, with and without compiled programs."
)(command(f"{HERE}.starting:run", StartOptions, check=CHECK))
bench.command("auto", help="Node counts chosen round by round against every fixed count, by cost curves.")(
    command(f"{HERE}.node_counts:run", ModelOptions, AutoOptions, check=CHECK)
)

FORWARD = {"ignore_unknown_options": True, "allow_extra_args": True}
# These have a parser of their own, so that `python -m` runs them where Typer is not installed.
PARSED_THERE = {
    "step": (
        f"{THERE}.step.__main__",
        "The whole step of one rank of Kimi K2.6 with random weights, against its memory floor. Needs an "
        "H200.",
    ),
    "decode": (
        f"{THERE}.decoding.dispatches",
        "The micro model with 1 to 16 rounds per dispatch: tokens per second, acceptance, gaps in between.",
    ),
    "mesh": (
        f"{THERE}.mesh.__main__",
        "What splitting over devices costs: time per sum, steps and tokens on one and on several.",
    ),
    "traces": (
        f"{THERE}.traces",
        "The bundled pair on this device against the traces of the published code.",
    ),
    "ngram": (f"{THERE}.decoding.prompt_lookup", "Acceptance of prompt lookup, prompt by prompt."),
}


def _forwarded(module: str) -> Callable[[typer.Context], int]:
    """A command whose words go to `main` of a module as they are"""

    def call(context: typer.Context) -> int:
        interrupts.keep()
        return import_module(module).main(context.args)

    return call


for name, (module, text) in PARSED_THERE.items():
    bench.command(name, help=text, context_settings=FORWARD, add_help_option=False)(_forwarded(module))
