"""What the tests of models and decoding share: the micro pair, runs of an engine, and counts of compilations."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from converters.dflash import load_drafter
from converters.kimi import load_target
from jddtree.benchmarks.step_clocks import compilations as compilations
from jddtree.config import DFlashConfig, TargetConfig, dflash_config, target_config
from jddtree.decoding import stages
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.program import Program
from jddtree.decoding.sampling import Sampling
from jddtree.decoding.state import Capacity, State
from jddtree.models.drafters.dflash import Caches, DFlashProposer
from jddtree.models.parameters import Tree, nest
from jddtree.models.target import Rows, Target
from jddtree.parallel.vocabulary import Vocabulary
from pallas_kernels.tree_attention import causal_words

REFERENCE_EPS = 1e-6  # of the q_a and kv_a norms in the reference arrays, as in transformers
TOLERANCE = 2e-4  # absolute, float32 against the reference (shared golden README: safe when no router choice flips)
SMALL = {"sequences": 4, "rows": 9, "candidates": 8, "context": 160, "rounds": 4, "chunk": 16}
WIDE = {"sequences": 7, "rows": 65, "candidates": 64, "context": 384, "rounds": 8, "chunk": 64, "widths": (1, 9, 33)}


class Pair(NamedTuple):
    """A target and its drafter, loaded."""

    target: TargetConfig
    drafter: DFlashConfig
    weights: Tree
    dtype: type

    def program(self, **fields: int) -> Program:
        """The program of a capacity given by its fields."""
        return Program(self.target, self.drafter, Capacity(**fields))

    def engine(self, capacity: Capacity) -> Engine:
        """A newly compiled engine."""
        return Engine(Program(self.target, self.drafter, capacity), self.weights, self.dtype)


class Run(NamedTuple):
    """A decoded sequence: tokens with the first one, tokens emitted and nodes used per round, and why it ended."""

    tokens: list[int]
    lengths: list[int]
    nodes: list[int]
    finish: str | None


def load_pair(target: Path, drafter: Path, dtype: type) -> Pair:
    """Load a pair with the eps of the reference arrays."""
    configs = target_config(target, latent_norm_eps=REFERENCE_EPS), dflash_config(drafter)
    arrays = load_target(target, configs[0], dtype)[0], load_drafter(drafter, configs[1], dtype)[0]
    return Pair(*configs, jax.device_put({"target": nest(arrays[0]), "drafter": nest(arrays[1])}), dtype)


def decode(engine: Engine, requests: Sequence[Request]) -> list[Run]:
    """Decode any number of requests, as many at a time as the engine has sequences."""
    size = engine.program.capacity.sequences
    batches = [list(requests[begin : begin + size]) for begin in range(0, len(requests), size)]
    return [run for batch in batches for run in finish_batch(engine, batch)[0]]


def finish_batch(engine: Engine, requests: Sequence[Request | None]) -> tuple[list[Run], State]:
    """Decode at most one request per sequence to the end; returns the state as well."""
    idle = engine.program.capacity.sequences - len(requests)
    state, controls, first, finish = engine.start([*requests, *[None] * idle])
    runs = [Run(list(tokens), [], [], None) for tokens in first]
    while any(request is not None and end is None for request, end in zip(requests, finish, strict=False)):
        state, dispatch = engine.run(state, controls)
        finish = dispatch.finish
        record(runs, dispatch)
    return [run._replace(finish=end) for run, end in zip(runs, finish, strict=True)][: len(requests)], state


def record(runs: Sequence[Run], dispatch) -> None:
    """Add what a dispatch emitted to the runs of its sequences."""
    for run, emitted, nodes in zip(runs, dispatch.tokens, dispatch.nodes, strict=True):
        run.tokens.extend(token for tokens in emitted for token in tokens)
        run.lengths.extend(map(len, emitted))
        run.nodes.extend(nodes)


@partial(jax.jit, static_argnums=(1, 2))
def draft_of(logits: jax.Array, count: int, softcap: float | None = None) -> tuple[jax.Array, jax.Array]:
    """What the draft stage makes of a drafter's logits [B, slots, V]: log-probabilities and ids [B, slots, count]."""
    batch, slots, _ = logits.shape
    config = SimpleNamespace(mask_token_id=0, block_size=slots + 1, final_logit_softcapping=softcap)
    target = SimpleNamespace(embed=lambda ids: ids, head=lambda _: logits, vocabulary=Vocabulary(logits.shape[-1]))
    drafter = DFlashProposer(config, lambda *_: None, target)  # its network is not asked: the head answers for it
    program = SimpleNamespace(capacity=SimpleNamespace(candidates=count))
    models = SimpleNamespace(program=program, target=target, drafter=drafter)
    empty = jnp.zeros(batch, jnp.int32)
    state = SimpleNamespace(root=empty, length=empty, draft=Caches(None, None))
    off = Sampling(jnp.zeros(batch), jnp.ones(batch), *[jnp.zeros(batch, jnp.uint32)] * 2)
    greedy = SimpleNamespace(sampling=off, coupling=jnp.zeros(batch))
    return stages.draft(models, state, greedy)


class Pass(NamedTuple):
    """A causal pass over whole texts: logits [B, T, V], taps [B, T, taps * H], latents [layers, B, T, latent_size]."""

    logits: jax.Array
    taps: jax.Array
    latents: jax.Array


def rows_of(counts: jax.Array, width: int) -> Rows:
    """Texts of `counts` tokens from position 0, without anything committed."""
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    valid = offset < counts[:, None]
    return Rows(jnp.broadcast_to(offset, valid.shape), valid, causal_words(valid), jnp.zeros_like(counts))


def empty_cache(config: TargetConfig, batch: int, dtype) -> jax.Array:
    """A cache of one entry per sequence that nothing was committed to."""
    return jnp.full((config.num_hidden_layers, batch, 1, config.latent_size), jnp.nan, dtype)


@partial(jax.jit, static_argnums=(0, 1))
def _score(config: TargetConfig, taps: tuple[int, ...], weights: Tree, tokens: jax.Array, counts: jax.Array) -> Pass:
    model = Target(config, weights, taps)
    cache = empty_cache(config, tokens.shape[0], weights["embed"].dtype)
    scored = model(tokens, rows_of(counts, tokens.shape[1]), cache)
    return Pass(model.logits(scored.hidden), scored.taps, scored.latents)


TEXTS, TEXT_WIDTH = 3, 320  # one shape for all whole-text passes, so that they share a compilation


def score_texts(
    config: TargetConfig, drafter: DFlashConfig, weights: Tree, texts: Sequence[Sequence[int]]
) -> list[Pass]:
    """A pass over each text, several at a time; results are NumPy arrays without padding."""
    passes: list[Pass] = []
    for begin in range(0, len(texts), TEXTS):
        part = texts[begin : begin + TEXTS]
        tokens, counts = padded(part)
        logits, taps, latents = map(np.asarray, _score(config, drafter.target_layer_ids, weights, tokens, counts))
        passes += [
            Pass(logits[b, : len(text)], taps[b, : len(text)], latents[:, b, : len(text)])
            for b, text in enumerate(part)
        ]
    return passes


def padded(texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """tokens int32 [TEXTS, TEXT_WIDTH] and counts int32 [TEXTS]"""
    tokens, counts = np.zeros((TEXTS, TEXT_WIDTH), np.int32), np.zeros(TEXTS, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)], counts[row] = text, len(text)
    return tokens, counts


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a safetensors file."""
    return load_file(path)


def close(found, wanted, name: str = "", tolerance: float = TOLERANCE) -> None:
    """Assert that two arrays agree within an absolute tolerance."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, f"{name}: shape {found.shape}, wanted {wanted.shape}"
    worst = np.abs(found - wanted).max(initial=0.0)
    assert worst <= tolerance, f"{name}: worst difference {worst}"  # false for NaN too
