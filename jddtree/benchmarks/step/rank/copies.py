"""Copies of weights in optimised HLO: what a layer loop must not hold, since a copied weight is read twice
and written.

An instruction that runs as a kernel of its own (outside fused computations) and whose result has the shape of
a weight, whole or of one layer, has made a copy of it: a `copy`, a `dynamic-slice`, a conversion, or a fusion
of those. Slices inside a fusion that goes on to use them are not copies.
"""

import math
import re
from collections.abc import Iterable

LEAST = 2**20  # elements; smaller weights cost less than the kernel that would copy them
PASSED_ON = (
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "conditional",
    "call",
    "optimization-barrier",
    "constant",
    "iota",
    "broadcast",
    "copy-done",
    "async-done",
    "domain",
    "after-all",
)
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
RESULT = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\(")
ARRAY = re.compile(r"\w+\[([\d,]+)\]")
INNER = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")


def weight_copies(hlo: str, shapes: Iterable[tuple[int, ...]], least: int = LEAST) -> list[str]:
    """The instructions that copy a weight, as "opcode name shape".

    shapes: of the weights, whole stacks; those of one layer of them count as well. least: elements of the
    smallest weight that matters.
    """
    wanted = {
        _plain(shape)
        for whole in shapes
        for shape in (whole, whole[1:])
        if len(_plain(shape)) > 1 and math.prod(shape) >= least
    }
    fused, found, inside = _fused(hlo), [], ""
    for line in hlo.splitlines():
        if opened := COMPUTATION.match(line):
            inside = opened[1]
        elif (made := RESULT.match(line)) and inside not in fused and made[3] not in PASSED_ON:
            copied = [array for array in ARRAY.findall(made[2]) if _plain(_numbers(array)) in wanted]
            found += [f"{made[3]} {made[1]} [{array}]" for array in copied[:1]]
    return found


def _fused(hlo: str) -> set[str]:
    """Computations that are part of a kernel, not a sequence of kernels"""
    names = set()
    for line in hlo.splitlines():
        made = RESULT.match(line)
        if made and made[3] not in ("call", "while", "conditional"):
            names.update(INNER.findall(line))
    return names


def _numbers(array: str) -> tuple[int, ...]:
    return tuple(int(part) for part in array.split(","))


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without axes of one entry, and whatever the order of the axes"""
    return tuple(sorted(size for size in shape if size > 1))
