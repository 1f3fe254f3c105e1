"""Any arguments at all, for functions that give a right result or raise a TypeError or ValueError
of ours, which names an argument."""

import contextlib
import fractions
import re
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import transformer_embed as te

OURS = re.compile(r"^[\w. ,\[\]':/~-]+: wanted ")
# Of Python, numpy and jax.
THEIRS = re.compile(
    r"(missing|unexpected|required).* argument|str.* or (an )?os.PathLike object"
    r"|^Error interpreting argument|invalid PRNG key data|^could not convert string"
)

NUMBERS = [0, 2, -1, 0.5, -0.25, 1e30, 2**31, -(2**31), 2**64, 10**400, float("nan"), float("inf")]
NUMBERS += [True, fractions.Fraction(1, 3), np.int8(3), np.float16(0.5), jnp.int32(2), 1j]
WORDS = ["half", "first", "zero", "nan", "left", "mean", "", "abc", b"half"]
DTYPES = ["float32", "bfloat16", "int32", np.dtype(">f4"), float, "float8_e4m3fn"]
ARRAYS = [
    np.arange(3),
    np.arange(9).reshape(3, 3) % 2 == 0,
    np.array([0, 1, 1], np.uint8),
    np.array([2**40, 0, -1]),
    np.array([3_000_000_000, 1, 0], np.uint32),
    np.arange(3, dtype=">i4"),
    np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
    np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 3, 2, 4),
    np.zeros((0, 3), np.float32),
    np.ones((1, 1, 3, 3), bool),
    np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]),
    np.array([1, 2, 3], ml_dtypes.int4),
    np.array([1, 2, 3], ml_dtypes.float8_e4m3fn),
    np.array(2),
    jnp.asarray(np.arange(3, dtype=np.int32)),
    jnp.asarray(np.arange(3, dtype=np.float32)),
    jnp.asarray(np.ones((4, 3), ml_dtypes.bfloat16)),
]
OTHERS = [None, [], [1, 2, 3], [[1], [2, 3]], (1, 0), (None, None), {1: 2}, object(), range(3)]
OTHERS += [
    te.LinearScaling(2.0),
    jax.random.key(0),
    te.TokenPositions([0, 1, 2], segment_ids=[1, 1, 1]),
]
VALUES = [*NUMBERS, *WORDS, *DTYPES, *ARRAYS, *OTHERS]


SIZES = [
    "batch_size",
    "d_model",
    "embedding_width",
    "head_dim",
    "length",
    "max_distance",
    "max_len",
    "num_buckets",
]
SIZES += ["num_heads", "num_token_types", "vocab_size"]


def bounded(name, value):
    """5 for a size of which a right answer would fill the memory."""
    try:
        is_large = bool(np.ndim(value) == 0 and abs(value) > 64)
    except (TypeError, ValueError):
        is_large = False
    return 5 if name in SIZES and is_large and not isinstance(value, bool | float) else value


@contextlib.contextmanager
def named_on_failure(arguments):
    """Adds the arguments to whatever goes wrong with them."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"with {arguments}")
        raise


def call(function, arguments):
    """Whether it returns, and what."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return True, function(**arguments)
        except (TypeError, ValueError) as error:
            message = str(error)
            if not (OURS.match(message) or THEIRS.search(message)):
                raise AssertionError(
                    f"not our error: {type(error).__name__}: {message[:300]}"
                ) from error
            return False, None
