"""What a row of the registry says: the tensors of an input layer, and the meaning of its
config.json."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import OutputLayer
from transformer_embed._src.layers.schemes import Learned, Scheme, Sinusoidal
from transformer_embed._src.pretrained import rope, schema

ROOT = "transformer_embedding/~/"
TOKENS = f"{ROOT}token_embedding/embeddings"
POSITIONS = f"{ROOT}learned_positional_encoding/embeddings"
TOKEN_TYPES = f"{ROOT}token_type_embedding/embeddings"
NORM_SCALE = f"{ROOT}layer_norm/scale"
NORM_OFFSET = f"{ROOT}layer_norm/offset"
WIDEN = f"{ROOT}widen/w"
WIDEN_OFFSET = f"{ROOT}widen/b"
OUTPUT_TABLE = f"{ROOT}token_embedding/output_embeddings"
OUTPUT_BIAS = f"{ROOT}token_embedding/output_bias"
BIAS = "relative_position_bias/embeddings"
# Of BART and its like, [1, vocab_size].
LOGITS_BIAS = "final_logits_bias"

Shapes = Mapping[str, tuple[int, ...]]
VECTORS = (NORM_SCALE, NORM_OFFSET, WIDEN_OFFSET, OUTPUT_BIAS)
# Parameters that a published model may lack; zeros are equivalent.
OFFSETS = (NORM_OFFSET, WIDEN_OFFSET)
STACKS = ("encoder", "decoder")
REQUIRED: Any = object()
RATES = ("embd_pdrop", "dropout", "hidden_dropout_prob", "dropout_rate")
# Kinds of layers, where config.json lists the layers that do not rotate.
ROTATED, UNROTATED = "rope", "no_rope"


class Entry(NamedTuple):
    """An entry of config.json.

    Args:
        kind: its type, as an annotation.
        default: of the transformers library; None for sizes, which the tensors have; or REQUIRED.
        names: a model's own names, separated by spaces; they take precedence.
        may_guess: whether a missing one has the default even if config.json does not name the model
            type, because it does not change the embeddings.
    """

    kind: Any
    default: Any = None
    names: str = ""
    may_guess: bool = True


class Positions(NamedTuple):
    """How positions are counted and encoded.

    Args:
        start: the first position; None: one more than that of padding, which is its id.
        at_padding: the position of padding; None: it is counted like tokens.
        padding: the id of padding, or the entry that has it.
        sinusoids: the arguments of `Sinusoidal`; None: positions are learned.
    """

    start: int | None = 0
    at_padding: int | None = None
    padding: int | str = "pad_token_id"
    sinusoids: Mapping[str, Any] | None = None


class Rotary(NamedTuple):
    """How queries and keys are rotated.

    Args:
        layout: as for `apply_rotary`, or the entry that says whether it is interleaved.
        by_layer: whether layers of each kind have their own entries.
        kinds: the kind of layers that rotate and the kind that does not; None: all layers do.
        unless_null: an entry; if it is null, all layers rotate.
    """

    layout: str = "half"
    by_layer: bool = False
    kinds: tuple[str, str] | None = None
    unless_null: str | None = None


class LayerArguments(NamedTuple):
    """The arguments of `EmbedderConfig`, of `apply_rotary`, and of `RelativePositionBias` or
    `alibi_bias`."""

    options: dict[str, Any]
    rotary: Mapping[str, Any] | None = None
    bias: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One kind of input layer: a row of the registry.

    Args:
        types: the model types, as config.json names them, separated by spaces.
        tensors: for each parameter, the names that its tensor may have, below the checkpoint's
            prefix; `{stack}` stands for encoder or decoder. A name that begins with "?" may be
            missing.
        entries: what config.json says, by the library's name for it.
        scale: of the tokens, as for `EmbedderConfig`, or the entry that has it.
        positions: None: no positions are added.
        norm_eps: of the layer norm if it is fixed.
        rotary: None: nothing is rotated.
        alibi: the arguments of `alibi_bias` besides the number of heads; None: it is not used.
        head: the names that its output layer may have, separated by spaces.
        no_output: why an `OutputLayer` cannot say its output layer; "": it can.
        prefixes: prefixes of checkpoints that no other architecture has.
        has_unique_names: whether no other architecture has the names of `tensors`.
        refused: tensors that show that the input layer is different, with the reason.
        refused_entries: for an entry, the values that can be loaded, and why others cannot.
    """

    types: str
    tensors: Mapping[str, tuple[str, ...]]
    entries: Mapping[str, Entry]
    scale: bool | str = False
    positions: Positions | None = None
    norm_eps: float | None = None
    rotary: Rotary | None = None
    alibi: Mapping[str, Any] | None = None
    head: str = "lm_head"
    no_output: str = ""
    prefixes: tuple[str, ...] = ()
    has_unique_names: bool = False
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refused_entries: Mapping[str, tuple[tuple[Any, ...], str]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def model_types(self) -> tuple[str, ...]:
        """The model types."""
        return tuple(self.types.split())

    @property
    def name(self) -> str:
        """The type that was looked for, or the first."""
        return self.model_types[0]

    @property
    def has_stacks(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return any("{stack}" in name for names in self.tensors.values() for name in names)

    def is_unambiguous(self, prefix: str) -> bool:
        """Whether no other architecture has tensors of these names below a prefix."""
        return self.has_unique_names or any(
            prefix == own or (own and prefix.endswith(f".{own}")) for own in self.prefixes
        )

    def names(self) -> dict[str, tuple[str, ...]]:
        """The names of each entry, the model's own first."""
        inside = rope.LAYERS[rope.SLIDING][1:]  # of `rope_parameters` only
        known = {name: entry for name, entry in self.entries.items() if name not in inside}
        return {name: (*entry.names.split(), name) for name, entry in known.items()}

    def required(self, *, is_named: bool) -> list[str]:
        """The entries without a default; `is_named`: whether config.json names the model type."""
        return [
            name
            for name, entry in self.entries.items()
            if entry.default is REQUIRED or not (is_named or entry.may_guess)
        ]

    def read(self, where: str, given: Mapping[str, Any], *, is_file: bool) -> dict[str, Any]:
        """The checked values of the entries that a config.json or `settings=` gives."""
        found = schema.call_with_named_errors(where, self._by_name, given, is_file)
        if unknown := [name for name in found if name not in self.entries]:
            want = f"entries among {', '.join(self.entries)}"
            raise arguments.value_error(where, want, schema.short_repr(unknown[0]))
        return {
            name: schema.checked(f"{where}: {name}", self.entries[name].kind, value)
            for name, value in found.items()
        }

    def _by_name(self, given: Mapping[str, Any], is_file: bool) -> dict[str, Any]:
        """The given entries by the library's names, rotations in the old form."""
        found: dict[str, Any] = {}
        for entry, names in self.names().items():
            # The model's own name comes last, to win; null does not hide another name's value.
            for name in reversed(names):
                if name in given and (given[name] is not None or entry not in found):
                    found[entry] = given[name]
        if self.rotary is None:
            return found
        found = rope.to_old_form(found, is_file=is_file, by_layer=self.rotary.by_layer)
        return {name: value for name, value in found.items() if name in self.entries or not is_file}

    def describe(self, found: Mapping[str, Any], shapes: Shapes, stack: str) -> LayerArguments:
        """The input layer that these entries describe, for tensors of these shapes."""
        value = {name: entry.default for name, entry in self.entries.items()} | dict(found)
        get = value.get
        for name, (accepted, reason) in self.refused_entries.items():
            if value[name] not in accepted:
                want = f"{accepted[0]!r}, since {reason}"
                raise arguments.value_error(name, want, schema.short_repr(value[name]))
        rows, width = shapes[TOKENS]
        decoder_rows = get("decoder_vocab_size") if stack == "decoder" else None
        options = {
            "vocab_size": decoder_rows or get("vocab_size") or rows,
            "d_model": get("hidden_size") or shapes.get(WIDEN, (width,))[0],
            "scheme": self._scheme(value, shapes),
            "scale": value[self.scale] if isinstance(self.scale, str) else self.scale,
            "dropout_rate": next((value[name] for name in RATES if name in value), 0.0),
            "output": self._output(value, shapes, stack),
        }
        if TOKEN_TYPES in shapes:
            options["num_token_types"] = get("type_vocab_size") or shapes[TOKEN_TYPES][0]
        if NORM_SCALE in shapes:
            options["layer_norm_eps"] = self.norm_eps or value["layer_norm_eps"]
        if WIDEN in shapes:
            options["embedding_width"] = get("embedding_size") or width
        rotary = self.rotary and self._rotary(self.rotary, value, options["d_model"])
        return LayerArguments(options, rotary, self._bias(value, shapes, stack))

    def _output(self, value: Mapping[str, Any], shapes: Shapes, stack: str) -> OutputLayer | str:
        """The output layer, or why there is none."""
        rows, width = shapes[TOKENS]
        is_tied = value["tie_word_embeddings"]
        has_own = OUTPUT_TABLE in shapes or not is_tied
        is_shared = value.get("share_encoder_decoder_embeddings", True)
        if self.no_output:
            return self.no_output
        if self.has_stacks and stack == STACKS[0] and (has_own or not is_shared):
            return f"it is the decoder's, which stack={STACKS[1]!r} loads"
        if has_own and OUTPUT_TABLE not in shapes:
            return f"the file has no {self.head.split()[0]}.weight, and it is not tied to the table"
        for name, shape in ((OUTPUT_TABLE, (rows, width)), (OUTPUT_BIAS, (rows,))):
            if shapes.get(name, shape) != shape:
                return f"its shape is {list(shapes[name])}, not {list(shape)}"
        scale = value.get("logit_scale", 1.0) / value.get("logits_scaling", 1.0)
        if is_tied and value.get("scale_decoder_outputs"):
            scale = width**-0.5
        if value.get("dim_model_base"):
            scale = value["dim_model_base"] / width
        softcap = value.get("final_logit_softcapping")
        return OutputLayer(not has_own, OUTPUT_BIAS in shapes, softcap, scale)

    def _scheme(self, value: Mapping[str, Any], shapes: Shapes) -> Scheme | None:
        """The position scheme; a learned table has `start` more rows than config.json says."""
        if self.positions is None:
            return None
        start, at_padding, pad_id, sinusoids = self.positions
        if sinusoids is None and POSITIONS not in shapes:
            return None
        if isinstance(pad_id, str):
            pad_id = value.get(pad_id)
        rows = value.get("max_position_embeddings")
        if start is None:
            at_padding, start = pad_id, arguments.integer("pad_token_id", pad_id) + 1
        elif rows is not None:
            rows += start
        if at_padding is None or pad_id is None:
            at_padding = pad_id = None
        padding = {"start": start, "at_padding": at_padding, "pad_id": pad_id}
        if sinusoids is not None:
            return Sinusoidal(**{**sinusoids, **padding})
        return Learned(rows or shapes[POSITIONS][0], **padding)

    def _bias(
        self, value: Mapping[str, Any], shapes: Shapes, stack: str
    ) -> Mapping[str, Any] | None:
        """The arguments of the bias; T5's looks both ways in the encoder."""
        if self.alibi is not None:
            return {"num_heads": value["num_attention_heads"], **self.alibi}
        if BIAS not in shapes:
            return None
        buckets, heads = shapes[BIAS]
        return {
            "num_heads": value["num_attention_heads"] or heads,
            "num_buckets": value["relative_attention_num_buckets"] or buckets,
            "max_distance": value["relative_attention_max_distance"],
            "bidirectional": stack == "encoder",
        }

    def _rotary(self, rotary: Rotary, value: Mapping[str, Any], width: int) -> Mapping[str, Any]:
        """The arguments of `apply_rotary`, or those of each kind of layer."""
        layout = rotary.layout
        if layout in value:
            layout = "interleaved" if value[layout] else "half"
        of_layer = functools.partial(_rotary_of_layer, value, layout, width)
        if rotary.by_layer:
            return {layer: of_layer(*names) for layer, names in rope.LAYERS.items()}
        flat = of_layer(*rope.LAYERS[rope.FULL])
        differ = rotary.unless_null is None or value[rotary.unless_null] is not None
        if rotary.kinds is None or not differ:
            return flat
        rotated, unrotated = rotary.kinds
        return {rotated: flat, unrotated: None}


def _rotary_of_layer(
    value: Mapping[str, Any], layout: str, width: int, theta: str, share: str, scaling: str
) -> dict[str, Any]:
    """The arguments of `apply_rotary` that the entries of these names describe."""
    rotary: dict[str, Any] = {"base": value[theta] or value["rope_theta"], "layout": layout}
    entries = value.get(scaling)
    if entries is not None:
        longest = value.get("max_position_embeddings")
        scaled = entries.scaling(longest, value.get("original_max_position_embeddings"))
        if scaled is not None:
            rotary["scaling"] = scaled
    if value.get("rotary_dim") is not None:
        return rotary | {"rotary_dim": value["rotary_dim"]}
    factor = value.get(share)
    if factor in (None, 1):
        return rotary
    head_dim = value.get("head_dim")
    if entries is not None and entries.rope_type == rope.PROPORTIONAL:
        rotary["partial"] = rope.PROPORTIONAL
        head_dim = value.get("global_head_dim") or head_dim
    if head_dim is None:
        if value["num_attention_heads"] is None:
            raise arguments.value_error(
                "num_attention_heads", "an int, to compute head_dim", "None"
            )
        head_dim = width // value["num_attention_heads"]
    rotary["rotary_dim"] = int(head_dim * factor)
    try:
        rope.check(rotary, head_dim)
    except ValueError as error:
        raise ValueError(f"{share}: {error}") from error
    return rotary
