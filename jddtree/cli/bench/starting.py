"""`bench start`: seconds from a command to its first character, as a table and one JSON object."""

import json

from jddtree import results
from jddtree.benchmarks.decoding import start
from jddtree.cli.bench_options import StartOptions
from jddtree.cli.terminal.progress import progress_bar


def run(options: StartOptions) -> None:
    """Run the command."""
    with progress_bar(total=options.runs, desc="Cold and warm starts") as bar:
        rows = start.measure(start.GENERATE, options.runs, bar.update)
    print(results.table(rows, start.COLUMNS))
    if options.output is not None:
        results.write(options.output, rows)
    print(json.dumps(results.record(rows)))
