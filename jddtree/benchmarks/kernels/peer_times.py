"""Times of other implementations beside ours: of `jddtree.benchmarks.peers`, or as rows of this run.

Measuring them happens in a process of its own, since torch and JAX each take the device's memory; nothing
here needs torch.

A peer is a row {kernel, tokens, context, heads, peer, time_us}, with context and heads null for experts;
"routing" is uniform unless given, "kernel_us" (without launches) is taken over when given.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jddtree.benchmarks.kernels import cublas as kernels_cublas
from jddtree.errors import UserError
from jddtree.results import Row, read_rows

MODULE = "jddtree.benchmarks.peers"
REQUIRED: dict[str, type | tuple[type, ...]] = {
    "kernel": str,
    "tokens": int,
    "peer": str,
    "time_us": (int, float),
}


def read(path: Path | None) -> list[Row]:
    """The peers in a file, or measured with the kernels of a folder (`rows_of`); none without a path.

    UserError for a file without such rows.
    """
    peers = rows_of(path, "kernels")
    for peer in peers:
        wrong = [key for key, kind in REQUIRED.items() if not isinstance(peer.get(key), kind)]
        if wrong:
            raise UserError(f"--peers {path} has a row without a proper {wrong[0]}: {json.dumps(peer)[:80]}")
    return peers


def rows_of(path: Path | None, kind: str) -> list[Row]:
    """The rows of --peers PATH, none without one.

    path: a results file, a JSON list of rows, or a folder of vLLM's kernels, with which `kind` ("kernels" or
    "step") is measured now. UserError when the file cannot be used or the measurement fails.
    """
    if path is None:
        return []
    if not path.is_dir():
        return read_rows(path, "--peers")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "peers.json"
        command = [sys.executable, "-m", MODULE, kind, "--folder", str(path), "--output", str(output)]
        ended = subprocess.run(command, stdout=sys.stderr, check=False)
        if ended.returncode:
            raise UserError(f"--peers {path}: measuring ended with {ended.returncode}; its message is above")
        return read_rows(output, "--peers")


def add_peers(groups: Iterable[list[Row]], peers: list[Row]) -> Iterator[list[Row]]:
    """Each group of rows, the peers of every row added; the plain layer is a peer of the expert layers after
    it.
    """
    known = list(peers)
    for rows in groups:
        known += [
            _plain(row) for row in rows if row["implementation"] == kernels_cublas.NAME and "time_us" in row
        ]
        yield [_with_peers(row, [peer for peer in known if _fits(peer, row)]) for row in rows]


def _plain(row: Row) -> Row:
    return row | {"kernel": "expert_layer", "peer": kernels_cublas.NAME}


def _fits(peer: Row, row: Row) -> bool:
    sizes = all(peer.get(key) == row[key] for key in ("kernel", "tokens", "context", "heads"))
    return sizes and peer.get("routing", "uniform") == (row["routing"] or "uniform")


def _with_peers(row: Row, peers: list[Row]) -> Row:
    """The row with its fastest peer as "peer" and "peer_us", and "peers" of all; as it is without any."""
    if not peers:
        return row
    fastest = min(peers, key=lambda peer: peer["time_us"])
    kernels_only = {"peer_kernel_us": fastest["kernel_us"]} if fastest.get("kernel_us") else {}
    times = {peer["peer"]: peer["time_us"] for peer in peers}
    return row | {"peer": fastest["peer"], "peer_us": fastest["time_us"], "peers": times} | kernels_only
