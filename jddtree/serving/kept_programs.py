"""Compiled programs that a later run loads instead of tracing, lowering and compiling them again.

JAX's own cache is asked after tracing and lowering, which take most of a warm start. These stand in a folder
beside its files, each named after all that a program follows from: shapes, configurations, versions, device,
processor, XLA's flags and the sources of this package. Files are trusted as those of JAX's cache are: they
stand in the user's own folder, and loading runs them.
"""

import hashlib
import os
import pickle
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from jddtree.decoding.program import Program
from jddtree.models.parameters import Tree
from jddtree.results import card

PACKAGES = ("jddtree", "pallas_kernels")
FOLDER = "jddtree-programs"
MOST_ENGINES = 64


def kept_programs(program: Program, weights: Tree, dtype: jax.typing.DTypeLike) -> "KeptPrograms | None":
    """The kept programs of an engine; None where JAX keeps none or not in a folder, or under an observer."""
    folder = _setting("jax_compilation_cache_dir")
    if not folder or not _setting("jax_enable_compilation_cache") or program.observer is not None:
        return None
    if "://" in folder:  # JAX keeps its own in a bucket, and those alone
        return None
    return KeptPrograms(Path(folder) / FOLDER, program, weights, dtype)


class KeptPrograms:
    """The programs of one engine on one device, by name, in a folder of their own under `folder`."""

    def __init__(self, folder: Path, program: Program, weights: Tree, dtype: jax.typing.DTypeLike):
        arrays = [(array.shape, str(array.dtype)) for array in jax.tree.leaves(weights)]
        layout = jax.tree.structure(weights)
        parts = (program, arrays, layout, str(dtype), *versions(), *machine(), sources())
        self.folder = folder / hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    def load(self, name: str) -> jax.stages.Compiled | None:
        """A program that was kept; None where there is none that can be used."""
        try:
            executable, inputs, outputs = pickle.loads((self.folder / name).read_bytes())
            return serialize_executable.deserialize_and_load(
                executable, inputs, outputs, execution_devices=jax.devices()[:1]
            )
        except Exception:  # none yet, or whatever a damaged file or another build of XLA makes of it
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
            forget_oldest(self.folder.parent)

    @contextmanager
    def apart_from_jax(self) -> Iterator[None]:
        """Compile without JAX's own cache: what comes from there cannot be serialised again."""
        compilation_cache.reset_cache()
        jax.config.update("jax_enable_compilation_cache", False)
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            compilation_cache.reset_cache()


def forget_oldest(folder: Path) -> None:
    """Remove the folders of engines that were kept longest ago, past `MOST_ENGINES`."""
    engines = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in engines[MOST_ENGINES:]:
        shutil.rmtree(old, ignore_errors=True)


def versions() -> tuple[str, str, str, bool]:
    """JAX, its compilers, and what its configuration changes in a program."""
    precision = str(_setting("jax_default_matmul_precision"))
    return jax.__version__, jaxlib.__version__, precision, bool(_setting("jax_enable_x64"))


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


def _setting(name: str) -> Any:
    """Of JAX's configuration, whose type does not name them"""
    return getattr(jax.config, name)
