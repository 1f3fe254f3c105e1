"""Trees of tokens: chains and cycles of every length, and answers that share a prompt."""

import jax
import loops
import numpy as np
import pytest
from compare import equal

import transformer_embed as te

T = te.TokenPositions


on_device = jax.jit(T.from_parents)


@pytest.mark.parametrize("length", [1, 7, 8])
def test_chains_and_cycles_of_any_length(length):
    """Paths are followed in steps of doubled length, and must be followed to the end."""
    chain = np.arange(length) - 1
    for order in (np.arange(length), np.arange(length)[::-1], (5 * np.arange(length) + 2) % length):
        if len({*order.tolist()}) < length:
            continue
        # Token n of the chain is at the place order[n].
        parents = np.full(length, -1)
        parents[order[1:]] = order[:-1]
        for make in (T.from_parents, on_device):
            tree = jax.tree.map(np.asarray, make(parents))
            equal(tree.positions[order], np.arange(length))
            equal(tree.places[order], np.arange(length))
            equal(tree.ends[order], [length] * length)
        parents[order[0]] = order[-1]
        with pytest.raises(ValueError, match=r"^parents: wanted trees of tokens, got a cycle"):
            T.from_parents(parents)
        assert not np.asarray(on_device(parents).segment_ids).any()
    # A tail that ends in a cycle is a cycle, too.
    chain[0] = min(1, length - 1)
    with pytest.raises(ValueError, match=r"got a cycle"):
        T.from_parents(chain)


def test_places_are_in_depth_first_order():
    random = np.random.default_rng(0)
    for length in (1, 7, 8):
        numbers = np.array([random.integers(-1, max(n, 1)) if n else -1 for n in range(length)])
        tree, expected = (
            T.from_parents(numbers, offset=4),
            loops.TokenPositions.from_parents(numbers, offset=4),
        )
        equal(tree.positions, expected.positions[0])
        equal([tree.places], expected._field("place"))
        equal([tree.ends], expected._field("end"))


def test_each_answer_sees_the_prompt_and_itself():
    parents = te.shared_prefix_parents([2, 0], [[2, 1], [2, 2]], 6)
    equal(parents, [[-1, 0, 1, 2, 1, -2], [-1, 0, -1, 2, -2, -2]])
    mask = te.AttentionMask(T.from_parents(np.asarray(parents)), causal=True).dense()
    mask = np.asarray(mask)[:, 0].astype(int)
    prompt_and_two = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    equal(mask[0, :5, :5], [*prompt_and_two, [1, 1, 0, 0, 1]])
    equal(mask[1, :4, :4], [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]])
    assert not mask[0, 5].any()


@pytest.mark.parametrize("lengths", [([0], [[0]]), ([3], [[0]]), ([0], [[3]]), ([1], [[]])])
def test_prompts_and_answers_of_no_tokens(lengths):
    prefix, answers = np.array(lengths[0], int), np.array(lengths[1], int)
    equal(
        te.shared_prefix_parents(prefix, answers, 4),
        loops.shared_prefix_parents(prefix, answers, 4),
    )
