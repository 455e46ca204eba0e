"""The walk down a tree against a loop over children."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jddtree.decoding.tree import Tree, ancestor_words
from jddtree.decoding.walk import walk

BLOCK, ROWS, BATCH = 6, 20, 4
_walk = jax.jit(walk, static_argnums=2)


def random_tree(
    random: np.random.Generator, nodes: int, vocabulary: int
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and depths of a tree whose siblings differ, root first, at most BLOCK - 1 deep."""
    tokens, parents, depths = [int(random.integers(vocabulary))], [-1], [0]
    taken: set[tuple[int, int]] = set()
    for _ in range(nodes):
        parent, token = int(random.integers(len(tokens))), int(random.integers(vocabulary))
        if depths[parent] < BLOCK - 1 and (parent, token) not in taken:
            taken.add((parent, token))
            tokens, parents, depths = [*tokens, token], [*parents, parent], [*depths, depths[parent] + 1]
    return tokens, parents, depths


def batch_of(trees) -> Tree:
    """Pad trees to ROWS as the builder does: parent -1, token 0, not valid."""
    fill = lambda index, padding: np.array(
        [[*t[index], *[padding] * (ROWS - len(t[index]))] for t in trees], np.int32
    )
    tokens, parents, depths = fill(0, 0), fill(1, -1), fill(2, 0)
    valid = np.array([[row < len(t[0]) for row in range(ROWS)] for t in trees])
    words = ancestor_words(jnp.asarray(parents), jnp.asarray(valid), BLOCK - 1)
    return Tree(
        *map(jnp.asarray, (tokens, parents, depths, valid, np.zeros(tokens.shape, np.float32))), words
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), vocabulary=st.integers(2, 5))
def test_walk_follows_the_choices(seed: int, vocabulary: int) -> None:
    random = np.random.default_rng(seed)
    trees = [random_tree(random, int(random.integers(ROWS)), vocabulary) for _ in range(BATCH)]
    choices = random.integers(0, vocabulary, (BATCH, ROWS)).astype(np.int32)
    paths, lengths = map(np.asarray, _walk(batch_of(trees), choices, BLOCK))
    for (tokens, parents, _), chosen, path, length in zip(trees, choices, paths, lengths, strict=True):
        wanted = reference.follow(tokens, parents, chosen)
        assert path[:length].tolist() == wanted
        assert not path[length:].any()


@pytest.fixture
def chain() -> Tree:
    """Four equal chains 7, 8, 9, ... of the greatest depth"""
    return batch_of([(list(range(7, 7 + BLOCK)), list(range(-1, BLOCK - 1)), list(range(BLOCK)))] * BATCH)


@pytest.mark.parametrize("agreed", range(BLOCK))
def test_walk_keeps_exactly_what_agrees(chain, agreed: int) -> None:
    """From forced rejection of everything to forced acceptance of everything."""
    choices = np.full((BATCH, ROWS), 1, np.int32)
    choices[:, :agreed] = np.arange(8, 8 + agreed)
    paths, lengths = map(np.asarray, _walk(chain, choices, BLOCK))
    assert lengths.tolist() == [agreed + 1] * BATCH
    assert paths[:, : agreed + 1].tolist() == [list(range(agreed + 1))] * BATCH


def test_padding_is_never_entered(chain) -> None:
    """Padded rows hold token 0 and parent -1: a choice of 0 must not match them, nor a parent of row 0."""
    padded = chain._replace(
        valid=chain.valid & (np.arange(ROWS) < 1)[None], parents=jnp.zeros_like(chain.parents)
    )
    _, lengths = _walk(padded, np.zeros((BATCH, ROWS), np.int32), BLOCK)
    assert np.asarray(lengths).tolist() == [1] * BATCH


def test_a_sequence_without_a_valid_root_keeps_nothing(chain) -> None:
    idle = chain._replace(valid=jnp.zeros_like(chain.valid))
    _, lengths = _walk(idle, np.asarray(chain.tokens) + 1, BLOCK)
    assert not np.asarray(lengths).any()
