"""The command line: parses before JAX is imported; what a command does stands in the module named beside
it.
"""

from typing import Annotated

import typer

from jddtree.cli.checks import check_chat, check_eval, check_generate, checked, output_file, output_folder
from jddtree.cli.ending.guard import guarded as guarded
from jddtree.cli.measurements import bench
from jddtree.cli.options import (
    CalibrateOptions,
    ChatOptions,
    ConvertOptions,
    EvalOptions,
    EvalRequestOptions,
    GenerateOptions,
    InspectOptions,
    ModelOptions,
    OneProcessOptions,
    PromptOptions,
    QuietOptions,
    RequestOptions,
    RunOptions,
    ShapeOptions,
    TraceOptions,
)
from jddtree.command import command

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Kimi K2.6 with DDTree speculative decoding in JAX. Without --target the bundled micro model runs.",
)
app.add_typer(bench, name="bench")


def _version(value: bool) -> None:
    if value:
        from jddtree.results import version_line

        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print versions and the device."),
    ] = False,
) -> None:
    """Options before the command."""


ASKED = (ModelOptions, RequestOptions, ShapeOptions)
COMMANDS = {
    "generate": (
        "Write text. The answer goes to stdout as rounds finish, progress and statistics to stderr.",
        (PromptOptions, *ASKED, RunOptions, GenerateOptions, QuietOptions),
        checked(check_generate),
    ),
    "chat": (
        "A conversation in the terminal. A turn reads only what is new; /help lists its commands.",
        (*ASKED, OneProcessOptions, ChatOptions),
        checked(check_chat),
    ),
    "eval": (
        "Score tasks, compare methods, check recorded outputs, measure perplexity. Run again, it resumes.",
        (EvalOptions, ModelOptions, EvalRequestOptions, ShapeOptions, RunOptions, QuietOptions),
        checked(check_eval, output_folder),
    ),
    "trace": (
        "Draw the draft tree of one round of a generation.",
        (TraceOptions, ModelOptions),
        checked(output_file),
    ),
    "inspect": ("Say what a checkpoint folder holds and how much memory it needs.", (InspectOptions,), None),
    "convert": (
        "Turn checkpoint folders into a store; run again, it resumes.",
        (ConvertOptions, QuietOptions),
        None,
    ),
    "calibrate": (
        "Fit what the drafter's scores are worth; --budget auto goes by it.",
        (ModelOptions, CalibrateOptions),
        checked(output_file),
    ),
}
MODULES = {"chat": "conversation"}  # where a command's name is another module's already
for name, (text, groups, check) in COMMANDS.items():
    module = f"jddtree.cli.{MODULES.get(name, name)}"
    app.command(name, help=text)(command(f"{module}:run", *groups, check=check))
