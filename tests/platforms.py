"""Code of another platform on the CPU, and traces apart from those of other tests."""

import contextlib

import jax

# On a CPU, no precision changes a value.
PRECISIONS = {"cpu": "high", "cuda": "float32", "tpu": "tensorfloat32", "strict": "highest"}


def apart(name):
    """Keeps what jax traces for one purpose apart from what it traces outside.

    jax keeps a trace for each precision of products. To forget all traces, by `jax.clear_caches()`,
    takes seconds, and tests that come later trace again.
    """
    return jax.default_matmul_precision(PRECISIONS[name])


@contextlib.contextmanager
def as_on(platform):
    """Takes the branches of a platform in `jax.lax.platform_dependent`. Yields those taken."""
    original, taken = jax.lax.platform_dependent, []

    def choose(*arrays, default, **branches):
        taken.append(branches.get(platform, default))
        return taken[-1](*arrays)

    jax.lax.platform_dependent = choose
    try:
        with apart(platform):
            yield taken
    finally:
        jax.lax.platform_dependent = original
