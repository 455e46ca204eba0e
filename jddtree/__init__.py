"""Kimi K2.6 with DDTree speculative decoding in JAX: the public API.

Three levels, each on top of the next:
* text: `load`, then `generate` (a string in, a `Result` out) or `stream` (pieces as rounds finish), and
  `prepare` for an engine that serves many;
* ids: `Request`, `compile_engine` and `Engine.start` / `Engine.run`, token ids in and out, a dispatch of
rounds at a time;
* arrays: `jddtree.decoding.rounds`, the pure functions `prefill` and `run_rounds` that the engine compiles.
Names are imported when first used, so that `import jddtree` does not start JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jddtree.version import VERSION

if TYPE_CHECKING:
    from jddtree.api import generate, prepare, stream
    from jddtree.decoding.engine import Engine, Request
    from jddtree.decoding.state import Capacity
    from jddtree.errors import UserError
    from jddtree.loading import Model, load
    from jddtree.serving.engines import compile_engine
    from jddtree.serving.transcript import Piece, Result, Statistics

__version__ = VERSION
_HOMES = {
    "generate": "jddtree.api",
    "prepare": "jddtree.api",
    "stream": "jddtree.api",
    "Engine": "jddtree.decoding.engine",
    "Request": "jddtree.decoding.engine",
    "Piece": "jddtree.serving.transcript",
    "Result": "jddtree.serving.transcript",
    "Statistics": "jddtree.serving.transcript",
    "compile_engine": "jddtree.serving.engines",
    "Capacity": "jddtree.decoding.state",
    "UserError": "jddtree.errors",
    "Model": "jddtree.loading",
    "load": "jddtree.loading",
}
__all__ = [
    "Capacity",
    "Engine",
    "Model",
    "Piece",
    "Request",
    "Result",
    "Statistics",
    "UserError",
    "compile_engine",
    "generate",
    "load",
    "prepare",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'jddtree' has no attribute {name!r}")
