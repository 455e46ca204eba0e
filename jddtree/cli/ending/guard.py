"""What the end of a command means: one line and an exit code.

0 done, 1 something given cannot be used (`UserError`) or stdout cannot be written, 2 wrong usage, 130 Ctrl-C.
A closed pipe ends the command silently, with 1.
"""

import sys
from collections.abc import Callable

import typer

from jddtree import streams
from jddtree.cli.ending import interrupts
from jddtree.errors import UsageError, UserError


def guarded(command: Callable[[], object]) -> int:
    """Run a command and return the exit code that its end means; see the module."""
    try:
        code = _ended(command)
        sys.stdout.flush()
    except BrokenPipeError:
        code = 1
    except UserError as error:
        code = say(error)
    except KeyboardInterrupt:
        code = interrupts.EXIT_CODE
    written = streams.finish_answer()
    if code == interrupts.EXIT_CODE:
        return interrupts.report()
    return code if written else max(code, 1)


def say(error: UserError) -> int:
    """Print an error, pass it on to the other processes of this run, and return its exit code."""
    print(f"error: {error}", file=sys.stderr)
    _tell_others(str(error))
    return 2 if isinstance(error, UsageError) else 1


def _ended(command: Callable[[], object]) -> int:
    """The exit code of a command; whatever is raised after Ctrl-C comes from it."""
    try:
        result = command()
        return result if isinstance(result, int) else 0
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return interrupts.EXIT_CODE
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:
        if interrupts.asked():
            return interrupts.EXIT_CODE
        return _shown(error)


def _shown(error: Exception) -> int:
    """Usage errors of the parser, whose classes Typer keeps private, know how to show themselves."""
    show = getattr(error, "show", None)
    if show is None:
        raise error
    show()
    return getattr(error, "exit_code", 2)


def _tell_others(message: str) -> None:
    """Pass a failure on to the other processes of this run, if JAX was started at all."""
    if "jax" in sys.modules:
        from jddtree.parallel.processes import fail

        fail(message)
