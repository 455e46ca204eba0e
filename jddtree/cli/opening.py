"""From the options of a command to a loaded model, with a bar in bytes."""

from jddtree.cli.options import ModelOptions
from jddtree.cli.terminal.progress import Bars
from jddtree.loading import Model, load


def open_model(
    options: ModelOptions, silent: bool, *, with_drafter: bool = True, check: bool = False
) -> Model:
    """Load what the options name. check: compare a store's files with their checksums first.

    Raises UserError for whatever cannot be used.
    """
    with Bars(silent, "Loading ") as bar:
        return load(
            options.target,
            options.draft,
            dtype=options.dtype,
            with_drafter=with_drafter,
            mesh=options.mesh,
            expert_layout=options.expert_layout,
            check=check,
            progress=bar.update,
        )
