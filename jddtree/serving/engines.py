"""Engines for a model: which shapes a request needs, and the compiled programs of these shapes."""

from typing import Any

from jddtree.decoding.engine import Engine
from jddtree.decoding.program import Program
from jddtree.decoding.requests import Request
from jddtree.decoding.state import Capacity
from jddtree.loading import Model
from jddtree.parallel.mesh import AXIS
from jddtree.serving.kept_programs import kept_programs

ROW_TILE = 8
SMALLEST_CONTEXT = 2048


def default_capacity(model: Model, request: Request, **changes: Any) -> Capacity:
    """The smallest sensible compiled shapes for a request; `changes` replaces fields, None leaves them.

    A request whose node count is chosen as it goes gets smaller widths too, for plain decoding, a draft block
    and two.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    if model.drafter is None or (request.method == "ar" and "rows" not in given):
        rows = 1
    else:
        nodes = request.budget if request.method == "tree" else model.drafter.block_size - 1
        rows = max(-(-(nodes + 1) // ROW_TILE) * ROW_TILE, model.drafter.block_size)
    rows = given.pop("rows", rows)
    most = 1 if model.drafter is None else model.drafter.most_candidates
    candidates = min(max(rows - 1, 1), most)
    if request.top_k_cap is not None and 1 <= request.top_k_cap < candidates:
        candidates = request.top_k_cap
    if request.auto and request.method == "tree" and model.drafter is not None:
        block = model.drafter.block_size
        given.setdefault("widths", tuple(width for width in (1, block, 2 * block) if width < rows))
    wanted = max(len(request.prompt) + max(request.max_tokens, 1), SMALLEST_CONTEXT)
    context = min(1 << (wanted - 1).bit_length(), model.target.max_position_embeddings)
    return Capacity(**{"rows": rows, "candidates": candidates, "context": context, **given})


def program_for(model: Model, capacity: Capacity, kernels: str = "auto") -> Program:
    """What to compile for a capacity; without room for a node the drafter is left out."""
    drafter = model.drafter if capacity.rows > 1 else None
    return Program(model.target, drafter, capacity, kernels, AXIS if model.mesh else None)


def compile_engine(model: Model, capacity: Capacity, kernels: str = "auto") -> Engine:
    """Compile prefill and rounds for a capacity. Raises UserError when the capacity cannot work.

    Where JAX keeps compiled programs (`use_compile_cache`), those of one device are looked up there first.
    """
    program = program_for(model, capacity, kernels)
    weights = model.weights if program.drafter else {"target": model.weights["target"]}
    kept = None if model.mesh else kept_programs(program, weights, model.dtype)
    return Engine(program, weights, model.dtype, model.mesh, model.defaults.calibration, kept=kept)
