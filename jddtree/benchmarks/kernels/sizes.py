"""What `bench kernels` is asked to do: sizes, lists of numbers and names, checked before anything is
measured.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jddtree.benchmarks.kernels.roofline import Sizes, k26_rank, tiny_rank
from jddtree.benchmarks.kernels.routings import Routing, routing
from jddtree.errors import UserError
from jddtree.user_files import check_new_file

KERNELS = ("expert", "attention")
TOKENS = (1, 9, 17, 33, 65, 128, 512)
CONTEXTS = (2048, 16384, 131072)
TINY_TOKENS = (1, 3, 9)
TINY_CONTEXTS = (128, 200)


@dataclass(frozen=True)
class Settings:
    """timed: measure times, on a GPU. interpret: no GPU is there, kernels are interpreted at tiny sizes.

    seed: of all random data, new in every run unless given.
    """

    sizes: Sizes
    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[int, ...]
    routings: tuple[Routing, ...]
    kernels: tuple[str, ...]
    timed: bool
    interpret: bool
    seed: int


def settings(
    *,
    world: int = 8,
    tokens: str | None = None,
    context: str | None = None,
    heads: str | None = None,
    routing_names: str = "uniform",
    kernels: str = "expert,attention",
    check: bool = False,
    on_gpu: bool,
    seed: int | None = None,
) -> Settings:
    """From the texts of the command line, None for the default; UserError for anything that cannot be
    measured.
    """
    if not on_gpu and not check:
        raise UserError(
            "bench kernels measures a GPU and JAX sees none; --check checks the kernels on this machine"
        )
    sizes = k26_rank(world)
    sizes = sizes if on_gpu else tiny_rank()
    default_heads = dict.fromkeys((sizes.rank_heads, sizes.heads) if on_gpu else (sizes.rank_heads,))
    return Settings(
        sizes=sizes,
        tokens=numbers("--tokens", tokens, TOKENS if on_gpu else TINY_TOKENS, 4096),
        contexts=numbers("--context", context, CONTEXTS if on_gpu else TINY_CONTEXTS, 2**21),
        heads=numbers("--heads", heads, tuple(default_heads), 128),
        routings=tuple(routing(name.strip()) for name in routing_names.split(",")),
        kernels=names("--kernels", kernels, KERNELS),
        timed=not check,
        interpret=not on_gpu,
        seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed,
    )


def numbers(option: str, text: str | None, default: Sequence[int], most: int) -> tuple[int, ...]:
    """Numbers with commas between them, from 1 to `most`; UserError that names the option otherwise."""
    if text is None:
        return tuple(default)
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < number <= most for number in found):
        raise UserError(
            f"{option} is {text!r}, but must be numbers from 1 to {most} with commas, like 1,9,33"
        )
    return tuple(dict.fromkeys(found))


def names(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """Names with commas between them, all that are known without a text; UserError for another one."""
    found = tuple(known) if text is None else tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not set(found) <= set(known):
        raise UserError(f"{option} is {text!r}, but must be of {','.join(known)}")
    return found


def check_output(path: Path | None) -> None:
    """UserError for a results file that could not be written after minutes of measuring."""
    check_new_file(path, "--output")
