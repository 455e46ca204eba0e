"""The tasks by name; anything that looks like a path is the user's own file."""

import os
from collections.abc import Callable

from jddtree.errors import UserError
from jddtree.evaluation.tasks.coding import MBPP, HumanEval
from jddtree.evaluation.tasks.definition import Task
from jddtree.evaluation.tasks.lines import StdlibLines
from jddtree.evaluation.tasks.mathematics import GSM8K, Math500
from jddtree.evaluation.tasks.reasoning import PREFIX, read_name
from jddtree.evaluation.tasks.userfile import read_user_file

TASKS: tuple[tuple[str, Callable[[], Task]], ...] = (
    ("humaneval", HumanEval),
    ("mbpp", MBPP),
    ("gsm8k", GSM8K),
    ("math500", Math500),
    ("stdlib_lines", StdlibLines),
    ("stdlib_line_ends", lambda: StdlibLines("stdlib_line_ends", given=0.7)),
)


def task_names() -> tuple[str, ...]:
    """The names that `get_task` knows, in the order of the documentation."""
    return tuple(name for name, _ in TASKS)


def get_task(name_or_path: str, *, allow_code: bool) -> Task:
    """A task by name, reasoning-gym's included, or the user's: what ends in .jsonl, holds a path separator or
    is one.

    UserError for an unknown name, a file that cannot be used, and a task that runs the model's code without
    allow_code.
    """
    makers = dict(TASKS)
    if name_or_path in makers:
        return _allowed(makers[name_or_path](), allow_code)
    if name_or_path.startswith(PREFIX):
        return _allowed(read_name(name_or_path), allow_code)
    if name_or_path.endswith(".jsonl") or os.sep in name_or_path or os.path.isfile(name_or_path):
        return read_user_file(name_or_path)
    names = ", ".join(task_names())
    raise UserError(
        f"task {name_or_path!r} is unknown; the tasks are {names}, {PREFIX}NAME, or give the path of a "
        ".jsonl file"
    )


def _allowed(task: Task, allow_code: bool) -> Task:
    if task.needs_code and not allow_code:
        raise UserError(
            f"task {task.name} runs programs that the model writes; add --allow-code to accept that, "
            "after reading in docs/evaluation.md what the sandbox does not protect from"
        )
    return task
