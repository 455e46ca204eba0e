"""Where each parameter goes on a mesh: specs from the one parameter table, and arrays put on the devices.

A split axis whose size ranks * unit does not divide is padded with zeros: a head, column, expert or id of
zeros adds nothing to any sum, and padded ids are never chosen. So 8 ranks can share 4 heads: four of them
hold a head of zeros. With the "expert" layout a rank holds whole experts, the same share of every layer; with
"tensor" a slice of each.
"""

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jddtree.models.parameters import Parameter, Tree, nest
from jddtree.parallel.mesh import AXIS


def on_mesh(table: dict[str, Parameter], ranks: int, layout: str, layers: int) -> dict[str, Parameter]:
    """The table as a mesh of `ranks` holds it: padded shapes, and experts as [layers, experts, ...] in the
    "expert" layout.

    layers: MoE layers of the target.
    """
    return {
        path: _padded(_experts(path, parameter, layout, layers), ranks) for path, parameter in table.items()
    }


def spec(parameter: Parameter) -> P:
    """The partition spec of a parameter."""
    return P() if parameter.split is None else P(*[None] * parameter.split, AXIS)


def place(arrays: dict[str, np.ndarray], table: dict[str, Parameter], mesh: Mesh) -> Tree:
    """Put whole host arrays on the devices of a mesh as `table` (from `on_mesh`) says; every device gets its
    slices.
    """
    return nest({path: _place(arrays[path], parameter, mesh) for path, parameter in table.items()})


def _experts(path: str, parameter: Parameter, layout: str, layers: int) -> Parameter:
    if layout == "tensor" or not path.startswith("experts."):
        return parameter
    shape = (layers, parameter.shape[0] // layers, *parameter.shape[1:])
    return replace(parameter, shape=shape, split=1, unit=1)


def _padded(parameter: Parameter, ranks: int) -> Parameter:
    if parameter.split is None:
        return parameter
    shape, step = list(parameter.shape), parameter.unit * ranks
    shape[parameter.split] = -(-shape[parameter.split] // step) * step
    return replace(parameter, shape=tuple(shape))


def _place(array: np.ndarray, parameter: Parameter, mesh: Mesh) -> jax.Array:
    """Each device's slice is cut, and padded where it reaches past the array, when jax asks for it"""
    if array.ndim < len(parameter.shape):
        array = array.reshape(parameter.shape[0], -1, *array.shape[1:])

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # only for arrays without a sharding
        piece = array[index]
        wanted = [len(range(*cut.indices(size))) for cut, size in zip(index, parameter.shape, strict=True)]
        return np.pad(piece, [(0, want - have) for want, have in zip(wanted, piece.shape, strict=True)])

    return jax.make_array_from_callback(parameter.shape, NamedSharding(mesh, spec(parameter)), part)
