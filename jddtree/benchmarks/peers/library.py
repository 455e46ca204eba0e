"""vLLM's compiled kernels: taken out of its wheel, and loaded into torch.

A folder holds the few files of the wheel that are needed; an option names it, or the environment variable
PEERS. Nothing of vLLM is part of this project, and the whole of it need not be installed.
"""

import os
import sys
import zipfile
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from jddtree.errors import UserError

VARIABLE = "PEERS"
WHEEL = "vllm==0.23.0"
MARLIN = "vllm/_moe_C.abi3.so"
PARTS = (
    MARLIN,
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/scalar_type.py",
    "vllm/third_party/flashmla/__init__.py",
    "vllm/third_party/flashmla/flash_mla_interface.py",
)
EMPTY = ("vllm/__init__.py", "vllm/third_party/__init__.py")  # in place of vLLM's own, which import all of it
METADATA = ".dist-info/METADATA"
ADVICE = f"pip download --no-deps {WHEEL}, then python -m jddtree.benchmarks.peers unpack WHEEL FOLDER"


def unpack(wheel: Path, folder: Path) -> None:
    """Take the files that are needed out of a wheel of vLLM. UserError for another file or a folder not to
    write to.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            metadata = [name for name in archive.namelist() if name.endswith(METADATA)]
            for name in (*PARTS, *metadata):
                archive.extract(name, folder)
        for name in EMPTY:
            (folder / name).touch()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel} cannot be unpacked into {folder} ({error}); get it by {ADVICE}") from None


def folder_of(option: Path | None) -> Path:
    """The folder of an option, else that of PEERS. UserError when there is none or it lacks a file."""
    stated = option or os.environ.get(VARIABLE)
    if not stated:
        raise UserError(
            f"no folder of vLLM's kernels: give --folder or set {VARIABLE}; to make one: {ADVICE}"
        )
    folder = Path(stated)
    missing = [name for name in (*PARTS, *EMPTY) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} has no {missing[0]}; make the folder anew: {ADVICE}")
    return folder.resolve()


def load(folder: Path) -> tuple[str, dict[str, str]]:
    """Load torch and the kernels of a folder into this process; returns the card's name, and versions by
    library.

    UserError when torch, a CUDA device or a library that the kernels are linked with is missing.
    """
    torch = _torch()
    if not torch.cuda.is_available():
        raise UserError(
            f"the peers are CUDA kernels and torch {torch.__version__} sees no CUDA device; run on a GPU"
        )
    sys.path.insert(0, str(folder))
    try:
        torch.ops.load_library(str(folder / MARLIN))
        import_module("vllm.third_party.flashmla.flash_mla_interface")
    except (OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"vLLM's kernels do not fit torch {torch.__version__} ({reason}); pip install 'torch==2.11.*'"
        ) from None
    return torch.cuda.get_device_name(), {"torch": torch.__version__, "vllm": _version(folder)}


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError as error:
        raise UserError(
            f"the peers need torch, which cannot be imported ({error}); pip install 'torch==2.11.*'"
        ) from None


def _version(folder: Path) -> str:
    found = [one.version for one in distributions(name="vllm", path=[str(folder)])]
    return found[0] if found else "unknown"
