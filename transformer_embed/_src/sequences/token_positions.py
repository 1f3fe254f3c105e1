"""Holds the position and the segment of each token of a batch, in one object."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import split_like, with_whole_rows
from transformer_embed._src.pytrees import register_pytree
from transformer_embed._src.sequences.counting import (
    counted_from_ids,
    counted_from_lengths,
    counted_from_mask,
    counted_from_offset,
    counted_from_positions,
    counted_from_segments,
)
from transformer_embed._src.sequences.runs import (
    differs_from,
    has_next_token,
    segment_reappears,
    with_row_indices,
)
from transformer_embed._src.sequences.token_arrays import (
    as_batch,
    as_comparable,
    as_signed,
    check_last_position,
    checked_segment_ids,
    comparable_arrays,
)
from transformer_embed._src.sequences.trees import check_parents, tree_arrays


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TokenPositions:
    """Says where each token of a batch is: its position, and the sequence that it belongs to.

    You make it from a batch, and make position encodings and attention masks from it. Use one of
    the constructors (`from_ids`, `from_mask`, `from_lengths`, `from_segment_ids`, `from_offset` and
    others), inside or outside `jax.jit`, or pass arrays of your own. The class is a pytree, so it
    passes through `jit`, `vmap` and `scan`, and `jax.export` can save it.

    The tokens keep the shape of what you make them from: arrays [length] give tokens [length], and
    a mask without a batch axis. Where a batch is needed, tokens [length] are used for every batch
    row. The object holds nothing but these arrays, so you may slice, stack or reshape a batch by
    `jax.tree.map`, pad it with zeros, and carry a cache through a `scan`.

    Args:
        positions: Integers, [length] or [batch, length], the position of each token in its own
            sequence.
        segment_ids: Integers of at least 0, [length] or [batch, length], the number of the sequence
            that each token belongs to. 0 is padding. If None, each batch row is one sequence
            without padding.
        block_ids: Integers, [length] or [batch, length], the block of each token. Tokens of one
            block attend to each other even if a causal mask, a window or a chunk forbids it. A
            negative number means "in no block". If None, there are no blocks. See `with_block_ids`.
        places: Integers, [length] or [batch, length], by which a causal mask and a window compare
            tokens of a sequence. `take` and `from_parents` make them. If None, positions are
            compared.
        ends: Integers, [length] or [batch, length], which hide a token of a tree from other
            branches: under a causal mask, only tokens whose place is before this number see the
            token. `from_parents` makes them. If None, all later tokens see it.

    Raises:
        TypeError: An array does not hold integers, or is a jax array of unsigned integers of 32
            bits or more.
        ValueError: An integer on the host is outside int32, or is a negative segment id; an array
            has a rank other than 1 or 2; or the shapes do not fit each other.

    Example:
        >>> import transformer_embed as te
        >>> batch = te.TokenPositions.from_ids([[0, 0, 7, 8, 9], [5, 6, 0, 0, 0]], pad_id=0)
        >>> batch.positions.tolist()
        [[0, 0, 0, 1, 2], [0, 1, 0, 0, 0]]
        >>> te.AttentionMask(batch, causal=True).dense().shape
        (2, 1, 5, 5)
        >>> batch.next_token_mask.astype(int).tolist()
        [[0, 0, 1, 1, 0], [1, 0, 0, 0, 0]]

    Edge cases:
        - If one array has a batch axis, all arrays of the object have one, of size 1 where the
          array was [length].
        - On a device, no error can be raised for a negative segment id. Tokens with that number are
          a sequence, so padding marked by -1 is not hidden. `from_segment_ids` makes it padding.
    """

    positions: Any
    _: dataclasses.KW_ONLY
    segment_ids: Any = None
    block_ids: Any = None
    places: Any = None
    ends: Any = None

    def __post_init__(self):
        """Converts and checks the arrays."""
        # Positions go first, even if they are None, which is refused like any other wrong value.
        given = {"positions": self.positions, **_given_arrays(self)}
        arrays = comparable_arrays(**given)
        length = arrays["positions"].shape[-1]
        for name, array in arrays.items():
            arguments.check_same(name, "the length of positions", array.shape[-1], length)
        arguments.set_fields(self, **arrays)

    @property
    def padding_mask(self) -> Bool[Array, "*b t"]:
        """Returns which tokens are no padding: bool [length] or [batch, length], True = a token."""
        return differs_from(segment_ids_or_ones(self), 0)

    @property
    def next_token_mask(self) -> Bool[Array, "*b t"]:
        """Returns which tokens are followed by a token of the same sequence, True = followed.

        It is bool [length] or [batch, length]. It is False at padding and at the last token of each
        sequence. A language model that predicts the next token is trained on the other tokens only:

            labels = jnp.roll(ids, -1, axis=-1)
            output = embedder.output(params)
            loss = te.linear_cross_entropy(x, output, labels, mask=batch.next_token_mask)
        """
        if self.places is not None:
            want = "None, for tokens in the order of their row (shift the labels before)"
            raise arguments.value_error("places", want, "an array")
        return has_next_token(segment_ids_or_ones(self))

    def __jax_array__(self) -> Array:
        """Raises a TypeError, because tokens are several arrays, of which the user means one."""
        # Public functions, jax and numpy call this if they are passed the tokens themselves.
        want = "one of its arrays, tokens.positions, tokens.segment_ids or tokens.padding_mask"
        raise arguments.type_error(type(self).__name__, want, "the tokens")

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        """Raises a TypeError, as `__jax_array__` does."""
        return np.asarray(self.__jax_array__())

    def __repr__(self) -> str:
        """Shows the arrays that are given."""
        arrays = [f"{name}={_shown(array)}" for name, array in _given_arrays(self).items()]
        return f"TokenPositions({', '.join(arrays)})"

    def __len__(self) -> int:
        """Returns the number of batch rows, or of tokens if these are [length]."""
        return self.positions.shape[0] if self.positions.ndim == 1 else number_of_rows(self)

    def __getitem__(self, index: Any) -> "TokenPositions":
        """Slices as numpy does.

        `tokens[2:4]` has some batch rows, and `tokens[:, 2:6]` some tokens of each. If the tokens
        are [length], `tokens[2:6]` has some of them.
        """
        slices = index if isinstance(index, tuple) else (index,)
        are_slices = all(isinstance(entry, slice) for entry in slices)
        tokens = converted_again(self)
        rank = tokens.positions.ndim
        if len(slices) > rank or not are_slices:
            want = "one slice, of tokens" if rank == 1 else "slices of batch rows and of tokens"
            raise arguments.value_error("index", want, index)
        if rank == 1:
            return jax.tree.map(lambda array: array[slices], tokens)
        rows = number_of_rows(tokens)

        def sliced(array: Array) -> Array:
            """Slices an array [1 or batch, length], which is first given every batch row."""
            return jnp.broadcast_to(array, (rows, array.shape[1]))[slices]

        return jax.tree.map(sliced, tokens)

    def take(self, order: ArrayLike) -> "TokenPositions":
        """Puts the tokens of each batch row in another order, such as `load_balanced_order`.

        Use it to split long rows over devices. Tokens keep their places in the row, so a mask of
        all or some of them hides the same pairs as before. Give ids, labels and weights the same
        order. Shift the labels first, because afterwards the next token of a sequence is no longer
        beside it.

        Args:
            order: Integers, [number], the index in the row of each token.

        Returns:
            TokenPositions of [number] or [batch, number], with `places`. In batch rows where each
            sequence is one run of tokens whose positions rise by one, segment ids are new numbers.

        Raises:
            TypeError: `order` does not hold integers.
            ValueError: `order` has another rank, or an index on the host is outside the row.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_segment_ids([[5, 5, 5, 7]]).take([3, 2, 1, 0])
            >>> tokens.positions.tolist(), tokens.places.tolist()
            ([[0, 2, 1, 0]], [[3, 2, 1, 0]])

        Edge cases:
            - `AttentionMask.tile_kinds` stays as exact as before for tiles of neighbours in the
              row, except for chunks of packed rows.
            - On a device, an index outside the row gives padding, or the token at position 0 if the
              tokens have no segment ids.
        """
        arrays = batch_arrays(self)
        last = arrays["positions"].shape[1] - 1
        order = arguments.as_indices("order", order, last, "the row", "number")
        taken = TokenPositions(**_taken(arrays, order))
        return _with_rank(taken, self.positions.ndim)

    def with_block_ids(self, block_ids: ArrayLike) -> "TokenPositions":
        """Returns the same tokens in numbered blocks, such as a prefix or the patches of an image.

        Args:
            block_ids: Integers, [length] or [batch, length]; a negative number means "in no block".
                Tokens of one block and segment attend to each other even if a causal mask, a window
                or a chunk forbids it. A prefix is block 0, with -1 after it:
                `jnp.where(is_prefix, 0, -1)`. To decode with a cache, give blocks to its empty
                slots, too: -1.

        Raises:
            TypeError: `block_ids` are not integers that `TokenPositions` takes.
            ValueError: An integer on the host is outside int32, or the shape does not fit the
                positions.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_lengths([3], 3).with_block_ids([0, 0, -1])
            >>> te.AttentionMask(tokens, causal=True).dense()[0, 0].astype(int).tolist()
            [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
        """
        return dataclasses.replace(converted_again(self), block_ids=block_ids)

    def clear(self, where: ArrayLike) -> "TokenPositions":
        """Empties slots of a cache, in whole batch rows or slot by slot.

        Clear a batch row to use it for a new text. Clear the rejected drafts of a tree, because
        otherwise later tokens see the drafts that the next write does not reach. Once you have
        moved the accepted path to the front, call
        `slots.clear(jnp.arange(num_slots) >= lengths[:, None])`. You need not clear the keys and
        values, because the mask hides them.

        Args:
            where: Bools, True = clear. [batch] is about batch rows and [batch, slots] about slots.
                For slots without a batch axis, these are [] and [slots].

        Returns:
            TokenPositions of the same shape.

        Raises:
            TypeError: `where` is not bool.
            ValueError: `where` has another shape, or there are no segment ids.

        Example:
            >>> import transformer_embed as te
            >>> slots = te.TokenPositions.from_lengths([3, 2], 4)
            >>> slots.clear([True, False]).padding_mask.sum(1).tolist()
            [0, 2]
            >>> slots.clear([[False, True, True, True]] * 2).padding_mask.sum(1).tolist()
            [1, 1]
        """
        tokens = converted_again(self)
        where = arguments.as_mask("where", where, "clear")
        if tokens.segment_ids is None:
            raise arguments.value_error("segment_ids", "an array (0 is an empty slot)", None)
        row_shape = () if tokens.positions.ndim == 1 else (number_of_rows(tokens),)
        slot_shape = (*row_shape, tokens.positions.shape[-1])
        fits = where.shape in (row_shape, slot_shape)
        arguments.check_shape("where", where.shape, fits, f"{[*row_shape]} or {[*slot_shape]}")
        is_about_rows = where.ndim == len(row_shape)
        if is_about_rows:
            # A last axis of 1 clears all slots of a batch row.
            where = where[..., None]
        return dataclasses.replace(tokens, segment_ids=_cleared(tokens.segment_ids, where))

    @classmethod
    def empty(cls, batch_size: int, length: int) -> "TokenPositions":
        """Makes the slots of a cache that holds no tokens yet. `te.write_cache` fills them.

        Args:
            batch_size: The number of batch rows, at least 1.
            length: The number of slots of a batch row, at least 0.

        Returns:
            TokenPositions of [batch_size, length], all of them padding.

        Raises:
            TypeError: `batch_size` or `length` is not a Python int.
            ValueError: `batch_size` or `length` is out of its range.

        Example:
            >>> import jax
            >>> import transformer_embed as te
            >>> def step(slots, position):
            ...     token = te.TokenPositions.from_offset(position, 1)
            ...     slots, _ = te.write_cache(slots, token, position)
            ...     return slots, te.AttentionMask(token, slots, causal=True).dense()[0, 0, 0]
            >>> _, masks = jax.lax.scan(step, te.TokenPositions.empty(1, 4), jax.numpy.arange(3))
            >>> masks.astype(int).tolist()
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
        """
        batch_size = arguments.size("batch_size", batch_size)
        shape = (batch_size, arguments.length("length", length))
        # Two arrays, because a program cannot be given one array twice to write into.
        positions = jnp.zeros(shape, jnp.int32)
        return cls(positions, segment_ids=jnp.zeros(shape, jnp.int32))

    @classmethod
    def from_ids(
        cls,
        ids: ArrayLike,
        *,
        pad_id: int,
        end_id: int | None = None,
        start: int = 0,
        at_padding: int = 0,
    ) -> "TokenPositions":
        """Makes tokens from a padded batch of ids.

        Padding may be on the left, on the right, on both sides or between tokens, and is not
        counted.

        Args:
            ids: The ids, [length] or [batch, length], of any integer dtype.
            pad_id: The id of padding. It may be any int, for example -1. There is no default.
            end_id: The id that ends each text, for packed texts. The token after it is position
                `start` of the next segment. If None, each batch row is one text.
            start: The position of the first token. RoBERTa takes padding_idx + 1 = 2, and OPT 2.
            at_padding: The position of padding. RoBERTa takes padding_idx = 1, and OPT 1. (BERT
                counts padding like tokens, so do not pass positions to it.)

        Returns:
            TokenPositions of the shape of `ids`. The tokens of a batch row are segment 1, or
            segments 1, 2, ... with `end_id`.

        Raises:
            TypeError: `ids` are not integers, or another argument is not a Python int.
            ValueError: `ids` do not have rank 1 or 2; `pad_id` is outside int32, or is `end_id`; or
                positions counted from `start` would not fit int32.

        Example:
            >>> import transformer_embed as te
            >>> row = te.TokenPositions.from_ids([5, 6, 1, 1], pad_id=1, start=2, at_padding=1)
            >>> row.positions.tolist()
            [2, 3, 1, 1]
            >>> te.TokenPositions.from_ids([5, 2, 7, 8], pad_id=0, end_id=2).segment_ids.tolist()
            [1, 1, 2, 2]

        Source:
            Liu et al., "RoBERTa" (2019), https://arxiv.org/abs/1907.11692, as in fairseq's
            make_positions.
        """
        ids = arguments.as_int32("ids", ids)
        rows = as_batch("ids", ids)
        pad_id = arguments.int32("pad_id", pad_id)
        if end_id is not None and arguments.int32("end_id", end_id) == pad_id:
            raise arguments.value_error("end_id", "another id than pad_id", end_id)
        start = arguments.int32("start", start)
        at_padding = arguments.int32("at_padding", at_padding)
        check_last_position("start", start, rows.shape[1])
        counted = counted_from_ids(rows, pad_id, end_id, start, at_padding)
        tokens = cls(counted.positions, segment_ids=counted.segment_ids)
        return _with_rank(tokens, ids.ndim)

    @classmethod
    def from_mask(cls, mask: ArrayLike, *, start: int = 0, at_padding: int = 0) -> "TokenPositions":
        """Makes tokens from a bool mask of padding, which may have gaps.

        Use it if you have a mask in place of ids, such as the `attention_mask` of a tokenizer of
        transformers: `from_mask(attention_mask != 0)`. Each batch row is one sequence. Padding may
        be on the left, on the right, on both sides or between tokens, and is not counted.

        Args:
            mask: Bools, [length] or [batch, length], True = a token.
            start: The position of the first token. RoBERTa and OPT take 2.
            at_padding: The position of padding. RoBERTa and OPT take 1.

        Returns:
            TokenPositions of the shape of `mask`. The tokens of a batch row are segment 1.

        Raises:
            TypeError: `mask` is not bool, or another argument is not a Python int.
            ValueError: `mask` does not have rank 1 or 2, or positions counted from `start` would
                not fit int32.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_mask([[False, True, True, False, True]])
            >>> tokens.positions.tolist(), tokens.segment_ids.tolist()
            ([[0, 0, 1, 0, 2]], [[0, 1, 1, 0, 1]])
        """
        mask = arguments.as_array("mask", mask)
        if mask.dtype != bool:
            want = "a bool array, True = a token (`mask != 0` makes one)"
            raise arguments.type_error("mask", want, mask.dtype)
        has_valid_rank = mask.ndim in (1, 2)
        arguments.check_shape("mask", mask.shape, has_valid_rank, "[length] or [batch, length]")
        start = arguments.int32("start", start)
        at_padding = arguments.int32("at_padding", at_padding)
        check_last_position("start", start, mask.shape[-1])
        counted = counted_from_mask(mask, start, at_padding)
        return cls(counted.positions, segment_ids=counted.segment_ids)

    @classmethod
    def from_positions(cls, positions: ArrayLike) -> "TokenPositions":
        """Makes tokens from the positions of packed sequences without padding.

        Args:
            positions: Integers, [length] or [batch, length], which restart at each sequence. A
                token that is not one position after the token to its left begins a segment.

        Returns:
            TokenPositions of the shape of `positions`, with segments 1, 2, ...

        Raises:
            TypeError: `positions` are not integers that `TokenPositions` takes.
            ValueError: `positions` do not have rank 1 or 2, or do not fit int32.

        Example:
            >>> import transformer_embed as te
            >>> te.TokenPositions.from_positions([0, 1, 2, 0, 1]).segment_ids.tolist()
            [1, 1, 1, 2, 2]
        """
        positions = as_comparable("positions", positions)
        counted = counted_from_positions(as_batch("positions", positions))
        tokens = cls(counted.positions, segment_ids=counted.segment_ids)
        return _with_rank(tokens, positions.ndim)

    @classmethod
    def from_lengths(
        cls,
        lengths: ArrayLike,
        length: int,
        *,
        padding_side: str = "right",
    ) -> "TokenPositions":
        """Makes tokens from the lengths of batch rows that are padded to one length.

        Args:
            lengths: Integers from 0 to `length`, [batch], the number of tokens of each batch row.
                One integer, [], gives tokens without a batch axis.
            length: The length of the padded rows, at least 0.
            padding_side: `"right"` or `"left"`.

        Returns:
            TokenPositions of [batch, length] or [length], counted from 0. The tokens of a batch row
            are segment 1. A model that counts from 2 embeds `tokens.positions + 2`.

        Raises:
            TypeError: `lengths` are not integers, or `length` is not a Python int.
            ValueError: `lengths` have a rank above 1; one of `lengths` on the host is negative or
                above `length`; `length` is negative; or `padding_side` is another word.

        Example:
            >>> import transformer_embed as te
            >>> batch = te.TokenPositions.from_lengths([2, 3], 4, padding_side="left")
            >>> batch.padding_mask.astype(int).tolist()
            [[0, 0, 1, 1], [0, 1, 1, 1]]

        Edge cases:
            A device cannot raise errors. There, a negative number gives a row of padding, and a
            number above `length` a row full of tokens.
        """
        length = arguments.length("length", length)
        is_one_row = arguments.as_array("lengths", lengths).ndim == 0
        axes = () if is_one_row else ("batch",)
        lengths = arguments.as_indices("lengths", lengths, length, "the padded length", *axes)
        padding_side = arguments.choice("padding_side", padding_side, ("right", "left"))
        counted = counted_from_lengths(lengths, length, padding_side)
        return cls(counted.positions, segment_ids=counted.segment_ids)

    @classmethod
    def from_segment_ids(cls, segment_ids: ArrayLike) -> "TokenPositions":
        """Makes tokens from the segment ids of packed sequences.

        The position of a token is the number of tokens of its sequence before it in the row. For a
        mask of tokens and padding, which may have gaps, use `from_mask`.

        Args:
            segment_ids: Integers, [length] or [batch, length]: 0 is padding, and each sequence has
                a different positive number. The tokens of a sequence should be contiguous. On the
                host, a number that reappears later in the row is an error, because it is mostly a
                mistake of a loader.

        Returns:
            TokenPositions of the shape of `segment_ids`. Each sequence is counted from 0. A model
            that counts from 2 embeds `tokens.positions + 2`.

        Raises:
            TypeError: `segment_ids` are not integers that `TokenPositions` takes.
            ValueError: `segment_ids` do not have rank 1 or 2; or on the host, one is negative, does
                not fit int32, or repeats a number after a gap.

        Example:
            >>> import transformer_embed as te
            >>> te.TokenPositions.from_segment_ids([[1, 1, 1, 2, 2, 0]]).positions.tolist()
            [[0, 1, 2, 0, 1, 0]]

        Edge cases:
            A device cannot raise errors. There, if a number reappears after a gap, counting goes on
            where it stopped, so under a causal mask no token sees a later one. A negative number is
            padding. `te.check_batch` finds both in a data pipeline.

        Source:
            Raffel et al., "T5" (2020), section 3.5.2, https://arxiv.org/abs/1910.10683
        """
        integers = checked_segment_ids(segment_ids)
        on_device = as_signed("segment_ids", integers)
        rows = as_batch("segment_ids", on_device)
        if isinstance(integers, np.ndarray):
            _check_no_segment_reappears(integers)
        counted = counted_from_segments(rows)
        tokens = cls(counted.positions, segment_ids=counted.segment_ids)
        return _with_rank(tokens, integers.ndim)

    @classmethod
    def from_parents(cls, parents: ArrayLike, *, offset: ArrayLike = 0) -> "TokenPositions":
        """Makes trees of tokens: under a causal mask, a token sees itself and its ancestors.

        Use it for the drafts of speculative decoding, and for answers that share a prompt
        (`shared_prefix_parents`). A token predicts its children, which may not be beside it. So for
        a loss, without `shift`, give each token the hidden vector of its parent:
        `jnp.take_along_axis(x, parents[..., None], axis=1)`, with `mask=parents >= 0`.

        Args:
            parents: Integers, [length] or [batch, length], the index in the row of each token's
                parent. The root of a tree has -1. Padding has -2, and so do the empty slots of a
                cache that trees are written into. Tokens may be in any order.
            offset: Integers, [] or [batch], the position of roots. Pass the number of tokens in a
                cache, all of which the roots see. Parents [1, length] are used for every offset.

        Returns:
            TokenPositions of [batch, length], or of [length] if neither array has a batch axis. A
            position is the number of a token's ancestors, plus `offset`. `places` number the tokens
            in depth-first order.

        Raises:
            TypeError: `parents` or `offset` does not hold integers.
            ValueError: An array has another shape; or on the host, a parent is outside the row, is
                padding or is in a cycle, or positions from `offset` on would not fit int32.

        Example:
            >>> import transformer_embed as te
            >>> tree = te.TokenPositions.from_parents([-1, 0, 0, 2])
            >>> tree.positions.tolist()
            [0, 1, 1, 2]
            >>> te.AttentionMask(tree, causal=True).dense()[0].astype(int).tolist()
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]

        Edge cases:
            A device cannot raise errors. There, a token is padding if it or one of its ancestors is
            in a cycle, or has a parent that is outside the row or padding.

        Source:
            Miao et al., "SpecInfer" (2024), https://arxiv.org/abs/2305.09781
        """
        parents = arguments.as_array("parents", parents)
        rows = as_batch("parents", parents)
        length = rows.shape[1]
        integers = arguments.as_integers("parents", rows, -2, length - 1, "the row")
        if isinstance(integers, np.ndarray):
            check_parents(integers)
        # `ends` are one past the last place of a tree, so they need one number more than places.
        offset = _as_offset(offset, length + 1)
        parent_rows = arguments.as_int32("parents", integers)
        tokens = cls(**tree_arrays(parent_rows, offset))
        has_batch = parents.ndim == 2 or offset.ndim == 1
        rank = 2 if has_batch else 1
        return _with_rank(tokens, rank)

    @classmethod
    def from_offset(cls, offset: ArrayLike, length: int) -> "TokenPositions":
        """Makes new tokens that follow the tokens in a cache.

        Args:
            offset: Integers, the position of the first token: [] for one number, or [batch] for a
                number for each batch row. It may be traced, so decoding at a new offset compiles
                nothing new. If your model counts from another number (OPT from 2), add it.
            length: The number of new tokens, at least 0. It is 1 in step-by-step decoding.

        Returns:
            TokenPositions of [length] or [batch, length], all in segment 1. A prompt of several
            segments goes on in its last one: `TokenPositions(positions, segment_ids=...)`.

        Raises:
            TypeError: `offset` does not hold integers that `TokenPositions` takes, or `length` is
                not a Python int.
            ValueError: `offset` has a rank above 1; `length` is negative; or on the host, positions
                would not fit int32.

        Example:
            >>> import transformer_embed as te
            >>> step = te.TokenPositions.from_offset([5, 2], 1)
            >>> cache = te.TokenPositions.from_lengths([6, 3], 8)
            >>> mask = te.AttentionMask(step, cache, causal=True).dense()
            >>> mask[:, 0, 0].astype(int).tolist()
            [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]

        Edge cases:
            On a device, tokens past the end of int32 become padding, which no token sees.
        """
        length = arguments.length("length", length)
        counted = counted_from_offset(_as_offset(offset, length), length)
        return cls(counted.positions, segment_ids=counted.segment_ids)


register_pytree(TokenPositions)


def batch_arrays(tokens: TokenPositions) -> dict[str, Any]:
    """Returns the arrays of tokens that are not None, by name, each as [1 or batch, length]."""
    arrays = _given_arrays(converted_again(tokens))
    return {name: array if array.ndim == 2 else array[None] for name, array in arrays.items()}


def _given_arrays(tokens: TokenPositions) -> dict[str, Any]:
    """Returns the arrays of tokens that are not None, by name and in the order of the fields."""
    return {name: array for name, array in vars(tokens).items() if array is not None}


def converted_again(tokens: TokenPositions) -> TokenPositions:
    """Makes the tokens from their arrays again, which converts and checks the arrays.

    `jax.tree.map` makes tokens without this conversion. So their arrays may have a shorter dtype
    than int32, in which sums of positions and numbers of segments would wrap.
    """
    return TokenPositions(**vars(tokens))


def _check_no_segment_reappears(segment_ids: np.ndarray) -> None:
    """Raises a ValueError if a segment id on the host has two runs of tokens in one batch row."""
    rows = np.atleast_2d(segment_ids)
    row_is_wrong = segment_reappears(rows).any(axis=1)
    if row_is_wrong.any():
        want = (
            "one run of tokens for each number (te.TokenPositions.from_mask takes a mask with gaps)"
        )
        got = f"two runs of one in row {row_is_wrong.argmax()}"
        raise arguments.value_error("segment_ids", want, got)


def _with_rank(tokens: TokenPositions, rank: int) -> TokenPositions:
    """Returns tokens [1, length] as [length] if the rank is 1, and other tokens as they are."""
    return tokens if rank == 2 else jax.tree.map(lambda array: array[0], tokens)


def _as_offset(offset: ArrayLike, length: Any) -> Array:
    """Converts the offsets of `length` positions each to a device array, [] or [batch].

    An offset on the host from which `length` positions would leave int32 is a ValueError.
    """
    integers = arguments.as_integers("offset", offset)
    array = as_signed("offset", integers)
    arguments.check_shape("offset", array.shape, array.ndim < 2, "[] or [batch]")
    if isinstance(integers, np.ndarray) and integers.size:
        check_last_position("offset", int(integers.max()), length)
    return array


def _shown(array: Any) -> str:
    """Returns the dtype and the shape of an array, such as "int32[2, 5]", for a repr."""
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else repr(array)


def segment_ids_or_ones(tokens: TokenPositions) -> Array:
    """Returns the segment ids of tokens; without segment ids, each token is in segment 1."""
    return jnp.ones_like(tokens.positions) if tokens.segment_ids is None else tokens.segment_ids


def check_token_positions(name: str, value: Any) -> None:
    """Raises a TypeError unless a value is a TokenPositions."""
    want = "a TokenPositions, from te.TokenPositions.from_ids(ids, pad_id=0) for example"
    arguments.instance(name, value, TokenPositions, want)


def number_of_rows(tree: Any) -> Any:
    """Returns the number of batch rows of tokens or of a mask, 1 for tokens [length]."""
    arrays = jax.tree.leaves(tree)
    counts = {array.shape[0] for array in arrays if getattr(array, "ndim", 0) == 2}
    # Each array has one batch row, or the same other number of batch rows as the others. This is no
    # maximum, because a symbolic dimension of jax.export has no order.
    return next(iter(counts - {1}), 1)


# The functions below are compiled even if the caller is not.


@compiled()
def _cleared(
    segments: Integer[Array, "*n t"], where: Bool[Array, "*b #t"]
) -> Integer[Array, "*b t"]:
    """Returns the segment ids with 0, which is padding, where slots are cleared."""
    return jnp.where(split_like(where, segments), 0, segments)


@compiled()
def _taken(arrays: dict[str, Array], order: Int32[Array, "n"]) -> dict[str, Array]:
    """Returns the arrays of `batch_arrays` in another order of the tokens, with their places."""
    arrays = jax.tree.map(with_whole_rows, arrays)
    if "places" not in arrays:
        # In batch rows whose positions row indices can replace (see `with_row_indices`), the places
        # become row indices. In other batch rows, they are the positions.
        arrays["places"] = arrays["positions"]
        arrays = with_row_indices(arrays)
    # For an index outside the row, each array gets a 0, and the segment id 0 means padding.
    take = functools.partial(jnp.take, indices=order, axis=1, mode="fill", fill_value=0)
    return jax.tree.map(take, arrays)
