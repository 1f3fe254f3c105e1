"""Orders of a row in which devices that share it have equal work."""

import numpy as np
from jaxtyping import Int32

from transformer_embed._src import arguments


def load_balanced_order(
    length: int, devices: int, *, kind: str = "zigzag", block: int = 128
) -> Int32[np.ndarray, "t"]:
    """An order of the tokens of a row that gives devices equal work under a causal mask.

    With context parallelism, each device has a part of every row. In the row's own order the last
    device has the most work, because its queries see the most keys. Shift labels before tokens are
    taken in another order.

    Args:
        length: number of tokens of a row, a multiple of twice the number of devices for a zigzag,
            and of `devices * block` for a cyclic order.
        devices: number of devices that share a row, at least 1.
        kind: `"zigzag"`: each device has one stripe from the start of the row and the one as far
            from its end, which is balanced for one sequence a row. `"cyclic"`: blocks are dealt to
            the devices in turn, which is better balanced for packed rows and windows.
        block: number of tokens of a block of the cyclic order.

    Returns:
        int32 [length], the index in the row of each token, for `TokenPositions.take` and
        `ids[:, order]`. `np.argsort` of it restores the row's own order.

    Raises:
        TypeError: length, devices or block is not a Python int.
        ValueError: a number is out of range or does not divide the length; an unknown kind.

    Example:
        >>> import transformer_embed as te
        >>> te.load_balanced_order(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
        >>> te.load_balanced_order(8, 2, kind="cyclic", block=2).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]

    Source:
        Zigzag: Zhu, https://github.com/zhuzilin/ring-flash-attention. Cyclic: Brandon et al.,
        "Striped Attention" (2023), https://arxiv.org/abs/2311.09431, with blocks for tokens.
    """
    length, devices = arguments.size("length", length), arguments.size("devices", devices)
    kind = arguments.choice("kind", kind, ("zigzag", "cyclic"))
    size = arguments.size("block", block) * devices if kind == "cyclic" else 2 * devices
    if length % size:
        raise arguments.value_error("length", f"a multiple of {size}", length)
    index = np.arange(length, dtype=np.int32)
    if kind == "cyclic":
        return index.reshape(-1, devices, block).swapaxes(0, 1).ravel()
    stripes = index.reshape(2 * devices, -1)
    return np.stack([stripes[:devices], stripes[: devices - 1 : -1]], axis=1).ravel()
