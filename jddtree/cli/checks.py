"""What is checked of a command's options before JAX is imported: sizes, options without effect, and where to
write.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jddtree.command import Check
from jddtree.limits import check_sizes
from jddtree.user_files import check_new_file, check_new_folder


def checked(*checks: Check) -> Check:
    """What `command` calls with a command's options: `check_options` with these checks."""
    return partial(_check_all, checks)


def _check_all(checks: tuple[Check, ...], options: Mapping[str, Any]) -> None:
    check_options(options, *checks)


def check_options(options: Mapping[str, Any], *checks: Check) -> None:
    """Raise UserError for options that cannot be used, UsageError for those without effect.

    checks: what else to check of the command, like `output_file` or a function of `jddtree.cli.conflicts`.
    """
    check_sizes(options)
    for check in checks:
        check(options)
    for name in ("plot", "dump"):
        check_new_folder(options.get(name), f"--{name}")


def output_file(options: Mapping[str, Any]) -> None:
    """Raise UserError where --output is no file that can be written."""
    check_new_file(options["output"], "--output")


def output_folder(options: Mapping[str, Any]) -> None:
    """Raise UserError where --output is no folder that can be written into; only --tasks write there."""
    if options["tasks"] is not None:
        check_new_folder(options["output"], "--output")
