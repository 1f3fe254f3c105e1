"""The masks of ids and lengths, and their conversion to a bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal
from refused import each_raises

import transformer_embed as te


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_bias_hides_keys_to_the_bit_and_a_wholly_masked_row_has_a_gradient(dtype):
    logits, mask = np.array([0.5, -1.0, 2.0, 0.25], dtype), np.array([True, False, True, False])
    softmax = lambda x, mask: jax.nn.softmax(x + te.mask_to_bias(mask, dtype))

    @jax.jit
    def found(logits, others):
        # Half of the lowest value is so large that logits round away.
        of_first = lambda x: softmax(x, ~mask & mask)[0].astype(jnp.float32)
        return softmax(logits, mask), jax.nn.softmax(others), jax.value_and_grad(of_first)(logits)

    hidden, expected, (even, gradient) = jax.device_get(found(logits, logits[mask]))
    equal(hidden[~mask], 0)
    equal(hidden[mask], expected)
    assert even == 0.25
    assert np.isfinite(np.asarray(gradient, np.float32)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_bias_that_rounds_to_zero_is_refused(dtype):
    values = [-(10.0**-exponent) for exponent in (1, 8, 40, 300)]
    bias = lambda value: te.mask_to_bias([False], dtype, value=value)
    rounded = np.asarray(values).astype(jnp.dtype(dtype))
    with jax.enable_x64():
        held = [value for value, number in zip(values, rounded, strict=True) if number < 0]
        assert (np.stack(jax.jit(lambda: [*map(bias, held)])()) < 0).all()
        for value in values[len(held) :]:
            with pytest.raises(ValueError, match=rf"^value: wanted a number below 0 that {dtype}"):
                bias(value)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_a_bias_is_finite_in_float64_in_either_mode():
    for enabled, dtype in ((False, jnp.float32), (True, jnp.float64)):
        with jax.enable_x64(enabled):
            bias = np.asarray(te.mask_to_bias([True, False], "float64"))
        assert bias.dtype == dtype
        assert -np.inf < bias[1] < -1e38


REFUSED = {
    "te.padding_mask([1.0], pad_id=0)": "TypeError: ids: ... got float",
    "te.padding_mask([1], pad_id=True)": "TypeError: pad_id: wanted a Python int, got bool True",
    "jax.jit(te.causal_mask)(3)": "TypeError: length: ... got a traced int32",
    "te.mask_to_bias([1.0])": "TypeError: mask: ... got float64",
    "te.mask_to_bias([True], int)": "TypeError: dtype: ... got int64",
    "te.mask_to_bias([True], 'float8_e4m3fn')": "TypeError: dtype: ... got float8_e4m3fn",
    "te.padding_mask([1], pad_id=2**31 - 1)": "ValueError: pad_id: wanted an int of at most 2147483646",
    "te.padding_mask([1], pad_id=-2**31)": "ValueError: pad_id: wanted an int of at least -2147483647",
    "te.causal_mask(-1)": "ValueError: length: ... 0, got -1",
    "jax.eval_shape(lambda: te.causal_mask(2**30 + 1))": "ValueError: length: wanted an int of at most 1073741824",
    "te.mask_to_bias([True], 'float16', value=-1e9)": "ValueError: value: wanted a number below 0 that float16 holds, at least -65504, got -1e+09",
    "te.mask_to_bias([True], value=0.0)": "ValueError: value: wanted a number below 0 that float32 holds, at least -3.4",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
