"""How long a newcomer waits: seconds from the command to its first character, cold and warm.

python run.py bench start --output docs/results/start-cpu.json

Rows: start ("cold": nothing was compiled before; "warm": the command ran once), runs, and of these the
median, the least and the most seconds to the first character on standard output, and the median to the
end. Each cold run has an empty cache folder of its own; files of Python and the weights are in the page
cache of the system.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median

from jddtree import results
from jddtree.errors import UserError
from jddtree.results import Row

GENERATE = (sys.executable, str(results.ROOT / "run.py"), "generate")
COLUMNS = {"start": "", "runs": "d", "first_s": ".2f", "least_s": ".2f", "most_s": ".2f", "end_s": ".2f"}


def measure(command: Sequence[str], runs: int, progress: Callable[[], object] = lambda: None) -> list[Row]:
    """A row of cold starts and one of warm ones, `runs` of each, of a command that writes to standard output.

    progress: called after each pair. Raises UserError when the command fails or writes nothing.
    """
    cold, warm = [], []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="jddtree-start-") as cache:
            cold.append(start(command, cache))
            warm.append(start(command, cache))
        progress()
    return [_row("cold", cold), _row("warm", warm)]


def start(command: Sequence[str], cache: str) -> tuple[float, float]:
    """Seconds to the first character of a command whose cache folder is `cache`, and to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = cache
    begun = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        character = process.stdout.read(1) if process.stdout else b""
        first = time.perf_counter() - begun
        process.communicate()
    if process.returncode or not character:
        raise UserError(
            f"{' '.join(command)} wrote {character!r} and ended with {process.returncode}; run it alone"
        )
    return first, time.perf_counter() - begun


def _row(name: str, seconds: Sequence[tuple[float, float]]) -> Row:
    firsts = [first for first, _ in seconds]
    return {
        "start": name,
        "runs": len(seconds),
        "first_s": median(firsts),
        "least_s": min(firsts),
        "most_s": max(firsts),
        "end_s": median(end for _, end in seconds),
    }
