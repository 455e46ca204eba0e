"""Compiled programs that a later run loads instead of tracing, lowering and compiling them again.

JAX's own cache is asked after tracing and lowering, which take most of a warm start. A file here is named
after all that a program follows from: shapes, configurations, versions, device, processor, XLA's flags and
the sources of this package. Files are trusted as those of JAX's cache are: they stand in the user's own
folder, and loading runs them.
"""

import hashlib
import os
import pickle
import threading
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path

import jax
from jax.experimental import serialize_executable

from jddtree.decoding.program import Program
from jddtree.models.parameters import Tree
from jddtree.results import card
from jddtree.serving.user_cache import cache_folder

PACKAGES = ("jddtree", "pallas_kernels")


class KeptPrograms:
    """The programs of one engine on one device, by name."""

    def __init__(self, program: Program, weights: Tree, dtype: jax.typing.DTypeLike):
        arrays = [(array.shape, str(array.dtype)) for array in jax.tree.leaves(weights)]
        layout = jax.tree.structure(weights)
        parts = (program, arrays, layout, str(dtype), jax.__version__, *machine(), sources())
        self.folder = cache_folder() / "programs" / hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    def load(self, name: str) -> jax.stages.Compiled | None:
        """A program that was kept; None where there is none that can be used."""
        try:
            parts = pickle.loads((self.folder / name).read_bytes())
            return serialize_executable.deserialize_and_load(*parts, execution_devices=jax.devices()[:1])
        except FileNotFoundError:
            return None
        except Exception:  # whatever a damaged file or another build of XLA makes of it: compile again
            return None

    def save(self, name: str, program: jax.stages.Compiled) -> None:
        """Keep a program, in a thread of its own; where that is not possible there is none."""
        threading.Thread(target=self._save, args=(name, program)).start()

    def _save(self, name: str, program: jax.stages.Compiled) -> None:
        with suppress(OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            data = pickle.dumps(serialize_executable.serialize(program))
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f"{name}.{os.getpid()}"
            part.write_bytes(data)
            part.replace(self.folder / name)


def machine() -> tuple[str, str, str]:
    """What XLA compiles for: the device, the processor's abilities, and flags."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    abilities = next((line for line in lines if line.startswith("flags")), "")
    return card(), abilities, os.environ.get("XLA_FLAGS", "")


@cache
def sources() -> str:
    """Digest of the sources of this package: a changed one compiles anew."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted(Path(str(files(package))).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
