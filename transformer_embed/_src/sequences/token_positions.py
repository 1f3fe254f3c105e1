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

    Make a `TokenPositions` from a batch, then make position encodings and attention masks from this
    object. Use one of the constructors (`from_ids`, `from_mask`, `from_lengths`,
    `from_segment_ids`, `from_offset` and others), inside or outside `jax.jit`, or pass arrays of
    your own. The class is a pytree, so it passes through `jit`, `vmap` and `scan`, and `jax.export`
    can save it.

    A `TokenPositions` has the shape of the arrays that you pass. If you pass arrays of shape
    [length], the masks that you make from them have no batch axis. A function that needs a batch
    uses these arrays for every batch row. The class holds only arrays, so you may use
    `jax.tree.map` to slice, stack or reshape a batch, or to pad a batch with zeros.

    Args:
        positions: The position of each token in the sequence. Integers of shape [length] or [batch,
            length].
        segment_ids: The number of the sequence that each token belongs to. Integers of at least 0,
            shape [length] or [batch, length]. 0 is padding. If None, each batch row is one sequence
            without padding.
        block_ids: The number of the block that each token belongs to. Integers of shape [length] or
            [batch, length]. A block is a group of tokens that always attend to each other, such as
            the patches of an image, even if a causal mask, a window or a chunk would hide some of
            them. A token with a negative number is in no block. If None, there are no blocks. See
            `with_block_ids`.
        places: A number for each token, by which a causal mask and a window compare tokens.
            Integers of shape [length] or [batch, length]. With the places 0, 2 and 1, for example,
            the token in the middle is the last one for a causal mask, and sees the two others. You
            seldom set places yourself: the methods `take` and `from_parents` make them. If None,
            masks compare positions.
        ends: For each token, one past the last place from which the token is seen. (The place of a
            token is its number in the argument `places`.) Integers of shape [length] or [batch,
            length]. For example, under a causal mask, a token with place 3 and end 5 is seen only
            from the places 3 and 4. You seldom set ends yourself: the method `from_parents` makes
            them. If two answers follow one prompt, the ends hide each answer from the other one. If
            None, a causal mask lets all later tokens see the token.

    Raises:
        TypeError: An array does not hold integers, or an array is a jax array of uint32 or uint64.
        ValueError: An integer in a list or a numpy array is outside int32, or is a negative segment
            id. An array has a rank other than 1 or 2, or the shapes of the arrays do not fit each
            other.

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
        - If one array has a batch axis, all arrays of the object get a batch axis. An array
          [length] becomes [1, length].
        - Segment ids in a jax array are not checked. If you mark padding by -1 in such an array,
          the padding counts as a sequence of its own and is not hidden. Use `from_segment_ids`,
          which turns negative segment ids into padding.
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
        # int32 or wider, all [length], or all [1 or batch, length].
        arrays = comparable_arrays(**given)
        length = arrays["positions"].shape[-1]
        for name, array in arrays.items():
            arguments.check_same(name, "the length of positions", array.shape[-1], length)
        arguments.set_fields(self, **arrays)

    @property
    def padding_mask(self) -> Bool[Array, "*b t"]:
        """Returns what is a token and not padding: bool [length] or [batch, length]."""
        return differs_from(segment_ids_or_ones(self), 0)

    @property
    def next_token_mask(self) -> Bool[Array, "*b t"]:
        """Returns which tokens are followed by a token of the same sequence, True = followed.

        The mask is bool [length] or [batch, length], and is False at padding and at the last token
        of each sequence. Use the mask to train a language model only on the tokens that have a next
        token:

            labels = jnp.roll(ids, -1, axis=-1)
            output = embedder.output(params)
            loss = te.linear_cross_entropy(x, output, labels, mask=batch.next_token_mask)
        """
        # Tokens have `places` if they are not in the order of their texts: trees, or `take`.
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
        tokens = with_converted_arrays(self)
        rank = tokens.positions.ndim
        has_too_many_slices = len(slices) > rank
        if has_too_many_slices or not are_slices:
            want = "one slice, of tokens" if rank == 1 else "slices of batch rows and of tokens"
            raise arguments.value_error("index", want, index)
        if rank == 1:
            return jax.tree.map(lambda array: array[slices], tokens)
        rows = number_of_rows(tokens)

        def sliced(array: Array) -> Array:
            """Broadcasts an array [1 or batch, length] to all batch rows, then slices it."""
            whole_batch = jnp.broadcast_to(array, (rows, array.shape[1]))
            return whole_batch[slices]

        return jax.tree.map(sliced, tokens)

    def take(self, order: ArrayLike) -> "TokenPositions":
        """Puts the tokens of each batch row in another order, such as `load_balanced_order`.

        Use it to split long rows over devices. The field `places` of the result says where the
        tokens were in the old order, so an attention mask allows the same pairs of tokens as
        before. Give ids, labels and weights the same order. Shift the labels first, because in the
        new order a token and the next token of its sequence are no longer neighbours.

        Args:
            order: For each token of the result, the index of this token in the old row. Integers of
                shape [n], where n is the new number of tokens: you may leave out tokens.

        Returns:
            TokenPositions of shape [n] or [batch, n]. The field `places` says where each token was
            in the old order, and masks compare these places. Sequences may get new segment ids, and
            two different sequences of a batch row never share a segment id.

        Raises:
            TypeError: `order` does not hold integers.
            ValueError: `order` does not have rank 1, or an index in a list or a numpy array is
                outside the row.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_segment_ids([[5, 5, 5, 7]]).take([3, 2, 1, 0])
            >>> tokens.positions.tolist(), tokens.places.tolist()
            ([[0, 2, 1, 0]], [[3, 2, 1, 0]])

        Edge cases:
            - `AttentionMask.tile_kinds` says which tiles of a mask are empty or full, so that a
              kernel can save work. If the tokens of each tile were neighbours before `take`
              reordered the row, `tile_kinds` finds as many empty and full tiles as before. But if a
              row is packed and the mask has a `chunk`, `tile_kinds` finds fewer.
            - If `order` is a jax array, its values are not checked. An index outside the row gives
              padding if the tokens have segment ids, and otherwise a token with position 0.
        """
        # The arrays of the tokens, by name, each with a batch axis.
        arrays = batch_arrays(self)
        last = arrays["positions"].shape[1] - 1
        # An int32 array of one axis, after a check that it has indices inside the row.
        order = arguments.as_indices("order", order, last, "the row", "number")
        taken = TokenPositions(**_taken(arrays, order))
        return _with_rank(taken, self.positions.ndim)

    def with_block_ids(self, block_ids: ArrayLike) -> "TokenPositions":
        """Returns the same tokens in numbered blocks, such as a prefix or the patches of an image.

        Args:
            block_ids: The number of the block that each token belongs to. Integers of shape
                [length] or [batch, length]. Tokens of the same block and segment attend to each
                other, even if a causal mask, a window or a chunk would hide some of them. A token
                with a negative number is in no block. For a prefix whose tokens all see each other,
                pass `jnp.where(is_prefix, 0, -1)`. To decode with a cache, `block_ids` must have a
                number for each slot of the cache. Write -1 for empty slots.

        Raises:
            TypeError: `block_ids` does not hold integers, or is a jax array of uint32 or uint64.
            ValueError: An integer in a list or a numpy array is outside int32, or the shape of
                `block_ids` does not fit the shape of the positions.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_lengths([3], 3).with_block_ids([0, 0, -1])
            >>> te.AttentionMask(tokens, causal=True).dense()[0, 0].astype(int).tolist()
            [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
        """
        return dataclasses.replace(with_converted_arrays(self), block_ids=block_ids)

    def clear(self, where: ArrayLike) -> "TokenPositions":
        """Empties slots of a cache, in whole batch rows or slot by slot.

        Clear a batch row to use the row for a new text. Also clear rejected drafts of speculative
        decoding. Otherwise later tokens see the drafts that the next write does not overwrite. If
        the accepted tokens of each batch row are in the first `lengths` slots, call
        `slots.clear(jnp.arange(num_slots) >= lengths[:, None])` to clear all slots after them.
        Leave keys and values as they are, because the mask hides the keys of empty slots.

        Args:
            where: What to clear. Bools, True = clear. Pass shape [batch] to clear batch rows of the
                cache, and shape [batch, slots] to clear single slots. (A slot has room for one
                token in a batch row.) If the tokens have no batch axis, pass shape [] or [slots].

        Returns:
            TokenPositions of the same shape.

        Raises:
            TypeError: `where` is not bool.
            ValueError: `where` has neither of the two shapes above, or the tokens have no segment
                ids.

        Example:
            >>> import transformer_embed as te
            >>> slots = te.TokenPositions.from_lengths([3, 2], 4)
            >>> slots.clear([True, False]).padding_mask.sum(1).tolist()
            [0, 2]
            >>> slots.clear([[False, True, True, True]] * 2).padding_mask.sum(1).tolist()
            [1, 1]
        """
        tokens = with_converted_arrays(self)
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
        segment_ids = _with_zeros(tokens.segment_ids, where)
        return dataclasses.replace(tokens, segment_ids=segment_ids)

    @classmethod
    def empty(cls, batch_size: int, length: int) -> "TokenPositions":
        """Makes the slots of a cache that holds no tokens yet. `te.write_cache` fills them.

        Args:
            batch_size: The number of batch rows, at least 1.
            length: The number of slots of a batch row, at least 0.

        Returns:
            TokenPositions of shape [batch_size, length]. All slots are padding, so no query sees
            them.

        Raises:
            TypeError: `batch_size` or `length` is not a Python int.
            ValueError: `batch_size` is below 1, or `length` is negative.

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

        Use it if padding has an id of its own. Padding may be on the left, on the right, on both
        sides or between tokens. Positions count only the tokens.

        Args:
            ids: The ids, of any integer dtype. Shape [length] or [batch, length].
            pad_id: The id of padding, any int32, for example -1. There is no default.
            end_id: The id that ends each text. Set it if a batch row holds several texts. The token
                after an `end_id` begins the next segment, at position `start`. If None, each batch
                row is one text.
            start: The position of the first token. Pass 2 for RoBERTa (padding_idx + 1) and for
                OPT.
            at_padding: The position of padding. Pass 1 for RoBERTa (padding_idx) and for OPT. (BERT
                counts padding like tokens, so the position of a token is its index in the row. A
                BERT layer uses these positions if you pass no positions.)

        Returns:
            TokenPositions of the shape of `ids`. If you set `end_id`, the texts of a batch row are
            segments 1, 2, ... Otherwise, all tokens of a batch row are in segment 1.

        Raises:
            TypeError: `ids` does not hold integers. `pad_id`, `end_id`, `start` or `at_padding` is
                not a Python int.
            ValueError: `ids` has a rank other than 1 or 2. `pad_id`, `end_id`, `start` or
                `at_padding` is outside int32, or `end_id` equals `pad_id`. The length of a row plus
                `start` is above 2**31, so a position could be outside int32.

        Example:
            >>> import transformer_embed as te
            >>> row = te.TokenPositions.from_ids([5, 6, 1, 1], pad_id=1, start=2, at_padding=1)
            >>> row.positions.tolist()
            [2, 3, 1, 1]
            >>> te.TokenPositions.from_ids([5, 2, 7, 8], pad_id=0, end_id=2).segment_ids.tolist()
            [1, 1, 2, 2]

        Source:
            Positions that skip padding are from Liu et al., "RoBERTa" (2019),
            https://arxiv.org/abs/1907.11692. The code is the function make_positions of fairseq.
        """
        ids = arguments.as_int32("ids", ids)
        rows = as_batch("ids", ids)
        pad_id = arguments.int32("pad_id", pad_id)
        if end_id is not None and arguments.int32("end_id", end_id) == pad_id:
            raise arguments.value_error("end_id", "another id than pad_id", end_id)
        start = arguments.int32("start", start)
        at_padding = arguments.int32("at_padding", at_padding)
        check_last_position("start", start, rows.shape[1])
        # The position and the segment id of each token, [1 or batch, length].
        counted = counted_from_ids(rows, pad_id, end_id, start, at_padding)
        tokens = cls(counted.positions, segment_ids=counted.segment_ids)
        return _with_rank(tokens, ids.ndim)

    @classmethod
    def from_mask(cls, mask: ArrayLike, *, start: int = 0, at_padding: int = 0) -> "TokenPositions":
        """Makes tokens from a bool mask of padding, which may have gaps.

        Use it if you have a mask in place of ids, such as the `attention_mask` of a tokenizer of
        transformers: `from_mask(attention_mask != 0)`. Each batch row is one sequence. Padding may
        be on the left, on the right, on both sides or between tokens. Positions count only the
        tokens.

        Args:
            mask: Which entries are tokens. Bools, True = a token. Shape [length] or [batch,
                length].
            start: The position of the first token. Pass 2 for RoBERTa and OPT.
            at_padding: The position of padding. Pass 1 for RoBERTa and OPT.

        Returns:
            TokenPositions of the shape of `mask`. All tokens of a batch row are in segment 1.

        Raises:
            TypeError: `mask` is not bool. `start` or `at_padding` is not a Python int.
            ValueError: `mask` has a rank other than 1 or 2. The length of a row plus `start` is
                above 2**31, so a position could be outside int32.

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
            positions: The position of each token. Integers of shape [length] or [batch, length],
                which restart at each sequence. If the position of a token is not one more than the
                position before, the token begins a new segment.

        Returns:
            TokenPositions of the shape of `positions`, with segments 1, 2, ...

        Raises:
            TypeError: `positions` does not hold integers, or is a jax array of uint32 or uint64.
            ValueError: `positions` has a rank other than 1 or 2, or a position in a list or a numpy
                array is outside int32.

        Example:
            >>> import transformer_embed as te
            >>> te.TokenPositions.from_positions([0, 1, 2, 0, 1]).segment_ids.tolist()
            [1, 1, 1, 2, 2]
        """
        positions = as_comparable("positions", positions)
        # The position and the segment id of each token, [1 or batch, length].
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
            lengths: The number of tokens of each batch row. Integers from 0 to `length`, shape
                [batch]. If you pass a single integer, the tokens have no batch axis.
            length: The length of the padded rows, at least 0.
            padding_side: The side of the row on which the padding is, `"right"` or `"left"`.

        Returns:
            TokenPositions of shape [batch, length] or [length]. Positions are counted from 0, and
            all tokens of a batch row are in segment 1. If your model counts positions from 2, pass
            `tokens.positions + 2` to the layer.

        Raises:
            TypeError: `lengths` are not integers, or `length` is not a Python int.
            ValueError: `lengths` has a rank above 1, or a number in it is negative or above the
                padded `length` (not checked in a jax array). `length` is negative. `padding_side`
                is neither `"right"` nor `"left"`.

        Example:
            >>> import transformer_embed as te
            >>> batch = te.TokenPositions.from_lengths([2, 3], 4, padding_side="left")
            >>> batch.padding_mask.astype(int).tolist()
            [[0, 0, 1, 1], [0, 1, 1, 1]]

        Edge cases:
            If `lengths` is a jax array, its values are not checked. A negative number gives a row
            of padding, and a number above `length` gives a row full of tokens.
        """
        length = arguments.length("length", length)
        is_one_row = arguments.as_array("lengths", lengths).ndim == 0
        # The names of the axes that `lengths` must have: none, or one of batch rows.
        axes = () if is_one_row else ("batch",)
        # An int32 array with these axes, after a check that lengths on the host are 0 to `length`.
        lengths = arguments.as_indices("lengths", lengths, length, "the padded length", *axes)
        padding_side = arguments.choice("padding_side", padding_side, ("right", "left"))
        counted = counted_from_lengths(lengths, length, padding_side)
        return cls(counted.positions, segment_ids=counted.segment_ids)

    @classmethod
    def from_segment_ids(cls, segment_ids: ArrayLike) -> "TokenPositions":
        """Makes tokens from the segment ids of packed sequences.

        Use it if a batch row holds several sequences. The position of a token is the number of
        tokens before it in the same sequence. If you have a mask of tokens and padding, use
        `from_mask`.

        Args:
            segment_ids: The number of the sequence that each token belongs to. Integers of shape
                [length] or [batch, length]. 0 is padding, and each sequence has a different
                positive number. Keep the tokens of a sequence together. If you pass a list or a
                numpy array, [1, 2, 1] is an error, because the 1 appears again after another
                number. This is usually a mistake of a loader.

        Returns:
            TokenPositions of the shape of `segment_ids`. In each sequence, positions are counted
            from 0. If your model counts positions from 2, pass `tokens.positions + 2` to the layer.

        Raises:
            TypeError: `segment_ids` does not hold integers, or is a jax array of uint32 or uint64.
            ValueError: `segment_ids` has a rank other than 1 or 2. A segment id in a list or a
                numpy array is negative, is outside int32, or appears again after another number,
                such as the last 1 in [1, 2, 1].

        Example:
            >>> import transformer_embed as te
            >>> te.TokenPositions.from_segment_ids([[1, 1, 1, 2, 2, 0]]).positions.tolist()
            [[0, 1, 2, 0, 1, 0]]

        Edge cases:
            Segment ids in a jax array are not checked. If a number appears again after another one,
            as in [1, 2, 1], all tokens with this number are one sequence. In this example, the
            positions are 0, 0 and 1, so a causal mask hides the third token from the first one. A
            negative number becomes padding. To find negative numbers, and numbers that appear
            again, call `te.check_batch(..., order="packed")` in your data pipeline.

        Source:
            Packing is described by Raffel et al., "T5" (2020), section 3.5.2,
            https://arxiv.org/abs/1910.10683
        """
        # Segment ids on the host stay there for now, for the check below.
        integers = checked_segment_ids(segment_ids)
        on_device = as_signed("segment_ids", integers)
        rows = as_batch("segment_ids", on_device)
        # On the host, two runs of tokens with the same segment id in a row are an error.
        if isinstance(integers, np.ndarray):
            _check_no_segment_reappears(integers)
        # The position and the segment id of each token, [1 or batch, length].
        counted = counted_from_segments(rows)
        tokens = cls(counted.positions, segment_ids=counted.segment_ids)
        return _with_rank(tokens, integers.ndim)

    @classmethod
    def from_parents(cls, parents: ArrayLike, *, offset: ArrayLike = 0) -> "TokenPositions":
        """Makes trees of tokens: under a causal mask, a token sees itself and its ancestors.

        Use it if the tokens form a tree, so that one token may have several next tokens. Examples
        are the drafts of speculative decoding, and answers that share a prompt
        (`shared_prefix_parents`). In such a tree, a token is predicted from its parent, which may
        be anywhere in the row. So compute a loss like this, without `shift`:

            # For each token, the hidden vector of its parent: [batch, length, d_model].
            parent_x = jnp.take_along_axis(x, parents[..., None], axis=1)
            loss = te.linear_cross_entropy(parent_x, output, ids, mask=parents >= 0)

        Args:
            parents: For each token, the index of its parent in the row. Integers of shape [length]
                or [batch, length]. Write -1 for the root of a tree, and -2 for padding and for
                empty slots of a cache. Tokens may be in any order.
            offset: The position of each root, the first token of a tree. Integers of shape [] or
                [batch]. If the tree continues a cache, pass the number of tokens in the cache. For
                example, roots at position 5 see the five tokens in the cache, at the positions 0 to
                4. With `parents` of shape [length] or [1, length] and an offset of shape [batch],
                every batch row has the same tree.

        Returns:
            TokenPositions of shape [batch, length], or [length] if neither `parents` nor `offset`
            has a batch axis. The position of a token is `offset` plus the number of its ancestors.
            The field `places` numbers the tokens in depth-first order, from `offset` on. (In this
            order, all descendants of a token come directly after it.)

        Raises:
            TypeError: `parents` or `offset` does not hold integers.
            ValueError: `parents` or `offset` has a shape that is not listed above, or the batch
                sizes do not fit each other. A parent in a list or a numpy array is outside the row,
                is padding, or is in a cycle. `offset` is so large that a position would be outside
                int32. (Values of a jax array are not checked.)

        Example:
            >>> import transformer_embed as te
            >>> tree = te.TokenPositions.from_parents([-1, 0, 0, 2])
            >>> tree.positions.tolist()
            [0, 1, 1, 2]
            >>> te.AttentionMask(tree, causal=True).dense()[0].astype(int).tolist()
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]

        Edge cases:
            If `parents` is a jax array, its values are not checked. A token becomes padding if the
            path from the token to the root meets a cycle, padding, or an index outside the row.

        Source:
            Attention in a tree of drafts is from Miao et al., "SpecInfer" (2024),
            https://arxiv.org/abs/2305.09781
        """
        parents = arguments.as_array("parents", parents)
        rows = as_batch("parents", parents)
        length = rows.shape[1]
        # The check allows -2 (padding), -1 (a root) and the indices of the row.
        integers = arguments.as_integers("parents", rows, -2, length - 1, "the row")
        if isinstance(integers, np.ndarray):
            check_parents(integers)
        # A place is the index of a token in depth-first order plus the offset, so places are at
        # most offset + length - 1. The end of a token is one past the last place of its subtree. So
        # all numbers up to offset + length must be inside int32.
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
            offset: The position of the first new token, which is the number of tokens before it.
                Integers of shape [], or [batch] for a number per batch row. The offset may be
                traced, so a decoding step compiles only once. If your model counts positions from a
                number other than 0 (OPT from 2), add that number to the offset.
            length: The number of new tokens, at least 0. Pass 1 to decode token by token.

        Returns:
            TokenPositions of shape [length] or [batch, length], all in segment 1. If the last token
            in your cache is in segment 2, for example, the new tokens must also be in segment 2:
            make them by `TokenPositions(positions, segment_ids=...)`.

        Raises:
            TypeError: `offset` does not hold integers, or is a jax array of uint32 or uint64.
                `length` is not a Python int.
            ValueError: `offset` has a rank above 1, or `length` is negative. `offset` is so large
                that a position would be outside int32. (Values of a jax array are not checked.)

        Example:
            >>> import transformer_embed as te
            >>> step = te.TokenPositions.from_offset([5, 2], 1)
            >>> cache = te.TokenPositions.from_lengths([6, 3], 8)
            >>> mask = te.AttentionMask(step, cache, causal=True).dense()
            >>> mask[:, 0, 0].astype(int).tolist()
            [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]

        Edge cases:
            If `offset` is a jax array, its values are not checked. Tokens whose position would be
            above the largest int32 become padding, which no token sees.
        """
        length = arguments.length("length", length)
        counted = counted_from_offset(_as_offset(offset, length), length)
        return cls(counted.positions, segment_ids=counted.segment_ids)


register_pytree(TokenPositions)


def batch_arrays(tokens: TokenPositions) -> dict[str, Any]:
    """Returns the arrays of tokens that are not None, by name, each as [1 or batch, length]."""
    batches = {}
    for name, array in _given_arrays(with_converted_arrays(tokens)).items():
        batches[name] = array if array.ndim == 2 else array[None]
    return batches


def _given_arrays(tokens: TokenPositions) -> dict[str, Any]:
    """Returns the arrays of tokens that are not None, by name and in the order of the fields."""
    return {name: array for name, array in vars(tokens).items() if array is not None}


def with_converted_arrays(tokens: TokenPositions) -> TokenPositions:
    """Returns the same tokens with arrays of int32 or wider, which are checked, too.

    A user may have made the tokens by `jax.tree.map`, which converts and checks nothing. So their
    arrays may have a dtype of 8 or 16 bits, in which sums of positions and numbers of segments
    would wrap.
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
    if rank == 2:
        return tokens
    return jax.tree.map(lambda array: array[0], tokens)


def _as_offset(offset: ArrayLike, length: Any) -> Array:
    """Converts the positions of first tokens to a device array, [] or [batch].

    If an offset is on the host, the last of `length` positions from the offset on must be inside
    int32. Otherwise a ValueError is raised.
    """
    integers = arguments.as_integers("offset", offset)
    array = as_signed("offset", integers)
    arguments.check_shape("offset", array.shape, array.ndim < 2, "[] or [batch]")
    if isinstance(integers, np.ndarray) and integers.size:
        highest_offset = int(integers.max())
        check_last_position("offset", highest_offset, length)
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
    # Each array has one batch row, or as many batch rows as the others. (`max` could not be used,
    # because a symbolic dimension of jax.export has no order.)
    for count in counts:
        if count != 1:
            return count
    return 1


# The functions below are compiled even if the caller is not.


@compiled()
def _with_zeros(
    segments: Integer[Array, "*n t"], where: Bool[Array, "*b #t"]
) -> Integer[Array, "*b t"]:
    """Returns the segment ids with 0, the segment id of padding, where `where` is True."""
    return jnp.where(split_like(where, segments), 0, segments)


@compiled()
def _taken(arrays: dict[str, Array], order: Int32[Array, "n"]) -> dict[str, Array]:
    """Returns the arrays of tokens in another order, with `places`.

    Args:
        arrays: The arrays of the tokens, from `batch_arrays`.
        order: For each token of the result, its index in the old row.
    """
    # An index of `order` may be anywhere in the row, so each device needs whole rows.
    arrays = jax.tree.map(with_whole_rows, arrays)
    if "places" not in arrays:
        # In the new order, a causal mask and a window compare places. So the places must say which
        # token of a sequence comes first, and how far apart two tokens are, as positions do.
        arrays["places"] = arrays["positions"]
        # Where positions count the tokens of each sequence, this replaces the places by the indices
        # in the old row. A tile with old neighbours then has a narrow range of places, so
        # `AttentionMask.tile_kinds` stays exact.
        arrays = with_row_indices(arrays)
    # For an index outside the row, each array gets a 0, and the segment id 0 means padding.
    take = functools.partial(jnp.take, indices=order, axis=1, mode="fill", fill_value=0)
    return jax.tree.map(take, arrays)
