"""What a row of the registry says: the tensors of an input layer, and the meaning of config.json.

A row names the parts of a layer; `TENSORS` and `READS` say which tensors and which entries of
config.json a part has.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import OutputLayer
from transformer_embed._src.layers.embedder import ROOT
from transformer_embed._src.positions.schemes import Learned, Scheme, Sinusoidal
from transformer_embed._src.pretrained import rope
from transformer_embed._src.pretrained.messages import call_with_named_errors, short_repr

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

# The last two axes of each tensor; the first is 1 for a vector.
Shapes = Mapping[str, tuple[int, int]]
# Parameters that a published model may lack; zeros are equivalent.
OFFSETS = (NORM_OFFSET, WIDEN_OFFSET)
STACKS = ("encoder", "decoder")
REQUIRED: Any = object()
# Kinds of layers, where config.json lists the layers that do not rotate.
ROTATED, UNROTATED = "rope", "no_rope"


# --- Entries of config.json.

Check = Callable[[str, Any], Any]
_count: Check = functools.partial(arguments.integer, at_least=1)


def _or_null(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _unchecked(_: str, value: Any) -> Any:
    return value


_RATES = "embd_pdrop embedding_dropout dropout hidden_dropout hidden_dropout_prob dropout_rate"
# The entries that are known, under the library's names, by the check of their values.
CHECKS = {
    name: check
    for check, names in {
        _or_null(_count): "vocab_size decoder_vocab_size hidden_size embedding_size "
        "max_position_embeddings original_max_position_embeddings "
        "num_attention_heads head_dim global_head_dim relative_attention_num_buckets rotary_dim "
        "dim_model_base",
        _or_null(arguments.integer): "pad_token_id sliding_window type_vocab_size",
        arguments.integer: "relative_attention_max_distance",
        arguments.rate: _RATES,
        arguments.positive: "layer_norm_eps embedding_multiplier scale_emb rope_theta "
        "partial_rotary_factor logit_scale logits_scaling alibi_bias_max",
        _or_null(
            arguments.positive
        ): "sliding_rotary_factor rope_local_base_freq final_logit_softcapping",
        arguments.flag: "scale_embedding rescale_embeddings mup_enabled alibi rope_interleave "
        "rotary_emb_interleaved asm tie_word_embeddings share_encoder_decoder_embeddings "
        "scale_decoder_outputs use_learned_position_embeddings",
        # rope.py checks them, and `refused_entries`.
        _unchecked: "rope_scaling rope_parameters sliding_rope_scaling position_embedding_type",
    }.items()
    for name in names.split()
}
# Of the library; or REQUIRED. Tensors say the others, or they mean nothing.
DEFAULTS = {
    **dict.fromkeys(_RATES.split(), 0.1),
    "scale_embedding": False,
    "rescale_embeddings": False,
    "mup_enabled": False,
    "alibi": False,
    "alibi_bias_max": 8,
    "asm": False,
    "rope_interleave": True,
    "rotary_emb_interleaved": False,
    "use_learned_position_embeddings": True,
    "tie_word_embeddings": True,
    "share_encoder_decoder_embeddings": True,
    "scale_decoder_outputs": True,
    "pad_token_id": 1,
    "position_embedding_type": "absolute",
    "layer_norm_eps": 1e-12,
    "embedding_multiplier": 1.0,
    "scale_emb": 12.0,
    "relative_attention_max_distance": 128,
    "rope_theta": 10_000.0,
    "rope_local_base_freq": 10_000.0,
    "rotary_dim": 64,
    "partial_rotary_factor": 1.0,
    "sliding_window": 4096,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "dim_model_base": 256,
}
# Those that do not change the embeddings: a missing one has its default even if config.json does
# not name the model type.
HARMLESS = (
    f"{_RATES} tie_word_embeddings share_encoder_decoder_embeddings scale_decoder_outputs "
    "logit_scale logits_scaling asm position_embedding_type"
).split()


# Words in the names of entries that concern the layer, if no part of the name is elsewhere: in
# attention, feed-forward layers and routers, in towers for images, in the drawing of weights, or in
# sizes, which tensors say.
CONCERNS = re.compile(
    r"posit|pos_|rot(ary|at)|rope|alibi|relative|rel_|sinus|theta|emb|scal|multiplier|mup_|"
    r"tie_|tying|tied|share_|sharing|padding_idx|soft_?cap|lm_head"
)
ELSEWHERE = re.compile(
    r"(?<!relative_)att|key|query|kv_|qk_|mlp|ffn|ssm|resid|rout|depth|time|init|vision|visual|image|"
    r"audio|video|pool|emb[a-z]*(_proj)?_(dim|size)|\bn_embe?d|\b(n|max)_\w*pos|_ids?\b|lm_head_bias|finetuned"
)


# --- Parts of a layer, by the field of `Architecture` that names them.

# For each parameter, its part and how its tensor's name may end. (In older files of BERT, a norm
# has gamma and beta.)
TENSORS = {
    TOKENS: ("tokens", "weight"),
    POSITIONS: ("positions", "weight"),
    TOKEN_TYPES: ("token_types", "weight"),
    NORM_SCALE: ("norm", "weight gamma"),
    NORM_OFFSET: ("norm", "bias beta"),
    WIDEN: ("widen", "weight"),
    WIDEN_OFFSET: ("widen", "bias"),
    BIAS: ("bias", "weight"),
}
# The entries that describe each part.
READS = {
    "tokens": "vocab_size hidden_size tie_word_embeddings",
    "positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "widen": "embedding_size",
    "bias": "num_attention_heads relative_attention_num_buckets relative_attention_max_distance",
    "has_alibi": "num_attention_heads",
    "rotary": "rope_theta rope_scaling rope_parameters max_position_embeddings "
    "original_max_position_embeddings",
    "rotates_share": "partial_rotary_factor num_attention_heads head_dim",
    "rotates_by_layer": "rope_local_base_freq sliding_rope_scaling sliding_rotary_factor "
    "global_head_dim",
}


Options = Mapping[str, Any]


class Architecture(NamedTuple):
    """One kind of input layer: a row of the registry.

    Several names in one string are separated by spaces. Modules are names of the checkpoint's
    tensors without ".weight", below its prefix; `{stack}` stands for encoder or decoder.

    Args:
        types: the model types, as config.json names them.
        tokens: the module of the token table; of several, the first that is there.
        positions, token_types, norm, widen, bias: likewise; "": there is none.
        may_lack: parameters whose tensors may be missing.
        start: the first position; None: one more than the id of padding. If that id is known,
            padding is at the position before the first; otherwise it is counted like tokens.
        sinusoids: the arguments of `Sinusoidal`; None: positions are learned.
        scale: of the tokens, as for `EmbedderConfig`, or the entry that has it.
        dropout: the entry that has its rate.
        rotary: the layout, as for `apply_rotary`, or the entry that says whether it is interleaved;
            "": nothing is rotated.
        rotates_share: whether config.json says how many of a head's channels rotate.
        rotates_by_layer: whether layers of each kind have their own entries.
        rotated_kinds: the kind of layers that rotate and the kind that does not; None: all rotate,
            as they do if the entry sliding_window is read and null.
        sections: how pairs are shared out to time, height and width: CONSECUTIVE or IN_TURNS.
        has_alibi: whether attention is biased by `alibi_bias`.
        entries: other entries that are read.
        meaningless: entries that mean nothing to it, although their names concern the layer.
        aliases: for an entry, the model's own names, which take precedence.
        defaults: of entries, other than those in `ENTRIES`; the value of one that is not read.
        head: the modules that may be its output layer.
        no_output: why an `OutputLayer` cannot say its output layer; "": it can.
        known_below: a pattern of prefixes below which no other architecture has tensors of these
            names; the default matches none.
        refused: tensors that show that the input layer is different, with the reason.
        refused_entries: for an entry, why values other than the library's default cannot be
            loaded.
    """

    types: str
    tokens: str
    positions: str = ""
    token_types: str = ""
    norm: str = ""
    widen: str = ""
    bias: str = ""
    may_lack: tuple[str, ...] = ()
    start: int | None = 0
    sinusoids: Mapping[str, Any] | None = None
    scale: Any = False
    dropout: str = ""
    rotary: str = ""
    rotates_share: bool = False
    rotates_by_layer: bool = False
    rotated_kinds: tuple[str, str] | None = None
    sections: str = ""
    has_alibi: bool = False
    entries: str = ""
    meaningless: str = ""
    aliases: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}
    head: str = "lm_head"
    no_output: str = ""
    known_below: str = "(?!)"
    refused: Mapping[str, str] = {}
    refused_entries: Mapping[str, str] = {}

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
        return "{stack}" in self.tokens

    def tensors(self, stack: str, prefix: str = "") -> dict[str, list[str]]:
        """For each parameter, the names that its tensor may have, below a checkpoint's prefix."""
        names = {}
        for parameter, (part, ends) in TENSORS.items():
            modules = getattr(self, part).format(stack=stack).split()
            if modules:
                names[parameter] = [f"{prefix}{m}.{end}" for m in modules for end in ends.split()]
        return names

    def names(self) -> dict[str, tuple[str, ...]]:
        """The entries that are read, each with the model's own names and the library's."""
        reads = [self.entries, self.scale, self.dropout, self.rotary, *self.refused_entries]
        reads += [entries for part, entries in READS.items() if getattr(self, part)]
        known = [name for name in CHECKS if name in " ".join(map(str, reads)).split()]
        return {name: (*self.aliases.get(name, "").split(), name) for name in known}

    def read(self, where: str, given: Options) -> tuple[dict[str, Any], dict[str, Any]]:
        """The checked values of the entries of a config.json or `settings=`, and those not read."""
        names, attention = self.names(), given.get("attn_config")
        # MPT's ALiBi.
        within = attention if isinstance(attention, Mapping) else {}
        unread = {**{entry: within[entry] for entry in names if entry in within}, **given}
        found = {}
        for entry, aliases in names.items():
            said = [unread.pop(name) for name in aliases if name in unread]
            if said:
                # The model's own name goes first; null does not hide another name's value.
                found[entry] = next((value for value in said if value is not None), None)
        if self.rotary:
            found = call_with_named_errors(
                where, rope.to_old_form, found, by_layer=self.rotates_by_layer
            )
        unread |= {entry: found.pop(entry) for entry in found.keys() - names.keys()}
        checked = {
            entry: call_with_named_errors(where, CHECKS[entry], entry, value)
            for entry, value in found.items()
        }
        return checked, unread

    def concerns(self, entry: str, value: Any) -> bool:
        """Whether an entry that is not read may change the layer or its output layer."""
        is_neutral = not value or value == "absolute" or (value == 1 and value is not True)
        if is_neutral or entry.rpartition(" ")[2] in self.meaningless.split():
            return False
        is_norm = self.norm and re.search(r"eps(ilon)?$", entry)
        return bool(is_norm or (CONCERNS.search(entry) and not ELSEWHERE.search(entry)))

    def with_defaults(self, where: Any, found: Options, type_in_file: Any) -> dict[str, Any]:
        """The values of all entries; those that mean nothing are None.

        Raises a ValueError for entries that must be said. If config.json does not name this type,
        its defaults may be another model's.
        """
        value, missing = {**dict.fromkeys(CHECKS), **self.defaults}, []
        for entry, aliases in self.names().items():
            default = self.defaults.get(entry, DEFAULTS.get(entry))
            value[entry] = found.get(entry, default)
            is_known = type_in_file in self.model_types or entry in HARMLESS or default is None
            if value[entry] is REQUIRED or not (is_known or entry in found):
                missing.append(aliases[0])
        if missing:
            entries = ", ".join(sorted(missing))
            want = f"{entries} of {self.name}, from settings or a config.json of that model_type"
            raise arguments.value_error(where, want, f"model_type {type_in_file!r} there")
        return value

    def describe(
        self, value: Options, shapes: Shapes, stack: str
    ) -> tuple[dict[str, Any], Options | None, Options | None]:
        """The layer that these entries describe, for tensors of these shapes.

        It is the arguments of `EmbedderConfig`, of `apply_rotary` (for each kind of layer, if they
        differ), and of `RelativePositionBias` or `alibi_bias`.
        """
        for name, reason in self.refused_entries.items():
            default = self.defaults.get(name, DEFAULTS[name])
            if value[name] not in (None, default):
                want = f"{default!r}, since {reason}"
                raise arguments.value_error(name, want, short_repr(value[name]))
        rows, width = shapes[TOKENS]
        d_model, _ = shapes.get(WIDEN, (width, rows))
        types, _ = shapes.get(TOKEN_TYPES, (0, width))
        sizes = {"hidden_size": d_model, "embedding_size": width, "type_vocab_size": types}
        has_own_size = stack == STACKS[1] and value["decoder_vocab_size"]
        sizes["decoder_vocab_size" if has_own_size else "vocab_size"] = rows
        for name, size in sizes.items():
            if value[name] not in (None, size):
                want = (
                    f"{size}, as the tensors say (if they are right: settings={{{name!r}: {size}}})"
                )
                raise arguments.value_error(name, want, short_repr(value[name]))
        options = {
            "vocab_size": rows,
            "d_model": d_model,
            "scheme": self._scheme(value, shapes),
            "scale": value.get(self.scale, self.scale),
            "dropout_rate": value.get(self.dropout, 0.0),
            "num_token_types": types or None,
            "layer_norm_eps": value["layer_norm_eps"] if NORM_SCALE in shapes else None,
            "embedding_width": width if WIDEN in shapes else None,
            "output": self._output(value, shapes, stack),
        }
        # Granite's hybrids say whether they rotate at all.
        is_rotated = "position_embedding_type" not in self.entries or (
            value["position_embedding_type"] == "rope"
        )
        rotary = self._rotary(value, d_model) if self.rotary and is_rotated else None
        return options, rotary, self._bias(value, shapes, stack)

    def _output(self, value: Options, shapes: Shapes, stack: str) -> OutputLayer | str:
        """The output layer, or why there is none."""
        rows, width = shapes[TOKENS]
        is_tied = value["tie_word_embeddings"]
        has_own = OUTPUT_TABLE in shapes or not is_tied
        is_shared = value["share_encoder_decoder_embeddings"] is not False
        if self.no_output:
            return self.no_output
        if self.has_stacks and stack == STACKS[0] and (has_own or not is_shared):
            return f"it is the decoder's, which stack={STACKS[1]!r} loads"
        if has_own and OUTPUT_TABLE not in shapes:
            return f"the file has no {self.head.split()[0]}.weight, and it is not tied to the table"
        for name, shape in ((OUTPUT_TABLE, (rows, width)), (OUTPUT_BIAS, (1, rows))):
            if shapes.get(name, shape) != shape:
                return f"its shape is {list(shapes[name])}, not {list(shape)}"
        scale = (value["logit_scale"] or 1.0) / (value["logits_scaling"] or 1.0)
        if is_tied and value["scale_decoder_outputs"]:
            scale = width**-0.5
        if value["dim_model_base"]:
            scale = value["dim_model_base"] / width
        softcap = value["final_logit_softcapping"]
        return OutputLayer(not has_own, OUTPUT_BIAS in shapes, softcap, scale)

    def _scheme(self, value: Options, shapes: Shapes) -> Scheme | None:
        """The position scheme; a learned table has `start` more rows than config.json says."""
        if self.sinusoids is None and POSITIONS not in shapes:
            return None
        start, pad_id = self.start, value["pad_token_id"]
        rows = value["max_position_embeddings"]
        if start is None:
            start = arguments.integer("pad_token_id", pad_id) + 1
        elif rows is not None:
            rows += start
        padding: dict[str, Any] = {"start": start}
        if pad_id is not None and "pad_token_id" not in self.refused_entries:
            padding |= {"at_padding": start - 1, "pad_id": pad_id}
        if self.sinusoids is not None:
            return Sinusoidal(**self.sinusoids, **padding)
        return Learned(rows or shapes[POSITIONS][0], **padding)

    def _bias(self, value: Options, shapes: Shapes, stack: str) -> Options | None:
        """The arguments of the bias; T5's looks both ways in the encoder."""
        if self.has_alibi:
            return {"num_heads": _count("num_attention_heads", value["num_attention_heads"])}
        if BIAS not in shapes:
            return None
        buckets, heads = shapes[BIAS]
        return {
            "num_heads": value["num_attention_heads"] or heads,
            "num_buckets": value["relative_attention_num_buckets"] or buckets,
            "max_distance": value["relative_attention_max_distance"],
            "bidirectional": stack == "encoder",
        }

    def _rotary(self, value: Options, width: int) -> Options:
        """The arguments of `apply_rotary`, or those of each kind of layer."""
        if self.rotates_by_layer:
            return {layer: self._rotation(value, width, layer) for layer in rope.LAYERS}
        rotation = self._rotation(value, width, rope.FULL)
        # EXAONE 4 rotates in all layers if it has no window.
        has_window = "sliding_window" not in self.entries or value["sliding_window"] is not None
        if self.rotated_kinds is None or not has_window:
            return rotation
        rotated, unrotated = self.rotated_kinds
        return {rotated: rotation, unrotated: None}

    def _rotation(self, value: Options, width: int, layer: str) -> dict[str, Any]:
        """The arguments of `apply_rotary` for a kind of layer."""
        theta, share, scaling = rope.LAYERS[layer]
        layout = self.rotary
        if layout in value:
            layout = "interleaved" if value[layout] else "half"
        rotary = {"base": value[theta] or value["rope_theta"], "layout": layout}
        entries = value[scaling] or {}
        scaled = rope.scaling(entries, value["max_position_embeddings"], value[rope.ORIGINAL])
        if scaled is not None:
            rotary["scaling"] = scaled
        if "mrope_section" in entries:
            if not self.sections:
                want = f"none, since a model {self.name} is not known to have them"
                raise arguments.value_error("mrope_section", want, short_repr(entries))
            take_turns = self.sections == rope.IN_TURNS
            rotary["pair_axes"] = rope.pair_axes(entries["mrope_section"], take_turns=take_turns)
        if value["rotary_dim"] is not None:
            return rotary | {"rotary_dim": value["rotary_dim"]}
        factor, head_dim = value[share], value["head_dim"]
        if factor in (None, 1):
            return rotary
        if entries.get("rope_type") == rope.PROPORTIONAL:
            rotary["partial"] = rope.PROPORTIONAL
            head_dim = value["global_head_dim"] or head_dim
        if head_dim is None:
            head_dim = width // _count("num_attention_heads", value["num_attention_heads"])
        rotary_dim = arguments.integer(share, int(head_dim * factor), at_most=head_dim)
        return rotary | {"rotary_dim": rotary_dim}
