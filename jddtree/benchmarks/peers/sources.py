"""Peers' rows for `bench kernels` and `bench step`: read from a file, or measured first.

Measuring happens in a process of its own, since torch and JAX each take the device's memory; nothing here needs torch.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from jddtree.errors import UserError
from jddtree.results import Row, read_rows

MODULE = "jddtree.benchmarks.peers"


def rows_of(path: Path | None, kind: str) -> list[Row]:
    """The rows of --peers PATH, none without one.

    path: a results file, a JSON list of rows, or a folder of vLLM's kernels, with which `kind` ("kernels" or "step") is
    measured now. UserError when the file cannot be used or the measurement fails.
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
