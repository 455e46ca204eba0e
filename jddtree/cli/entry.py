"""Where the command starts: streams and Ctrl-C are taken care of before anything slow is imported."""

import os
import sys

from jddtree import streams
from jddtree.cli.ending import interrupts
from jddtree.errors import UserError

EMITTERS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters,xla_cpu_disable_loop_unrolling"
"""XLA's older emitters of CPU fusions, without unrolled loops, compile in a third of the time, and what they
make runs as fast; other devices have none.
"""


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
    interrupts.ignore()
    sys.exit(code)


def _run() -> int:
    try:
        streams.prepare()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    interrupts.install()
    compile_soon()
    from jddtree.cli.main import app, guarded

    return guarded(lambda: app(standalone_mode=False))


def compile_soon() -> None:
    """Have XLA compile for the CPU by its faster emitters, unless the user chose options of the kind."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_extra_options" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {EMITTERS}".strip()
