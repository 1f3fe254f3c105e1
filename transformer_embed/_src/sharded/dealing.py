"""The order of rows in a dealt table: rows are dealt to virtual shards like cards, so that frequent
ids are not all on one device.

A vocabulary is usually sorted by frequency. In contiguous shards, most of a batch would read the
first one. A dealt table has S virtual shards, a power of two, and every S consecutive ids go to S
different ones. The array in memory is [S * R, d], virtual shard after virtual shard, with R =
ceil(vocab_size / S) rows each; rows that no id uses are zeros. A mesh whose size divides S holds
whole virtual shards on each device, so the array is the same on every such mesh, and so is a
checkpoint of it.

The index of an id's row in that array is its *position*. Neighbouring ids reach different devices
on every mesh because the order of the virtual shards within a round of dealing is bit-reversed: the
device of an id depends on its low bits. Each round of S ids is also shifted by a hash of its
number, so that ids a multiple of S apart spread as well.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from transformer_embed._src.functional.partitioning import Axes, index_along, partition_spec

# 2**32 divided by the golden ratio: the multiplier of Fibonacci hashing.
HASH = 0x9E3779B1


class Deal(NamedTuple):
    """How a table of vocab_size rows is dealt over virtual shards, a power of two."""

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

    def positions(self, ids: Any) -> Any:
        """The position of each id inside the vocabulary; numpy or jax int32."""
        round_number, slot = ids // self.virtual_shards, ids % self.virtual_shards
        return (
            _reverse_bits(self, slot) ^ _round_hash(self, round_number)
        ) * self.rounds + round_number

    def ids(self, positions: Any) -> Any:
        """The id at each position; an id of vocab_size or above marks padding."""
        shard, round_number = positions // self.rounds, positions % self.rounds
        return round_number * self.virtual_shards + _reverse_bits(
            self, shard ^ _round_hash(self, round_number)
        )


def deal_rows(
    deal: Deal, mesh: Mesh, axes: Axes, table: Float[Array, "v d"]
) -> Float[Array, "m d"]:
    """Deals a table in vocabulary order, under jit; both arrays are split over these axes, and no
    device holds more than a few shards.

    Each device holds some rounds of dealing, sorts their rows by virtual shard, and sends each
    device the virtual shards that live there: one all-to-all.
    """
    shape = table.shape[1:]
    parts, width = math.prod(mesh.shape[axis] for axis in axes), math.prod(shape)
    table = table.reshape(-1, width)
    each = -(-deal.rounds // parts)
    padded = jnp.pad(table, ((0, each * parts * deal.virtual_shards - deal.vocab_size), (0, 0)))

    def send(rows):
        first = index_along(axes) * each
        rounds = first + jnp.arange(each, dtype=jnp.int32)[:, None]
        shards = jnp.arange(deal.virtual_shards, dtype=jnp.int32)[None]
        slots = _reverse_bits(deal, shards ^ _round_hash(deal, rounds))
        dealt = jnp.take_along_axis(
            rows.reshape(each, deal.virtual_shards, width), slots[..., None], axis=1
        ).swapaxes(0, 1)
        dealt = jax.lax.all_to_all(dealt, axes, split_axis=0, concat_axis=1, tiled=True)
        return dealt[:, : deal.rounds].reshape(-1, width)

    spec = partition_spec(axes)
    dealt = jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec)(padded)
    return dealt.reshape(-1, *shape)


def _reverse_bits(deal: Deal, values: Any) -> Any:
    """The binary digits of values below virtual_shards in reverse order."""
    bits = deal.virtual_shards.bit_length() - 1
    reverse = values & 0
    for bit in range(bits):
        reverse = reverse | ((values >> bit & 1) << (bits - 1 - bit))
    return reverse


def _round_hash(deal: Deal, round_number: Any) -> Any:
    """A hash of the round of dealing, below virtual_shards; 0 for the first round."""
    bits = deal.virtual_shards.bit_length() - 1
    return ((round_number.astype("uint32") * np.uint32(HASH)) >> np.uint32(32 - bits)).astype(
        "int32"
    )
