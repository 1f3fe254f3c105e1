"""The position and the segment of each token: padding on either side, packing, decoding."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Bool, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import split_like, with_whole_rows
from transformer_embed._src.pytrees import register_pytree
from transformer_embed._src.sequences.runs import (
    differs,
    has_next_token,
    in_row,
    index_in_segment,
    of_previous_token,
    positions_of_tokens,
    restarted,
    second_runs,
)
from transformer_embed._src.sequences.trees import check_parents, tree_arrays


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TokenPositions:
    """The position and the segment of each token in a batch.

    Position encodings and attention masks are made from these. Use one of the constructors
    `from_ids`, `from_lengths`, `from_segment_ids` and `from_offset`, inside or outside jit, or pass
    arrays of your own. The class is a pytree, so it passes through `jit`, `vmap` and `scan` and can
    be serialised by `jax.export`.

    It holds nothing but these arrays, so a batch may be sliced, padded with zeros, stacked or
    reshaped by `jax.tree.map`, and a cache may be the carry of a `scan`.

    Args:
        positions: [length] or [batch, length] integers; the position of each token in its own
            sequence. If all arrays are [length], the tokens are [length], and so is a mask of them.
            Where a batch is needed, tokens [length] are used for every batch row.
        segment_ids: [length] or [batch, length] integers of at least 0; the sequence that each
            token belongs to, 0 = padding. On a device, tokens with a negative one are a sequence,
            too, so padding marked by -1 is not hidden. None: one sequence, without padding.
        block_ids: [length] or [batch, length] integers; tokens of one block attend to each other
            even where a causal mask, a window or a chunk forbids it. Negative: in no block. None:
            there are no blocks. See `with_block_ids`.
        places: [length] or [batch, length] integers by which a causal mask and a window compare
            tokens of a sequence. None: their positions. `take` and `from_parents` give them.
        ends: [length] or [batch, length] integers: under a causal mask, only tokens whose place is
            before this number see the token. In a tree it hides a token from other branches. None:
            all later tokens see it.

    Raises:
        TypeError: an array does not hold integers, or is a jax array of unsigned ones of 32 bits or
            more.
        ValueError: host integers outside int32, or negative segment ids; a rank other than 1 or 2,
            or shapes that do not fit each other.

    Example:
        >>> import transformer_embed as te
        >>> batch = te.TokenPositions.from_ids([[0, 0, 7, 8, 9], [5, 6, 0, 0, 0]], pad_id=0)
        >>> batch.positions.tolist()
        [[0, 0, 0, 1, 2], [0, 1, 0, 0, 0]]
        >>> te.AttentionMask(batch, causal=True).dense().shape
        (2, 1, 5, 5)
        >>> batch.next_token_mask.astype(int).tolist()
        [[0, 0, 1, 1, 0], [1, 0, 0, 0, 0]]
    """

    positions: Any
    _: dataclasses.KW_ONLY
    segment_ids: Any = None
    block_ids: Any = None
    places: Any = None
    ends: Any = None

    def __post_init__(self):
        arrays = comparable_rows(**{"positions": self.positions} | _given(self))
        length = arrays["positions"].shape[-1]
        for name, array in arrays.items():
            arguments.check_same(name, "the length of positions", array.shape[-1], length)
        arguments.set_fields(self, **arrays)

    @property
    def padding_mask(self) -> Bool[Array, "*b t"]:
        """bool [length] or [batch, length], True = a token."""
        return differs(segments_of(self), 0)

    @property
    def next_token_mask(self) -> Bool[Array, "*b t"]:
        """bool [length] or [batch, length], True = the next token is of the same sequence.

        It is False at padding and at the last token of each sequence, in every row and also where
        another sequence follows. A language model that predicts the next token is trained on these
        positions only:

            labels = jnp.roll(ids, -1, axis=-1)
            output = embedder.output(params)
            loss = te.linear_cross_entropy(x, output, labels, mask=batch.next_token_mask)
        """
        if self.places is not None:
            want = "None, for tokens in the order of their row (shift the labels before)"
            raise arguments.value_error("places", want, "an array")
        return has_next_token(segments_of(self))

    def __jax_array__(self) -> Array:
        # Public functions, jax and numpy ask for this if they are passed the tokens themselves.
        want = "one of its arrays, tokens.positions, tokens.segment_ids or tokens.padding_mask"
        raise arguments.type_error(type(self).__name__, want, "the tokens")

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.asarray(self.__jax_array__())

    def __repr__(self) -> str:
        arrays = [f"{name}={_shown(array)}" for name, array in _given(self).items()]
        return f"TokenPositions({', '.join(arrays)})"

    def __len__(self) -> int:
        """Returns the number of batch rows, or of tokens if these are [length]."""
        return self.positions.shape[0] if self.positions.ndim == 1 else number_of_rows(self)

    def __getitem__(self, index: Any) -> "TokenPositions":
        """Slices as numpy does.

        `tokens[2:4]` has some batch rows, and `tokens[:, 2:6]` some tokens of each. If the tokens
        are [length], `tokens[2:6]` has some of them.
        """
        parts = index if isinstance(index, tuple) else (index,)
        tokens = as_made(self)
        rank = tokens.positions.ndim
        if len(parts) > rank or not all(isinstance(part, slice) for part in parts):
            want = "one slice, of tokens" if rank == 1 else "slices of batch rows and of tokens"
            raise arguments.value_error("index", want, index)
        if rank == 1:
            return jax.tree.map(lambda array: array[parts], tokens)
        rows = number_of_rows(tokens)
        return jax.tree.map(
            lambda array: jnp.broadcast_to(array, (rows, array.shape[1]))[parts], tokens
        )

    def take(self, order: ArrayLike) -> "TokenPositions":
        """The tokens of each row in another order, such as `load_balanced_order`.

        Tokens keep their places in the row, so a mask of all or some of them hides the same pairs
        as before. `block_mask` stays as exact for blocks of neighbours in the row, except for
        chunks of packed rows. Give ids, labels and weights the same order. Shift the labels first,
        since the next token of a sequence is no longer beside it.

        Args:
            order: [number] integers, the index in the row of each token.

        Returns:
            TokenPositions of [number] or [batch, number], with `places`. In rows where
            each sequence is one run of tokens whose positions rise by one, segment ids are new
            numbers.

        Raises:
            TypeError: order does not hold integers.
            ValueError: order has another rank, or an index on the host is outside the row.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_segment_ids([[5, 5, 5, 7]]).take([3, 2, 1, 0])
            >>> tokens.positions.tolist(), tokens.places.tolist()
            ([[0, 2, 1, 0]], [[3, 2, 1, 0]])
        """
        arrays = arrays_of(self)
        last = arrays["positions"].shape[1] - 1
        order = arguments.as_indices("order", order, last, "the row", "number")
        return _with_rank(self.positions.ndim, TokenPositions(**_taken(arrays, order)))

    def with_block_ids(self, block_ids: ArrayLike) -> "TokenPositions":
        """The same tokens in numbered blocks, such as a prefix or the patches of an image.

        Args:
            block_ids: [length] or [batch, length] integers, negative: in no block. Tokens of one
                block and segment attend to each other even where a causal mask, a window or a chunk
                forbids it. A prefix is block 0, with -1 after it: `jnp.where(is_prefix, 0, -1)`. To
                decode with a cache, give blocks to its empty slots, too: -1.

        Raises:
            TypeError: block_ids are not integers that `TokenPositions` takes.
            ValueError: host integers outside int32, or a shape that does not fit the positions.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_lengths([3], 3).with_block_ids([0, 0, -1])
            >>> te.AttentionMask(tokens, causal=True).dense()[0, 0].astype(int).tolist()
            [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
        """
        return TokenPositions(**_given(as_made(self)) | {"block_ids": block_ids})

    def clear(self, where: ArrayLike) -> "TokenPositions":
        """These slots of a cache, without tokens in some rows or in some slots of each row.

        A row is cleared for a new text. Rejected drafts of a tree must be cleared, or later tokens
        see those that the next write does not reach: once the accepted path is moved to the front,
        `slots.clear(jnp.arange(num_slots) >= lengths[:, None])`. The keys and values need not be
        cleared: the mask hides them.

        Args:
            where: bool, True = clear. [batch]: this row; [batch, slots]: this slot. For slots
                without a batch axis, [] and [slots].

        Returns:
            TokenPositions of the shape of these.

        Raises:
            TypeError: where is not bool.
            ValueError: where has another shape; there are no segment ids.

        Example:
            >>> import transformer_embed as te
            >>> slots = te.TokenPositions.from_lengths([3, 2], 4)
            >>> slots.clear([True, False]).padding_mask.sum(1).tolist()
            [0, 2]
            >>> slots.clear([[False, True, True, True]] * 2).padding_mask.sum(1).tolist()
            [1, 1]
        """
        tokens = as_made(self)
        where = arguments.as_mask("where", where, "clear")
        if tokens.segment_ids is None:
            raise arguments.value_error("segment_ids", "an array (0 is an empty slot)", None)
        slots = tokens.positions.shape[-1]
        batch = () if tokens.positions.ndim == 1 else (number_of_rows(tokens),)
        fits = where.shape in (batch, (*batch, slots))
        arguments.check_shape("where", where.shape, fits, f"{[*batch]} or {[*batch, slots]}")
        where = where if where.ndim > len(batch) else where[..., None]
        return dataclasses.replace(tokens, segment_ids=_cleared(tokens.segment_ids, where))

    @classmethod
    def empty(cls, batch_size: int, length: int) -> "TokenPositions":
        """The slots of a cache that holds no tokens yet; `te.write_cache` fills them.

        Args:
            batch_size: number of rows, at least 1.
            length: number of slots of a row, at least 0.

        Returns:
            TokenPositions of [batch_size, length], all of them padding.

        Raises:
            TypeError: batch_size or length is not a Python int.
            ValueError: batch_size or length is out of its range.

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
        shape = arguments.size("batch_size", batch_size), arguments.length("length", length)
        # Two arrays: a program cannot be given one array twice to write into.
        return cls(jnp.zeros(shape, jnp.int32), segment_ids=jnp.zeros(shape, jnp.int32))

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
        """For a padded batch of ids: padding may be on the left, on the right, or both.

        Args:
            ids: [length] or [batch, length], any integer dtype.
            pad_id: the id of padding; any int, -1 for example. There is no default.
            end_id: for packed texts, the id that ends each of them: the next token is position
                `start` of the next segment. None: each row is one text.
            start: the position of the first token. RoBERTa: padding_idx + 1 = 2; OPT: 2.
            at_padding: the position of padding. RoBERTa: padding_idx = 1; OPT: 1. (For BERT, which
                counts padding like tokens, do not pass positions.)

        Returns:
            TokenPositions of the shape of ids. The tokens of a row are segment 1, or 1, 2, ... with
            end_id. Padding between tokens is not counted.

        Raises:
            TypeError: ids are not integers, or another argument is not a Python int.
            ValueError: ids do not have rank 1 or 2; pad_id is outside int32, or is end_id;
                positions counted from start would not fit int32.

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
        rows = _rows("ids", ids)
        pad_id = arguments.int32("pad_id", pad_id)
        if end_id is not None and arguments.int32("end_id", end_id) == pad_id:
            raise arguments.value_error("end_id", "another id than pad_id", end_id)
        start = arguments.int32("start", start)
        at_padding = arguments.int32("at_padding", at_padding)
        check_last_position("start", start, rows.shape[1])
        return _with_rank(ids.ndim, _of_ids(rows, pad_id, end_id, start, at_padding))

    @classmethod
    def from_mask(cls, mask: ArrayLike, *, start: int = 0, at_padding: int = 0) -> "TokenPositions":
        """Makes tokens from a bool mask of padding, which may have gaps.

        Use it if you have a mask in place of ids, such as the `attention_mask` of a tokenizer of
        transformers: `from_mask(attention_mask != 0)`. Each batch row is one sequence. Padding may
        be on the left, on the right, on both sides or between tokens, and is not counted.

        Args:
            mask: bool [length] or [batch, length], True = a token.
            start: The position of the first token, as in `from_ids`.
            at_padding: The position of padding, as in `from_ids`.

        Returns:
            TokenPositions of the shape of `mask`. The tokens of a batch row are segment 1.

        Raises:
            TypeError: `mask` is not bool, or another argument is not a Python int.
            ValueError: `mask` does not have rank 1 or 2; positions counted from `start` would not
                fit int32.

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
        is_right = mask.ndim in (1, 2)
        arguments.check_shape("mask", mask.shape, is_right, "[length] or [batch, length]")
        start = arguments.int32("start", start)
        at_padding = arguments.int32("at_padding", at_padding)
        check_last_position("start", start, mask.shape[-1])
        return _of_mask(mask, start, at_padding)

    @classmethod
    def from_positions(cls, positions: ArrayLike) -> "TokenPositions":
        """For packed sequences whose positions restart, without padding.

        Args:
            positions: [length] or [batch, length] integers. A token that is not one position after
                the token to its left begins a segment.

        Returns:
            TokenPositions of the shape of positions, with segments 1, 2, ...

        Raises:
            TypeError: positions are not integers that `TokenPositions` takes.
            ValueError: positions do not have rank 1 or 2, or do not fit int32.

        Example:
            >>> import transformer_embed as te
            >>> te.TokenPositions.from_positions([0, 1, 2, 0, 1]).segment_ids.tolist()
            [1, 1, 1, 2, 2]
        """
        positions = as_comparable("positions", positions)
        return _with_rank(positions.ndim, _of_positions(_rows("positions", positions)))

    @classmethod
    def from_lengths(
        cls,
        lengths: ArrayLike,
        length: int,
        *,
        padding_side: str = "right",
    ) -> "TokenPositions":
        """For rows of given lengths, all padded to one length.

        Args:
            lengths: [batch] integers from 0 to `length`: how many tokens each row has; or [] for
                tokens without a batch axis. Only the host can check this: on a device, numbers
                outside are clipped to 0 or `length`.
            length: of the padded rows, at least 0.
            padding_side: `"right"` or `"left"`.

        Returns:
            TokenPositions of [batch, length], or [length] for one number, counted from 0. The
            tokens of a row are segment 1. A model that counts from 2 embeds `tokens.positions + 2`.

        Raises:
            TypeError: lengths are not integers, or length is not a Python int.
            ValueError: lengths have a rank above 1; one of lengths is negative or above length
                (checked on the host only); length is negative; an unknown padding_side.

        Example:
            >>> import transformer_embed as te
            >>> batch = te.TokenPositions.from_lengths([2, 3], 4, padding_side="left")
            >>> batch.padding_mask.astype(int).tolist()
            [[0, 0, 1, 1], [0, 1, 1, 1]]
        """
        length = arguments.length("length", length)
        is_one_row = arguments.as_array("lengths", lengths).ndim == 0
        axes = () if is_one_row else ("batch",)
        lengths = arguments.as_indices("lengths", lengths, length, "the padded length", *axes)
        padding_side = arguments.choice("padding_side", padding_side, ("right", "left"))
        return _of_lengths(lengths, length, padding_side)

    @classmethod
    def from_segment_ids(cls, segment_ids: ArrayLike) -> "TokenPositions":
        """For packed sequences: positions restart at each segment.

        The position of a token is the number of tokens of its sequence before it in the row. For a
        mask of tokens and padding, which may have gaps, use `from_mask`.

        Args:
            segment_ids: [length] or [batch, length] integers: 0 = padding, and a different positive
                number for each sequence. The tokens of a sequence should be contiguous: on the
                host, a number that reappears later in the row is an error, because it is mostly a
                mistake of a loader.

        Returns:
            TokenPositions of the shape of segment_ids. Each sequence is counted from 0; see
            `from_lengths`.

        Raises:
            TypeError: segment_ids are not integers that `TokenPositions` takes.
            ValueError: segment_ids do not have rank 1 or 2; on the host, one is negative, does not
                fit int32, or repeats a number after a gap.

        Edge cases:
            A device cannot raise errors. There, if a number reappears after a gap, counting goes on
            where it stopped, so under a causal mask no token sees a later one. A negative number is
            padding. `te.check_batch` finds both in a data pipeline.

        Example:
            >>> import transformer_embed as te
            >>> te.TokenPositions.from_segment_ids([[1, 1, 1, 2, 2, 0]]).positions.tolist()
            [[0, 1, 2, 0, 1, 0]]

        Source:
            Raffel et al., "T5" (2020), section 3.5.2, https://arxiv.org/abs/1910.10683
        """
        integers = _as_segment_ids(segment_ids)
        rows = _rows("segment_ids", _ordered("segment_ids", integers))
        if isinstance(integers, np.ndarray):
            again = second_runs(np.atleast_2d(integers)).any(1)
            if again.any():
                want = (
                    "one run of tokens for each number (te.TokenPositions.from_mask takes a mask "
                    "with gaps)"
                )
                got = f"two runs of one in row {again.argmax()}"
                raise arguments.value_error("segment_ids", want, got)
        return _with_rank(integers.ndim, _of_segments(rows))

    @classmethod
    def from_parents(cls, parents: ArrayLike, *, offset: ArrayLike = 0) -> "TokenPositions":
        """For trees of tokens: under a causal mask, a token sees itself and its ancestors.

        Drafts of speculative decoding are such trees, and so are answers that share a prompt
        (`shared_prefix_parents`). A token predicts its children, which may not be beside it. For a
        loss, without `shift`, give each token the hidden vector of its parent:
        `jnp.take_along_axis(x, parents[..., None], axis=1)`, with `mask=parents >= 0`.

        Args:
            parents: [length] or [batch, length] integers, the index in the row of each token's
                parent; -1 at the root of a tree, -2 at padding, or in the empty slots of a cache
                that trees are written into. Tokens may be in any order.
            offset: integers, [] or [batch]: the position of roots, such as the number of tokens in
                a cache, all of which they see. One row of parents may serve all rows.

        Returns:
            TokenPositions of [batch, length], or of [length] if neither array has a batch axis. A
            position is the number of a token's ancestors, plus offset. `places` number the
            tokens in depth-first order.

        Raises:
            TypeError: parents or offset does not hold integers.
            ValueError: arrays of other shapes; parents outside the row, or in a cycle; an offset
                whose positions would not fit int32 (checked on the host only).

        Edge cases:
            A device cannot raise errors. There, a token is padding if it or one of its ancestors is
            in a cycle, or has a parent that is outside the row or padding.

        Example:
            >>> import transformer_embed as te
            >>> tree = te.TokenPositions.from_parents([-1, 0, 0, 2])
            >>> tree.positions.tolist()
            [0, 1, 1, 2]
            >>> te.AttentionMask(tree, causal=True).dense()[0].astype(int).tolist()
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]

        Source:
            Miao et al., "SpecInfer" (2024), https://arxiv.org/abs/2305.09781
        """
        parents = arguments.as_array("parents", parents)
        rows = _rows("parents", parents)
        integers = arguments.as_integers("parents", rows, -2, rows.shape[1] - 1, "the row")
        if isinstance(integers, np.ndarray):
            check_parents(integers)
        # The end of a tree is one past its last place.
        offset = _as_offset(offset, rows.shape[1] + 1)
        tokens = cls(**tree_arrays(arguments.as_int32("parents", integers), offset))
        return _with_rank(max(parents.ndim, 1 + offset.ndim), tokens)

    @classmethod
    def from_offset(cls, offset: ArrayLike, length: int) -> "TokenPositions":
        """For new tokens that follow those in a cache.

        Args:
            offset: integers, [] or [batch]: the position of the first token, one for all rows or
                one for each. It may be traced, so decoding at a new offset does not recompile.
                Positions must fit into int32. On the host this is checked. On a device, tokens past
                the end of int32 become padding, which no token sees.
                For models that count from another number (OPT from 2), add it to the offset.
            length: number of tokens, 1 in step-by-step decoding; at least 0.

        Returns:
            TokenPositions of [length], or [batch, length], all in segment 1. A prompt of several
            segments goes on in its last one: `TokenPositions(positions, segment_ids=...)`.

        Raises:
            TypeError: offset does not hold integers that `TokenPositions` takes; length is not a
                Python int.
            ValueError: offset has a rank above 1; length is negative; positions would not fit int32
                (checked on the host only).

        Example:
            >>> import transformer_embed as te
            >>> step = te.TokenPositions.from_offset([5, 2], 1)
            >>> cache = te.TokenPositions.from_lengths([6, 3], 8)
            >>> mask = te.AttentionMask(step, cache, causal=True).dense()
            >>> mask[:, 0, 0].astype(int).tolist()
            [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
        """
        length = arguments.length("length", length)
        return _of_offset(_as_offset(offset, length), length)


register_pytree(TokenPositions)
# Some loaders count documents from 0, and have -1 at padding.
as_segment_ids = functools.partial(
    arguments.as_integers, lowest=0, what="int32, where 0 is padding"
)


def arrays_of(tokens: TokenPositions) -> dict[str, Any]:
    """The arrays of tokens by their names, those that are not None, as [B or 1, length]."""
    return {
        name: array if array.ndim == 2 else array[None]
        for name, array in _given(as_made(tokens)).items()
    }


def _given(tokens: TokenPositions) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: array for name, array in vars(tokens).items() if array is not None}


def as_made(tokens: TokenPositions) -> TokenPositions:
    """The tokens as their class makes them.

    `jax.tree.map` may have made their arrays of a shorter dtype, in which indices and names of
    segments would wrap.
    """
    return TokenPositions(**vars(tokens))


def _with_rank(rank: int, tokens: TokenPositions) -> TokenPositions:
    """Tokens [1, length] as [length] if the rank is 1."""
    return tokens if rank == 2 else jax.tree.map(lambda array: array[0], tokens)


def _as_offset(offset: ArrayLike, length: int) -> Array:
    """First positions; those on the host leave room for as many as the length."""
    integers = arguments.as_integers("offset", offset)
    array = _ordered("offset", integers)
    arguments.check_shape("offset", array.shape, array.ndim < 2, "[] or [batch]")
    if isinstance(integers, np.ndarray) and integers.size:
        check_last_position("offset", int(integers.max()), length)
    return array


def _shown(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else repr(array)


def segments_of(tokens: TokenPositions) -> Array:
    """The segment ids of tokens; ones if there are none."""
    return jnp.ones_like(tokens.positions) if tokens.segment_ids is None else tokens.segment_ids


def check_token_positions(name: str, value: Any) -> None:
    """Raises a TypeError for anything else."""
    want = "a TokenPositions, from te.TokenPositions.from_ids(ids, pad_id=0) for example"
    arguments.instance(name, value, TokenPositions, want)


def comparable_rows(**sides: ArrayLike) -> dict[str, Integer[Array, "*b t"]]:
    """`as_comparable` of arrays, [length] if all are so, or else [1 or batch, length]."""
    given = {name: as_comparable(name, value) for name, value in sides.items()}
    arrays = {name: _rows(name, array) for name, array in given.items()}
    if all(array.ndim == 1 for array in given.values()):
        return given
    check_numbers_of_rows({name: array.shape[0] for name, array in arrays.items()})
    return arrays


def as_comparable(name: str, value: ArrayLike) -> Integer[Array, "..."]:
    """Signed integers to compare, as int32; a jax array of a wider dtype stays as it is.

    Clamped or wrapped ones would compare wrongly.
    """
    is_segment = name == "segment_ids"
    integers = _as_segment_ids(value) if is_segment else arguments.as_integers(name, value)
    return _ordered(name, integers)


def _as_segment_ids(value: ArrayLike) -> Any:
    """Integers of at least 0 if they are on the host; a TypeError for bools says what to call."""
    if arguments.is_int32(value):
        return value
    array = arguments.as_array("segment_ids", value)
    if array.dtype == bool:
        want = (
            "integers, a number for each sequence (te.TokenPositions.from_mask takes a bool mask)"
        )
        raise arguments.type_error("segment_ids", want, array.dtype)
    # The list itself, if it is empty, has no dtype.
    return as_segment_ids("segment_ids", value if array.size == 0 else array)


def _ordered(name: str, integers: Any) -> Integer[Array, "..."]:
    """A TypeError for integers of `as_integers` that are unsigned, and so may be beyond int32."""
    if integers.dtype.kind != "i":
        raise arguments.type_error(name, "a signed integer dtype", integers.dtype)
    return arguments.on_device(integers)


def _rows(name: str, array: Any) -> Any:
    """An array [length] or [batch, length], as [1 or batch, length]."""
    is_right = array.ndim in (1, 2)
    arguments.check_shape(name, array.shape, is_right, "[length] or [batch, length]")
    return array if array.ndim == 2 else array[None]


def number_of_rows(tree: Any) -> Any:
    """The number of rows of tokens or of a mask, 1 for tokens [length]."""
    arrays = jax.tree.leaves(tree)
    counts = {array.shape[0] for array in arrays if getattr(array, "ndim", 0) == 2}
    # Not a maximum: a symbolic dimension of jax.export has no order.
    return next(iter(counts - {1}), 1)


def check_numbers_of_rows(counts: dict[str, Any]) -> None:
    """A ValueError unless all numbers are the same, or 1."""
    if len({*counts.values()} - {1}) > 1:
        got = " and ".join(map(str, counts.values()))
        raise arguments.value_error(" and ".join(counts), "the same number of rows, or 1", got)


def check_last_position(name: str, first: int, length: int) -> None:
    """A ValueError if positions first, first + 1, ... would leave int32."""
    # A symbolic length is assumed to be small enough.
    if not export.is_symbolic_dim(length) and first + length > 2**31:
        want = f"an int of at most {2**31 - length}, for {length} positions inside int32"
        raise arguments.value_error(name, want, first)


# The functions below are compiled even if the caller is not.


@compiled()
def _cleared(
    segments: Integer[Array, "*n t"], where: Bool[Array, "*b #t"]
) -> Integer[Array, "*b t"]:
    return jnp.where(split_like(where, segments), 0, segments)


@compiled()
def _taken(tokens: dict[str, Array], order: Int32[Array, "n"]) -> dict[str, Array]:
    tokens = jax.tree.map(with_whole_rows, tokens)
    if "places" not in tokens:
        # In rows without segments, positions are places.
        tokens = in_row(tokens | {"places": tokens["positions"]})
    take = functools.partial(jnp.take, indices=order, axis=1, mode="fill", fill_value=0)
    return jax.tree.map(take, tokens)


@compiled(1, 2, 3, 4)
def _of_ids(
    ids: Int32[Array, "b t"], pad_id: int, end_id: int | None, start: int, at_padding: int
) -> TokenPositions:
    tokens = ids != pad_id
    if end_id is None:
        return _of_tokens(tokens, start, at_padding)
    begins = of_previous_token(ids == end_id)
    # Under strict dtype promotion, jax subtracts no bool.
    is_token = with_whole_rows(tokens).astype(jnp.int32)
    count = jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - is_token
    positions = jnp.where(tokens, restarted(count, begins) + start, at_padding)
    segments = 1 + jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    return TokenPositions(positions, segment_ids=jnp.where(tokens, segments, 0))


def _of_tokens(tokens: Bool[Array, "*b t"], start: int = 0, at_padding: int = 0) -> TokenPositions:
    positions = positions_of_tokens(tokens, start, at_padding)
    return TokenPositions(positions, segment_ids=tokens.astype(jnp.int32))


_of_mask = compiled(1, 2)(_of_tokens)


@compiled()
def _of_positions(positions: Integer[Array, "b t"]) -> TokenPositions:
    positions = with_whole_rows(positions)
    before = of_previous_token(positions)
    # The second comparison finds positions that wrap at the end of their dtype.
    begins = (positions != before + 1) | (positions <= before)
    begins = begins.at[:, :1].set(True)
    return TokenPositions(positions, segment_ids=jnp.cumsum(begins, axis=1, dtype=jnp.int32))


@compiled(1, 2)
def _of_lengths(lengths: Int32[Array, "*b"], length: int, padding_side: str) -> TokenPositions:
    index = jnp.arange(length, dtype=jnp.int32)
    index = index if padding_side == "right" else index[::-1]
    # Under strict rank promotion, jax compares no [length] with [batch, 1].
    index = index.reshape(*[1] * lengths.ndim, -1)
    return _of_tokens(index < lengths[..., None])


@compiled()
def _of_segments(segment_ids: Integer[Array, "b t"]) -> TokenPositions:
    """The position of a token is how many tokens of its segment are before it."""
    # On a device, nobody has looked for negative numbers.
    segment_ids = jnp.maximum(with_whole_rows(segment_ids), 0)
    positions = jnp.where(segment_ids != 0, index_in_segment(segment_ids), 0)
    return TokenPositions(positions, segment_ids=segment_ids)


@compiled(1)
def _of_offset(offset: Integer[Array, "..."], length: int) -> TokenPositions:
    index = jnp.arange(length, dtype=offset.dtype).reshape(*[1] * offset.ndim, -1)
    first = offset[..., None]
    # Past the end of int32, the sum wraps.
    fits = first + index >= first
    positions = jnp.where(fits, first + index, 0)
    return TokenPositions(positions, segment_ids=fits.astype(positions.dtype))
