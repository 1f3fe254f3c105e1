"""Gradients of different rows on devices that each have a batch."""

from typing import Any

import jax

from transformer_embed._src import arguments
from transformer_embed._src.rows.distinct_ids import sum_over_devices
from transformer_embed._src.rows.row_gradient import RowGradient, is_gradient

Tree = Any


def pmean(grads: Tree, axis_name: Any) -> Tree:
    """The mean over the devices of a mapped axis, where `jax.lax.pmean` would mix rows.

    `jax.lax.pmean` averages arrays place by place, but devices with different batches have
    gradients of different rows. Use this function inside `jax.pmap`, `jax.shard_map` or `jax.vmap`
    with an `axis_name`. Devices send their ids, and one all-reduce sums their rows.

    With `check_vma=True` (the default of `jax.shard_map`), the gradients of parameters that all
    devices share are already summed over the devices, rows included, as `jax.grad` does. Average
    the loss over the devices there; this mean then changes nothing.

    Args:
        grads: gradients that `value_and_grad` returned.
        axis_name: that of the mapped axis, or a tuple of several.

    Returns:
        The mean of each leaf, the same on all devices. A `RowGradient` has the rows of all devices,
        at most vocab_size.

    Raises:
        TypeError: a `RowGradient` of rows that devices exchanged, which is summed already.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> params = {"t": jnp.zeros([6, 1])}
        >>> def gradient(ids):
        ...     loss = lambda params: te.lookup(params["t"], ids).sum()
        ...     _, grads = te.rows.value_and_grad(loss, ids={"t": ids})(params)
        ...     rows = te.rows.pmean(grads, "devices")["t"]
        ...     return rows.ids, rows.values[:, 0]
        >>> batch = jnp.array([[1, 3], [3, 5]])  # one row for each device
        >>> ids, values = jax.vmap(gradient, axis_name="devices")(batch)
        >>> ids[0].tolist(), values[0].tolist()
        ([1, 3, 5, 9], [0.5, 1.0, 0.5, 0.0])
    """
    # Known while tracing: nothing is sent.
    devices = jax.lax.psum(1, axis_name)

    def mean(leaf: Any) -> Any:
        if not is_gradient(leaf):
            return jax.lax.pmean(leaf, axis_name)
        if any(leaf.owners):
            want = "rows that every device has"
            raise arguments.type_error("grads", want, "those that devices exchanged")
        # The mean gets a fingerprint of its own, which would hide that something mixed these rows.
        ids, values = sum_over_devices(leaf.ids, leaf.trusted_values(), leaf.vocab_size, axis_name)
        return RowGradient(ids, values / devices, leaf.vocab_size)

    return jax.tree.map(mean, grads, is_leaf=is_gradient)
