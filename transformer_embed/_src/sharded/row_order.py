"""The order of rows in the array of a sharded table: contiguous or interleaved.

The index of an id's row in that array is its *slot*. The array is padded with zeros.

A *contiguous* table keeps vocabulary order, a block of consecutive ids on each device (TensorFlow's
"div"). A vocabulary is usually sorted by frequency, so most of a batch reads the first block.

An *interleaved* table deals its rows to S virtual shards like cards (TensorFlow's "mod"): every S
consecutive ids, a round, go to S different ones. The array is [S * R, d], virtual shard after
virtual shard, with R = ceil(vocab_size / S) rows each. A mesh whose size divides S holds whole
virtual shards on each device. Neighbouring ids reach different devices on every mesh because the
order of the virtual shards within a round is bit-reversed: the device of an id depends on its low
bits. Each round is also shifted by a hash of its number, so that ids a multiple of S apart spread
as well.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Shaped

from transformer_embed._src.functional.partitioning import (
    Axes,
    devices_along,
    index_along,
)

# Megatron-LM's `make-vocab-size-divisible-by`, and the lanes of a TPU.
ROW_MULTIPLE = 128
# 2**32 divided by the golden ratio: the multiplier of Fibonacci hashing.
HASH = 0x9E3779B1


class Contiguous(NamedTuple):
    """The order of a contiguous table over this many devices.

    The array has the same size on all meshes whose devices divide ROW_MULTIPLE.
    """

    vocab_size: int
    devices: int

    @property
    def size(self) -> int:
        """Rows of the array, padding included."""
        multiple = math.lcm(ROW_MULTIPLE, self.devices)
        return -(-self.vocab_size // multiple) * multiple

    def slots(self, ids: Any) -> Any:
        """The slot of each id inside the vocabulary."""
        return ids

    def from_array(self, array: Shaped[np.ndarray, "m ..."]) -> Shaped[np.ndarray, "v ..."]:
        """The rows in vocabulary order, on the host."""
        return array[: self.vocab_size]

    def block(self, rows: Shaped[np.ndarray, "v ..."], index: Any) -> Shaped[np.ndarray, "b ..."]:
        """`array[index]` for rows in vocabulary order, on the host."""
        block = rows[index]
        first, stop, _ = index[0].indices(self.size)
        return np.pad(block, [(0, stop - first - len(block)), *[(0, 0)] * (rows.ndim - 1)])

    def to_array(
        self, rows: Float[Array, "v ..."], mesh: Mesh, axes: Axes
    ) -> Float[Array, "m ..."]:
        """The array for rows in vocabulary order, under jit."""
        del mesh, axes
        return jnp.pad(rows, [(0, self.size - len(rows)), *[(0, 0)] * (rows.ndim - 1)])


class Interleaved(NamedTuple):
    """The order of an interleaved table over virtual shards, a power of two."""

    vocab_size: int
    virtual_shards: int

    @property
    def rounds(self) -> int:
        """Rounds of dealing, and so rows of each virtual shard."""
        return -(-self.vocab_size // self.virtual_shards)

    @property
    def size(self) -> int:
        """Rows of the array, padding included."""
        return self.rounds * self.virtual_shards

    def slots(self, ids: Any) -> Any:
        """The slot of each id inside the vocabulary; numpy or jax int32."""
        round_number, card = ids // self.virtual_shards, ids % self.virtual_shards
        return (self._reversed(card) ^ self._hash(round_number)) * self.rounds + round_number

    def ids(self, slots: Any) -> Any:
        """The id in each slot; an id of vocab_size or above marks padding."""
        shard, round_number = slots // self.rounds, slots % self.rounds
        card = self._reversed(shard ^ self._hash(round_number))
        return round_number * self.virtual_shards + card

    def from_array(self, array: Shaped[np.ndarray, "m ..."]) -> Shaped[np.ndarray, "v ..."]:
        """The rows in vocabulary order, on the host."""
        return array[self.slots(np.arange(self.vocab_size, dtype=np.int32))]

    def block(self, rows: Shaped[np.ndarray, "v ..."], index: Any) -> Shaped[np.ndarray, "b ..."]:
        """`array[index]` for rows in vocabulary order, on the host; whole columns."""
        ids = self.ids(np.arange(*index[0].indices(self.size), dtype=np.int32))
        block = rows[np.minimum(ids, len(rows) - 1)]
        block[ids >= len(rows)] = 0
        return block

    def to_array(
        self, rows: Float[Array, "v ..."], mesh: Mesh, axes: Axes
    ) -> Float[Array, "m ..."]:
        """The array for rows in vocabulary order, under jit.

        Both are split over these axes, and no device holds more than a few shards. Each device
        holds some rounds, sorts their rows by virtual shard, and sends each device the virtual
        shards that live there: one all-to-all.
        """
        shape, shards = rows.shape[1:], self.virtual_shards
        devices = devices_along(mesh, axes)
        local_rounds = -(-self.rounds // devices)
        size = local_rounds * devices * shards
        padded = jnp.pad(rows.reshape(len(rows), -1), ((0, size - self.vocab_size), (0, 0)))

        def send(rows):
            first = index_along(axes) * local_rounds
            rounds = first + jnp.arange(local_rounds, dtype=jnp.int32)[:, None]
            cards = self._reversed(jnp.arange(shards, dtype=jnp.int32)[None] ^ self._hash(rounds))
            rows = rows.reshape(local_rounds, shards, -1)
            dealt = jnp.take_along_axis(rows, cards[..., None], axis=1).swapaxes(0, 1)
            dealt = jax.lax.all_to_all(dealt, axes, split_axis=0, concat_axis=1, tiled=True)
            return dealt[:, : self.rounds].reshape(-1, rows.shape[-1])

        spec = PartitionSpec(axes)
        dealt = jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec)(padded)
        return dealt.reshape(-1, *shape)

    def _reversed(self, cards: Any) -> Any:
        """The binary digits of numbers below virtual_shards in reverse order."""
        digits = self.virtual_shards.bit_length() - 1
        reverse = cards & 0
        for digit in range(digits):
            reverse = reverse | ((cards >> digit & 1) << (digits - 1 - digit))
        return reverse

    def _hash(self, round_number: Any) -> Any:
        """A hash of the round, below virtual_shards; 0 for the first round."""
        unused = np.uint32(33 - self.virtual_shards.bit_length())
        return (round_number.astype("uint32") * np.uint32(HASH) >> unused).astype("int32")
