"""Routings to measure experts with: NumPy only, so that a peer's script can use the same ones.

A routing is int32 [tokens, top_k], distinct experts in each row. uniform: every expert equally likely.
skewed: an expert's popularity falls as 1 / rank, so that some get far more than eight tokens. FILE.json: a
list of rows, as a router chose them; successive windows of it are used.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jddtree import strict_json
from jddtree.errors import UserError

COUNT = 4


@dataclass(frozen=True)
class Routing:
    """Where routings come from. rows: those of a file, int32 [n, top_k]."""

    name: str
    rows: np.ndarray | None = None

    def draw(
        self, tokens: int, experts: int, top_k: int, seed: int = 3, count: int = COUNT
    ) -> list[np.ndarray]:
        """`count` routings; the same ones for the same arguments. One token, uniform: disjoint ones, as many
        as fit.
        """
        if self.rows is not None:
            return self._windows(tokens, experts, top_k, count)
        if tokens == 1 and self.name == "uniform":
            order = np.random.default_rng([seed, 1]).permutation(experts)
            return list(order[: experts // top_k * top_k].reshape(-1, 1, top_k).astype(np.int32))
        return [
            self._random(np.random.default_rng([tokens, i, seed]), tokens, experts, top_k)
            for i in range(count)
        ]

    def _random(self, rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
        popularity = -np.log(rng.permutation(experts) + 1.0)
        scores = rng.gumbel(size=(tokens, experts)) + (popularity if self.name == "skewed" else 0.0)
        return np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)

    def _windows(self, tokens: int, experts: int, top_k: int, count: int) -> list[np.ndarray]:
        assert self.rows is not None
        if self.rows.shape[1] != top_k or len(self.rows) < tokens or self.rows.max() >= experts:
            needed = f"{tokens} rows of {top_k} experts below {experts}"
            raise UserError(
                f"--routing {self.name} must hold {needed}, has {self.rows.shape}, up to {self.rows.max()}"
            )
        return [self.rows[i * tokens : (i + 1) * tokens] for i in range(min(count, len(self.rows) // tokens))]


def routing(name: str) -> Routing:
    """uniform, skewed, or what a JSON file holds; UserError if it is none of them."""
    if name in ("uniform", "skewed"):
        return Routing(name)
    try:
        rows = np.asarray(strict_json.read(Path(name)))
    except FileNotFoundError:
        raise UserError(
            f"--routing is {name!r}, but must be uniform, skewed or a JSON file that exists"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"--routing {name} cannot be read: {error}") from None
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer) or rows.size == 0 or rows.min() < 0:
        raise UserError(f"--routing {name} must hold a JSON list of rows of expert numbers")
    if any(len(set(row)) < len(row) for row in rows.tolist()):
        raise UserError(f"--routing {name} has a row that names an expert twice")
    return Routing(name, rows.astype(np.int32))


def touched(ids: np.ndarray) -> int:
    """Distinct experts."""
    return len(np.unique(ids))


def most_tokens(ids: np.ndarray) -> int:
    """Tokens of the most wanted expert."""
    return int(np.bincount(ids.ravel()).max())
