"""The whole step at full size: one rank of eight of Kimi K2.6 on one GPU, with random weights and no
collectives, or, with --mesh 8, all eight on the GPUs of one host, with collectives.

python -m jddtree.benchmarks.step --output docs/results/step-h200.json

Two processes measure one after the other, each with the device to itself: the first by the wall clock, with
command buffers; the second, unless --no-profile, by kernel (CUPTI sees none inside a command buffer). This
process holds no device: it joins their rows, prints them and writes the file again after each, so that an end
at any moment keeps what was measured. Expected on an H200, five numbers of tokens and three contexts: about 3
minutes by the wall clock and 3 by kernel, a minute each of it compiling; set JAX_COMPILATION_CACHE_DIR to
compile once for several runs.

Rows: stage "verify", "draft", "build", "walk", "commit", "round" (time of one), "prefill", with tokens,
context, routing, time_ms, floor_ms and ratio (`account.floor`), peer_ms, launches, kernel_ms, kernels
(component to microseconds), host_percent (of a round: what waiting for the host between dispatches takes),
idle_percent (what no kernel fills otherwise), compile_seconds, memory_gb and more (`measuring`); stage
"ceiling" and "roofline" are the roofline card, "repeat" and "sweep" checks, "summary" sums up a number of
tokens. On a mesh, rows have mesh, its devices, and expert_layout as well; `mesh_profile` lists the kernels
that only the mesh has, and `account.overview.beside` says what splitting costs by the wall clock and how the
layouts compare. What fails has "failure", a text.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jddtree.benchmarks.step.account import overview as step_summary
from jddtree.benchmarks.step.joined_rows import KEY, join, line_of
from jddtree.errors import UserError
from jddtree.limits import check_sizes
from jddtree.user_files import check_new_file, check_new_folder, read_text

Row = dict[str, Any]
MODULE = "jddtree.benchmarks.step"
CLOCKS = ("wall", "kernels")
SETTINGS = (
    "preset",
    "world",
    "tokens",
    "context",
    "routing",
    "stages",
    "layers",
    "experts",
    "mesh",
    "expert_layout",
    "dtype",
    "kernels",
    "seed",
    "threads",
)


def arguments() -> argparse.ArgumentParser:
    """The options, which are those of `run.py bench step` as well."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="kimi-k2.6", help="kimi-k2.6 or tiny")
    parser.add_argument("--world", type=int, default=8, help="ranks that share the model; one of them runs")
    parser.add_argument("--tokens", help="rows of the tree, default 1,9,17,33,65")
    parser.add_argument("--context", help="committed tokens and rows, default 4096,32768,131072")
    parser.add_argument(
        "--routing",
        default="uniform",
        help="how rows choose experts: uniform, zipf or trace (a trained router's); several with commas",
    )
    parser.add_argument(
        "--stages", help="verify,draft,build,walk,commit,round,prefill,repeat,sweep; default all"
    )
    parser.add_argument("--layers", type=int, help="only so many of the target's layers")
    parser.add_argument("--experts", type=int, help="only so many routed experts a layer")
    parser.add_argument(
        "--mesh", type=int, help="run all ranks on so many devices; then --world is the same number"
    )
    parser.add_argument(
        "--expert-layout",
        default="tensor",
        help=(
            "slices of every expert on each rank of the mesh (tensor), whole ones (expert), or both with "
            "a comma"
        ),
    )
    parser.add_argument(
        "--rank", type=Path, help="results file of one of these ranks alone, to compare a mesh with"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8, help="programs compiled at a time")
    parser.add_argument(
        "--profile", action=argparse.BooleanOptionalAction, default=True, help="also time each kernel"
    )
    parser.add_argument(
        "--peers", type=Path, help="results of jddtree.benchmarks.peers step, or vLLM's kernels"
    )
    parser.add_argument("--output", type=Path, help="also write the rows to this results file")
    parser.add_argument(
        "--dump", type=Path, help="folder for the optimised HLO and the kernels of each stage"
    )
    parser.add_argument("--clock", choices=CLOCKS, help=argparse.SUPPRESS)  # what a measuring process is told
    return parser


def run(given: argparse.Namespace, show: Callable[[Row], None]) -> dict[str, Any]:
    """Measure in processes of their own; show: called with each row as it is done or completed.

    Returns the results record. Raises UserError for wrong settings, with the process's own message.
    """
    peers, alone = _peers(given.peers), _rank_rows(given.rank)
    check_new_file(given.output, "--output")
    check_new_folder(given.dump, "--dump")
    script = Path(sys.argv[0])
    started = ["-m", MODULE] if script == Path(__file__) else [script.name]
    record: dict[str, Any] = {"command": " ".join(["python", *started, *sys.argv[1:]])}
    rows: dict[tuple[Any, ...], Row] = {}
    for layout in given.expert_layout.split(","):
        for clock in CLOCKS if given.profile else CLOCKS[:1]:
            for line in _process(given, clock, layout):
                if "stage" not in line:
                    record |= {key: value for key, value in line.items() if key != "command"}
                    continue
                joined = join(rows, line, peers)
                show(joined)
                if given.output is not None:
                    _write(given.output, record | {"rows": list(rows.values())})
            if record.get("platform") == "cpu":
                break
    if given.mesh is not None:
        for row in step_summary.beside(list(rows.values()), alone):
            show(join(rows, row))
    for row in step_summary.summaries(list(rows.values())):
        show(join(rows, row))
    record |= {"rows": list(rows.values())}
    if given.output is not None:
        _write(given.output, record)
    return record


def child(given: argparse.Namespace) -> None:
    """A measuring process: a line of JSON for what it runs on and for each row, on stdout."""
    from jddtree.benchmarks.clocks import cupti as timing

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the process that started this one ends it
    if given.clock == "kernels":
        timing.keep_kernels_apart()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    import jax

    from jddtree import results
    from jddtree.benchmarks.step import measuring as step_measure
    from jddtree.benchmarks.step.rank import settings as step_settings
    from jddtree.parallel.mesh import make_mesh

    begun = time.perf_counter()

    def say(text: str) -> None:
        sys.stderr.write(f"[{given.clock} {time.perf_counter() - begun:6.1f} s] {text}\n")
        sys.stderr.flush()

    settings = step_settings.settings(**{name: getattr(given, name) for name in SETTINGS})
    marks: Row = {}
    if settings.mesh is not None:
        make_mesh(settings.mesh)  # too few devices are said before anything is measured
        marks = {"mesh": settings.mesh, "expert_layout": settings.expert_layout}
    _say(json.dumps(results.record([]) | {"platform": jax.default_backend()}))
    for row in step_measure.measure(settings, given.clock, say, given.dump):
        _say(json.dumps(row | marks))


def main(arguments_given: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    given = arguments().parse_args(arguments_given)
    try:
        if given.clock:
            child(given)
            return 0
        check_sizes(vars(given))
        check_new_file(given.output, "--output")
        check_new_folder(given.dump, "--dump")
        record = run(given, lambda row: _say(line_of(row)))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    _say(json.dumps(record))
    failed = [row for row in record["rows"] if "failure" in row]
    if failed:
        first = line_of(failed[0])
        sys.stderr.write(f"error: {len(failed)} of {len(record['rows'])} rows failed, first {first}\n")
    return 1 if failed else 0


def _process(given: argparse.Namespace, clock: str, layout: str) -> Iterator[Row]:
    """The lines of one measuring process; its end is a row with "failure" when it was not a good one"""
    values = {name: getattr(given, name) for name in SETTINGS} | {"expert_layout": layout}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
    options += [f"--dump={given.dump}"] if given.dump else []
    command = [sys.executable, "-m", MODULE, f"--clock={clock}", *options]
    seen = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    seen += 1
                    yield json.loads(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode and not seen:
        raise UserError(
            f"the process that measures by {clock} ended with {process.returncode}; its message is above"
        )
    if process.returncode:
        yield {"stage": f"end of {clock}", "failure": f"the process ended with {process.returncode}"}


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _peers(path: Path | None) -> list[Row]:
    from jddtree.benchmarks.kernels.peer_times import rows_of

    try:
        peers = [{"routing": "uniform"} | peer for peer in rows_of(path, "step")]
        return [{name: peer[name] for name in (*KEY[:4], "peer", "time_ms")} for peer in peers]
    except KeyError as error:
        raise UserError(
            f"--peers {path} has a row without {error}; see jddtree.benchmarks.peers step"
        ) from None


def _rank_rows(path: Path | None) -> list[Row]:
    if path is None:
        return []
    try:
        return json.loads(read_text(path, "--rank"))["rows"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"--rank {path} is no results file of bench step: {error!r}") from None


if __name__ == "__main__":
    sys.exit(main())
