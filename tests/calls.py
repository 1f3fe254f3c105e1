"""A call of every public function that works, and the same as functions of arrays alone."""

import jax
import jax.numpy as jnp
import numpy as np

import transformer_embed as te

TABLE = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
IDS = np.array([[1, 0, 3], [2, 2, 0]], np.int32)
POSITIONS = np.array([0, 1, 2], np.int32)
SEGMENTS = np.array([[1, 1, 2]], np.int32)
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 3, 2, 4)
LABELS = np.array([1, 2], np.int32)

EMBEDDINGS = {"embeddings": jnp.asarray(TABLE)}
PARAMS = {
    "m/token_embedding": EMBEDDINGS,
    "m/learned_positional_encoding": EMBEDDINGS,
}


def calls_of(texts, names):
    """The function and the arguments, by name, of each call."""
    found = {}
    for text in texts:
        function, _, arguments = text.removesuffix(")").partition("(")
        found[eval(function, names)] = eval(f"dict({arguments})", names)
    return found


GOOD = [
    "te.pretrained.resize(params=PARAMS, config=te.EmbedderConfig(4, 3, scheme=te.Learned(4)), new_config=te.EmbedderConfig(3, 3, scheme=te.Learned(6)))",
    "te.alibi_bias(query_positions=POSITIONS, key_positions=POSITIONS, num_heads=2, causal=True)",
    "te.alibi_slopes(num_heads=2)",
    "te.apply_rotary(x=X, positions=POSITIONS)",
    "te.causal_mask(length=3)",
    "te.check_batch(ids=IDS, tokens=te.TokenPositions(IDS, segment_ids=SEGMENTS), vocab_size=4)",
    "te.dropout(rng=jax.random.key(0), rate=0.5, x=X)",
    "te.find_parameters(params=PARAMS, config=te.EmbedderConfig(4, 3, scheme=te.Learned(4)))",
    "te.load_balanced_order(length=8, devices=2)",
    "te.lookup(table=TABLE, ids=IDS)",
    "te.mask_to_bias(mask=np.array([True, True, False]))",
    "te.padding_mask(ids=IDS, pad_id=0)",
    "te.permute_rotary_weights(weights=X, num_heads=1, source='half', target='interleaved')",
    "te.query_scale(positions=POSITIONS, beta=0.5, length=2)",
    "te.relative_shift(logits=TABLE)",
    "te.shift_right(ids=IDS, first_id=1, segment_ids=SEGMENTS[0])",
    "te.relative_position_buckets(query_positions=POSITIONS, key_positions=POSITIONS, causal=False)",
    "te.shared_prefix_parents(prefix_lengths=LABELS, answer_lengths=np.int32([[1, 2], [0, 1]]), length=6)",
    "te.sinusoidal_encoding(positions=POSITIONS, d_model=4)",
    "te.sinusoidal_table(length=3, d_model=4)",
    "te.linear_cross_entropy(x=TABLE[:2], output=TABLE, labels=LABELS)",
    "te.linear_divergence(x=TABLE[:2], output=TABLE, teacher_x=TABLE[1:3], teacher_output=TABLE[::-1])",
    "te.linear_top_k(x=TABLE[:2], output=TABLE, k=2)",
    "te.linear_log_probs(x=TABLE[:2], output=TABLE, labels=LABELS)",
    "te.linear_logits(x=TABLE[:2], output=TABLE)",
    "te.TokenPositions.from_ids(ids=IDS, pad_id=0)",
    "te.TokenPositions.from_lengths(lengths=LABELS, length=3)",
    "te.TokenPositions.from_mask(mask=IDS != 0)",
    "te.TokenPositions.from_offset(offset=LABELS, length=3)",
    "te.TokenPositions.from_positions(positions=IDS)",
    "te.TokenPositions.from_segment_ids(segment_ids=SEGMENTS)",
    "te.write_cache(cache=X[0], new=X[0, :, :1], slot=np.int32([1, 0, -1]))",
    "te.LinearScaling(factor=2.0)",
    "te.NTKScaling(alpha=2.0)",
    "te.YarnScaling(factor=2.0, original_length=4)",
    "te.Llama3Scaling(factor=8.0)",
    "te.LongRopeScaling(short_factor=(1.0, 1.0), long_factor=(2.0, 4.0), factor=4.0, original_length=4, length=8)",
]
GOOD = calls_of(GOOD, globals())


def of_arrays(function, **arguments):
    """A function of its arrays alone, and these."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in arguments.items() if name not in arrays}
    call = lambda *values: function(**rest, **dict(zip(arrays, values, strict=True)))
    return call, tuple(arrays.values())


def with_gradient(function, arrays):
    """Its value, and the gradient by its floats."""
    floats = [n for n, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]

    def loss(*arrays):
        leaves = jax.tree.leaves(function(*arrays))
        return sum(leaf.astype(jnp.float32).sum() for leaf in leaves)

    return jax.value_and_grad(loss, floats) if floats else function


def dense_mask(positions, segment_ids, block_ids):
    tokens = te.TokenPositions(positions, segment_ids=segment_ids, block_ids=block_ids)
    return te.AttentionMask(tokens, causal=True, window=(1, 0), chunk=2).dense()


# Those that take arrays, trace, and give arrays.
CALLS = {
    function.__name__: of_arrays(function, **arguments)
    for function, arguments in GOOD.items()
    if any(isinstance(value, np.ndarray) for value in arguments.values())
    and function not in (te.check_batch, te.write_cache)
}
CALLS["AttentionMask"] = of_arrays(
    dense_mask, positions=POSITIONS, segment_ids=SEGMENTS, block_ids=SEGMENTS
)
CALLS["apply_rotary_axes"] = of_arrays(
    te.apply_rotary, x=X, positions=np.stack([POSITIONS] * 2, -1), pair_axes=(0, 1)
)
CALLS["lookup_one_hot"] = of_arrays(
    te.lookup, table=TABLE, ids=IDS, lookup_style="one_hot", pad_id=0
)
CALLS["SinusoidalGrid"] = of_arrays(
    te.SinusoidalGrid((2, 2)).encoding, d_model=4, positions=POSITIONS
)
