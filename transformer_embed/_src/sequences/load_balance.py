"""Orders the tokens of a row so that devices that share the row have equal work."""

import numpy as np
from jaxtyping import Int32

from transformer_embed._src import arguments


def load_balanced_order(
    length: int, devices: int, *, kind: str = "zigzag", stripe: int = 128
) -> Int32[np.ndarray, "t"]:
    """Computes an order of the tokens of a row that gives devices equal work under a causal mask.

    Use it for context parallelism, in which each device has a part of every row. If tokens stay in
    order, the last device does most of the work, because its queries see the most keys. Shift the
    labels first, then reorder the tokens.

    Args:
        length: The number of tokens of a row. With `kind="zigzag"`, a multiple of `2 * devices`.
            With `kind="cyclic"`, a multiple of `devices * stripe`.
        devices: The number of devices that share a row, at least 1.
        kind: How the stripes of a row are given to the devices. (A stripe is some tokens that are
            next to each other.) `"zigzag"` cuts the row into two stripes per device. Device i gets
            the i-th stripe from the start and the i-th stripe from the end. For example, of the
            stripes 0, 1, 2, 3, the first device gets 0 and 3, and the second one gets 1 and 2. Use
            `"zigzag"` if each row is one sequence. `"cyclic"` gives the stripes to the devices in
            turn: the first device gets 0 and 2, and the second one gets 1 and 3. Use `"cyclic"` for
            packed rows or windows.
        stripe: The number of neighbouring tokens in a stripe. Only `kind="cyclic"` uses this
            number, because `kind="zigzag"` always cuts the row into two stripes per device.

    Returns:
        int32 [length]. The token at index `order[i]` moves to index i. Pass the array to
        `TokenPositions.take`, and reorder ids by `ids[:, order]`. `np.argsort(order)` restores the
        order of the row.

    Raises:
        TypeError: `length`, `devices` or `stripe` is not a Python int.
        ValueError: `length`, `devices` or `stripe` is below 1, or `length` is not a multiple of
            `2 * devices` (zigzag) or of `devices * stripe` (cyclic). `kind` is neither `"zigzag"`
            nor `"cyclic"`.

    Example:
        >>> import transformer_embed as te
        >>> te.load_balanced_order(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
        >>> te.load_balanced_order(8, 2, kind="cyclic", stripe=2).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]

    Source:
        The order "zigzag" is from Zhu, https://github.com/zhuzilin/ring-flash-attention. The order
        "cyclic" is from Brandon et al., "Striped Attention" (2023),
        https://arxiv.org/abs/2311.09431. In the paper, the tokens are dealt to the devices one by
        one. Here, several tokens may be dealt at a time.
    """
    length = arguments.size("length", length)
    devices = arguments.size("devices", devices)
    kind = arguments.choice("kind", kind, ("zigzag", "cyclic"))
    divisor = 2 * devices
    if kind == "cyclic":
        divisor = devices * arguments.size("stripe", stripe)
    if length % divisor:
        raise arguments.value_error("length", f"a multiple of {divisor}", length)
    index = np.arange(length, dtype=np.int32)
    if kind == "cyclic":
        # In each round, every device gets one stripe: [rounds, devices, stripe].
        rounds = index.reshape(-1, devices, stripe)
        return rounds.swapaxes(0, 1).ravel()
    # Device i gets stripe i from the start and stripe i from the end: [devices, 2, stripe].
    stripes = index.reshape(2 * devices, -1)
    from_start = stripes[:devices]
    # The last stripe is the first one here.
    from_end = np.flip(stripes[devices:], axis=0)
    return np.stack([from_start, from_end], axis=1).ravel()
