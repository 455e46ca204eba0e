"""Where the command starts: streams and Ctrl-C are taken care of before anything slow is imported."""

import os
import sys

from jddtree import streams
from jddtree.cli.ending import interrupts
from jddtree.errors import UserError


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        code = _run()
    except KeyboardInterrupt:
        code = interrupts.report()
    except Exception:
        if not interrupts.asked():
            raise
        code = interrupts.report()
    if code == interrupts.EXIT_CODE:
        os._exit(code)  # threads that compile would be waited for
    sys.exit(code)


def _run() -> int:
    try:
        streams.prepare()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    interrupts.install()
    from jddtree.cli.main import app, guarded

    return guarded(lambda: app(standalone_mode=False))
