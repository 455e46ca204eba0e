"""Data that ships inside the package: gzipped JSON lines in `data/`; sources and licences are in
data/LICENSES.md.
"""

import gzip
import json
from importlib import resources
from typing import Any


def read_rows(name: str) -> list[dict[str, Any]]:
    """All rows of `data/<name>.jsonl.gz`, in the order of the file."""
    packed = resources.files("jddtree.evaluation").joinpath("data", f"{name}.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).decode("utf-8").split("\n") if line]
