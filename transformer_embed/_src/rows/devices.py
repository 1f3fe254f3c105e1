"""Averages gradients of different rows over devices that each have a batch."""

from typing import Any

import jax

from transformer_embed._src import arguments
from transformer_embed._src.rows.distinct_ids import sum_over_devices
from transformer_embed._src.rows.row_gradient import RowGradient, is_gradient
from transformer_embed._src.rows.trees import Tree


def pmean(grads: Tree, axis_name: Any) -> Tree:
    """Averages gradients over the devices of a mapped axis, even if they read different table rows.

    Use this function inside `jax.pmap`, `jax.shard_map` or `jax.vmap` with an `axis_name`. Do not
    use `jax.lax.pmean` for a `RowGradient`. `jax.lax.pmean` averages the first rows of all devices,
    then the second rows, and so on. But the first rows of two devices may belong to different ids.
    In `te.rows.pmean`, the devices send each other the indices of the rows, so the gradients of
    equal rows are averaged.

    With `check_vma=True` (the default of `jax.shard_map`), `jax.grad` and `te.rows.value_and_grad`
    already sum the gradients of parameters that all devices share. To get the mean instead of the
    sum, return `jax.lax.pmean(loss, axis_name)` from the function that you differentiate. Then the
    gradients are equal on all devices, and you do not need `te.rows.pmean`.

    Args:
        grads: The gradients that `value_and_grad` returned.
        axis_name: The name of the mapped axis, or a tuple of several names.

    Returns:
        The mean of each leaf, the same on all devices. For a table, the mean is a `RowGradient`
        again. The `RowGradient` has each table row that has a gradient on at least one device,
        exactly once. After these rows comes padding, whose index is past the end of the table. For
        example, in a table with the rows 0 to 5, padding may have the index 9.

    Raises:
        TypeError: A `RowGradient` was made with a `capacity`, so `value_and_grad` has already
            summed the gradients of the devices.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> params = {"t": jnp.zeros([6, 1])}
        >>> def gradient(ids):
        ...     loss = lambda params: te.lookup(params["t"], ids).sum()
        ...     _, grads = te.rows.value_and_grad(loss, ids={"t": ids})(params)
        ...     rows = te.rows.pmean(grads, "devices")["t"]
        ...     return rows.row_indices, rows.values[:, 0]
        >>> batch = jnp.array([[1, 3], [3, 5]])  # one batch row for each device
        >>> row_indices, values = jax.vmap(gradient, axis_name="devices")(batch)
        >>> row_indices[0].tolist(), values[0].tolist()
        ([1, 3, 5, 9], [0.5, 1.0, 0.5, 0.0])
    """
    # jax knows this sum while tracing, so nothing is sent.
    device_count = jax.lax.psum(1, axis_name)

    def mean(leaf: Any) -> Any:
        """Averages the gradient of a whole parameter, or of some table rows, over the devices."""
        if not is_gradient(leaf):
            return jax.lax.pmean(leaf, axis_name)
        # A gradient is split if devices have exchanged rows, so each device has other rows.
        if leaf.is_split:
            want = "rows that every device has"
            raise arguments.type_error("grads", want, "those that devices exchanged")
        # A `RowGradient` stores a checksum of its rows, the fingerprint, and the mean gets a new
        # one. If a function of the user has mixed the rows, the new fingerprint would hide this. So
        # the old one is checked first: `trusted_values` are NaN if it does not fit.
        values = leaf.trusted_values()
        summed = sum_over_devices(leaf.row_indices, values, leaf.num_rows, axis_name)
        return RowGradient(
            row_indices=summed.row_indices,
            values=summed.sums / device_count,
            num_rows=leaf.num_rows,
        )

    return jax.tree.map(mean, grads, is_leaf=is_gradient)
