"""What is checked of a command's options before JAX is imported: sizes, options without effect, and where to
write.

Options that would have no effect beside others are refused as wrong usage (exit code 2), before anything
is loaded.

The rule: an option is refused when it was surely meant to change what is written and cannot, like a system
prompt beside --raw. Options that scripts give to every run of a sweep over methods or temperatures are
allowed: --seed and --top-p at temperature 0; --budget, --capacity, --draft and --no-coupling with any method.
--cost always has an effect, because statistics go by it. --dry-run may be put behind any conversion.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jddtree.command import Check
from jddtree.errors import UsageError
from jddtree.limits import check_sizes
from jddtree.user_files import check_new_file, check_new_folder

TREES = ("tree", "ddtree")
NEEDS_TASKS = ("limit", "allow_code", "system_prompt", "thinking", "stop", "ignore_eos")


def checked(*checks: Check) -> Check:
    """What `command` calls with a command's options: `check_options` with these checks."""
    return partial(_check_all, checks)


def _check_all(checks: tuple[Check, ...], options: Mapping[str, Any]) -> None:
    check_options(options, *checks)


def check_options(options: Mapping[str, Any], *checks: Check) -> None:
    """Raise UserError for options that cannot be used, UsageError for those without effect.

    checks: what else to check of the command, like `output_file` or `check_generate`.
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


def check_generate(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of `generate` that cannot have an effect."""
    _check_prompt(options)
    check_chat(options)


def check_chat(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of `chat` that cannot have an effect."""
    check_drafting(options)
    if options["check"] and options["target"] is None:
        raise UsageError(
            "--check compares the files of a store, but there is none without --target; leave it out"
        )


def check_eval(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of `eval` that cannot have an effect."""
    if options["compare"] is None:
        check_drafting(options)
    if options["tasks"] is None and (options["golden"] or options["perplexity"]):
        for name in NEEDS_TASKS:
            _refuse(options, name, "only says how --tasks are asked, but none are given")


def check_drafting(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of trees and drafts that the method or the temperature leaves without
    effect.
    """
    if options["method"] not in TREES:
        for name in ("spine", "top_k_cap"):
            _refuse(options, name, f"shapes trees, but --method {options['method']} builds none")
    if options["method"] == "ar":
        for name in ("tau", "calibration"):
            _refuse(options, name, "is about drafts, but --method ar makes none")
    if options["temperature"] == 0:
        _refuse(options, "tau", "is about drafts of sampled text, but at --temperature 0 nothing is sampled")
    if not options["coupling"]:
        _refuse(options, "tau", "is about coupled drafts, but --no-coupling turns them off")


def _check_prompt(options: Mapping[str, Any]) -> None:
    """The chat template is what --system-prompt and --thinking change; --raw and ids go without it."""
    if options["prompt_ids"] is not None:
        for name in ("raw", "system_prompt", "thinking"):
            _refuse(options, name, "is about text, but --prompt-ids are used as they are")
    if options["raw"]:
        for name in ("system_prompt", "thinking"):
            _refuse(options, name, "is for the chat template, but --raw goes without it")
        if options["messages"] is not None:
            raise UsageError(
                "--raw goes without the chat template, but --messages need it; leave out one of them"
            )


def _refuse(options: Mapping[str, Any], name: str, reason: str) -> None:
    """Raise UsageError when an option was given."""
    value = options[name]
    is_absent = value is False and name != "thinking"
    if value is None or value == [] or is_absent:
        return
    flag = "--no-thinking" if name == "thinking" and not value else f"--{name.replace('_', '-')}"
    raise UsageError(f"{flag} {reason}; leave it out")
