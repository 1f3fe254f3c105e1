"""The order of rows in the array of a sharded table: contiguous or striped.

The index of an id's row in that array is its *slot*. The array is padded with zeros.

A *contiguous* table keeps vocabulary order, a block of consecutive ids on each device (TensorFlow's
"div"). A vocabulary is usually sorted by frequency, so most of a batch reads the first block.

A *striped* table deals its rows to S virtual shards like cards (TensorFlow's "mod"): every S
consecutive ids, a round, go to S different ones. The array is [S * R, d], virtual shard after
virtual shard, with R = ceil(vocab_size / S) rows each. A mesh whose size divides S holds whole
virtual shards on each device. Neighbouring ids reach different devices on every mesh because the
order of the virtual shards within a round is bit-reversed: the device of an id depends on its low
bits. Each round is also shifted by a hash of its number, so that ids a multiple of S apart spread
as well.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Shaped

from transformer_embed._src.partitioning import Axes, devices_along, reshard

# 2**32 divided by the golden ratio: the multiplier of Fibonacci hashing.
HASH = 0x9E3779B1


class RowOrder(NamedTuple):
    """Which slot of the array holds which row.

    Args:
        vocab_size: number of rows.
        virtual_shards: a power of two; 1 if the rows are contiguous.
        multiple: what the number of rounds is padded to a multiple of.
    """

    vocab_size: int
    virtual_shards: int
    multiple: int = 1

    @property
    def is_striped(self) -> bool:
        """Whether the rows are dealt to several virtual shards."""
        return self.virtual_shards > 1

    @property
    def name(self) -> str:
        """That of the array in a tree's paths, and so in a checkpoint."""
        return f"array_striped_{self.virtual_shards}" if self.is_striped else "array"

    @property
    def rounds(self) -> int:
        """Rows of each virtual shard, padding included."""
        return -(-self.vocab_size // (self.virtual_shards * self.multiple)) * self.multiple

    @property
    def size(self) -> int:
        """Rows of the array, padding included."""
        return self.rounds * self.virtual_shards

    def slots(self, ids: Any) -> Any:
        """The slot of each id inside the vocabulary; numpy or jax int32."""
        if not self.is_striped:
            return ids
        round_number, card = divmod(ids, self.virtual_shards)
        return (self._reversed(card) ^ self._hash(round_number)) * self.rounds + round_number

    def ids(self, slots: Any) -> Any:
        """The id in each slot; an id of vocab_size or above marks padding."""
        shard, round_number = divmod(slots, self.rounds)
        card = self._reversed(shard ^ self._hash(round_number))
        return round_number * self.virtual_shards + card

    def from_array(self, array: Shaped[np.ndarray, "m ..."]) -> Shaped[np.ndarray, "v ..."]:
        """The rows in vocabulary order, on the host."""
        if not self.is_striped:
            return array[: self.vocab_size]
        return array[self.slots(np.arange(self.vocab_size, dtype=np.int32))]

    def block(self, rows: Shaped[np.ndarray, "v ..."], index: Any) -> Shaped[np.ndarray, "b ..."]:
        """`array[index]` for rows in vocabulary order, on the host."""
        ids = self.ids(np.arange(*index[0].indices(self.size), dtype=np.int32))
        # Padding reads the last row, and is zero below.
        block = rows[(np.minimum(ids, len(rows) - 1), *index[1:])]
        block[ids >= len(rows)] = 0
        return block

    def to_array(
        self, rows: Float[Array, "v ..."], mesh: Mesh, axes: Axes
    ) -> Float[Array, "m ..."]:
        """The array for rows in vocabulary order, under jit.

        Both are split over these axes, and no device holds more than a few shards: if the rows are
        striped, each device holds some rounds, sorts their rows by virtual shard, and sends
        each device the virtual shards that live there, by one all-to-all.
        """
        by_device, numbers, places = self._on_devices(mesh, axes)
        padding = len(numbers) * self.virtual_shards - len(rows)
        padded = jnp.pad(rows, [(0, padding), *[(0, 0)] * (rows.ndim - 1)])
        if not self.is_striped:
            return padded
        cards = self._reversed(places ^ self._hash(numbers))
        hands = reshard(padded.reshape(*cards.shape, -1), by_device)
        hands = jnp.take_along_axis(hands, cards[..., None], axis=1)
        dealt = reshard(reshard(hands, by_device).swapaxes(0, 1), by_device)
        return dealt[:, : self.rounds].reshape(-1, *rows.shape[1:])

    def in_vocabulary_order(
        self, array: Float[Array, "m ..."], mesh: Mesh, axes: Axes
    ) -> Float[Array, "v ..."]:
        """The inverse of `to_array`, under jit."""
        if self.is_striped:
            by_device, numbers, places = self._on_devices(mesh, axes)
            dealt = array.reshape(self.virtual_shards, self.rounds, -1)
            dealt = jnp.pad(dealt, [(0, 0), (0, len(numbers) - self.rounds), (0, 0)])
            hands = reshard(reshard(dealt, by_device).swapaxes(0, 1), by_device)
            shards = self._reversed(places) ^ self._hash(numbers)
            hands = jnp.take_along_axis(hands, shards[..., None], axis=1)
            array = reshard(hands, by_device).reshape(-1, *array.shape[1:])
        return array[: self.vocab_size]

    def _on_devices(self, mesh: Mesh, axes: Axes) -> tuple[NamedSharding, Array, Array]:
        """How rounds are split, their numbers, [rounds, 1], and those of cards, [1, cards]."""
        devices = devices_along(mesh, axes)
        rounds = jnp.arange(-(-self.rounds // devices) * devices, dtype=jnp.int32)[:, None]
        cards = jnp.arange(self.virtual_shards, dtype=jnp.int32)[None]
        return NamedSharding(mesh, PartitionSpec(axes)), rounds, cards

    def _reversed(self, cards: Any) -> Any:
        """The binary digits of numbers below virtual_shards in reverse order."""
        digits = self.virtual_shards.bit_length() - 1
        # Zeros of the same type, numpy's or jax's.
        reverse = cards & 0
        for digit in range(digits):
            reverse = reverse | ((cards >> digit & 1) << (digits - 1 - digit))
        return reverse

    def _hash(self, round_number: Any) -> Any:
        """A hash of the round, below virtual_shards; 0 for the first round."""
        # Every bit of the number reaches the top bits of the product, so those are kept.
        unused = np.uint32(33 - self.virtual_shards.bit_length())
        return (round_number.astype("uint32") * np.uint32(HASH) >> unused).astype("int32")
