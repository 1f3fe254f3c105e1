"""The registry of published models: the tensor names of their input layers, and the meaning of
their config.json."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import OutputLayer
from transformer_embed._src.layers.schemes import Learned, Scheme, Sinusoidal
from transformer_embed._src.pretrained import rope, schema
from transformer_embed._src.pretrained.schema import Count, Positive, Rate

ROOT = "transformer_embedding/~/"
TOKENS = f"{ROOT}token_embedding/embeddings"
POSITIONS = f"{ROOT}learned_positional_encoding/embeddings"
TOKEN_TYPES = f"{ROOT}token_type_embedding/embeddings"
NORM_SCALE = f"{ROOT}layer_norm/scale"
NORM_OFFSET = f"{ROOT}layer_norm/offset"
WIDEN = f"{ROOT}widen/w"
WIDEN_OFFSET = f"{ROOT}widen/b"
BIAS = "relative_position_bias/embeddings"

Shapes = Mapping[str, tuple[int, ...]]
VECTORS = (NORM_SCALE, NORM_OFFSET, WIDEN_OFFSET)
STACKS = ("encoder", "decoder")


class LayerArguments(NamedTuple):
    """The arguments of `EmbedderConfig`, of `apply_rotary`, and of `RelativePositionBias` or
    `alibi_bias`."""

    options: dict[str, Any]
    rotary: Mapping[str, Any] | None = None
    bias: Mapping[str, Any] | None = None


def changes_embeddings(default: Any) -> Any:
    """A field that changes the embeddings. Its default is used only if config.json names the model
    type."""
    return dataclasses.field(default=default, metadata={"changes_embeddings": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
class Settings:
    """The entries of a config.json that a model reads. A size that is not given is taken from the
    tensors.

    Each subclass lists its own entries with their types and the defaults of the transformers
    library; `describe` interprets them.
    """

    # Names of a field in a model's config.json; they take precedence over the field's own name.
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    vocab_size: Count | None = None
    hidden_size: Count | None = None
    tie_word_embeddings: bool = True

    def __init_subclass__(cls):
        """Makes a frozen dataclass of each subclass."""
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def names(cls) -> dict[str, tuple[str, ...]]:
        """The names of each entry, the model's own first."""
        known = (
            field.name for field in dataclasses.fields(cls) if not field.metadata.get("is_internal")
        )
        return {name: (*cls.aliases.get(name, ()), name) for name in known}

    @classmethod
    def entries(cls, given: Mapping[str, Any], *, is_file: bool) -> dict[str, Any]:
        """The entries that this model reads from a config.json or from `settings=`, by field
        name."""
        found: dict[str, Any] = {}
        for field, names in cls.names().items():
            # The model's own name comes last, to win; null does not hide another name's value.
            for name in reversed(names):
                if name in given and (given[name] is not None or field not in found):
                    found[field] = given[name]
        return found

    @classmethod
    def required(cls, *, is_named: bool) -> list[str]:
        """The entries without a default. Those that change the embeddings have one only if
        config.json names the model type."""
        return [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING
            or (not is_named and field.metadata.get("changes_embeddings"))
        ]

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """The input layer that these entries describe, for tensors of these shapes."""
        raise NotImplementedError

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """The arguments of `EmbedderConfig`."""
        rows, width = shapes[TOKENS]
        options = {
            "vocab_size": self.vocab_size or rows,
            "d_model": self.hidden_size or width,
            "scheme": None,
            "scale": False,
            "dropout_rate": 0.0,
            "output": OutputLayer() if self.tie_word_embeddings else None,
        }
        return options | others


class Clip(Settings):
    """Tokens and learned positions."""

    max_position_embeddings: Count | None = None

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Positions count from 0."""
        return LayerArguments(self.options(shapes, scheme=self.learned(shapes)))

    def learned(self, shapes: Shapes, start: int = 0, **padding: Any) -> Learned:
        """Positions counted from `start`, in a table that has `start` more rows than positions."""
        rows = shapes[POSITIONS][0]
        if self.max_position_embeddings is not None:
            rows = self.max_position_embeddings + start
        return Learned(rows, start=start, **padding)


class Gpt2(Clip):
    """Like CLIP, with dropout."""

    aliases: ClassVar = {"hidden_size": ("n_embd",), "max_position_embeddings": ("n_positions",)}
    embd_pdrop: Rate = Rate(0.1)

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """With the rate."""
        return super().options(shapes, dropout_rate=self.embd_pdrop, **others)


class Opt(Clip):
    """Like CLIP, with positions counted from 2."""

    pad_token_id: int | None = changes_embeddings(1)

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Padding has position 1, if there is a padding id."""
        padding: dict[str, Any] = {}
        if self.pad_token_id is not None:
            padding = {"at_padding": 1, "pad_id": self.pad_token_id}
        return LayerArguments(self.options(shapes, scheme=self.learned(shapes, 2, **padding)))


class DistilBert(Clip):
    """BERT without token types; its epsilon is fixed."""

    aliases: ClassVar = {"hidden_size": ("dim",)}
    dropout: Rate = Rate(0.1)

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """With the layer norm."""
        return super().options(shapes, layer_norm_eps=1e-12, dropout_rate=self.dropout, **others)


class Bert(Clip):
    """Tokens, positions and token types, then a layer norm."""

    type_vocab_size: Count | None = None
    layer_norm_eps: Positive = changes_embeddings(1e-12)
    position_embedding_type: str | None = None
    hidden_dropout_prob: Rate = Rate(0.1)

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """With the token types and the norm; positions are refused unless they are learned."""
        if self.position_embedding_type not in (None, "absolute"):
            want = "'absolute', since others are not part of the input layer"
            got = schema.short_repr(self.position_embedding_type)
            raise arguments.value_error("position_embedding_type", want, got)
        return super().options(
            shapes,
            num_token_types=self.type_vocab_size or shapes[TOKEN_TYPES][0],
            layer_norm_eps=self.layer_norm_eps,
            dropout_rate=self.hidden_dropout_prob,
            **others,
        )


class Albert(Bert):
    """Like BERT, but with narrow tables that a linear layer widens."""

    embedding_size: Count | None = None

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """With both widths; ELECTRA has no linear layer if they are equal."""
        options = super().options(shapes, **others)
        if WIDEN in shapes:
            options["d_model"] = self.hidden_size or shapes[WIDEN][0]
            options["embedding_width"] = self.embedding_size or shapes[TOKENS][1]
        return options


class Roberta(Bert):
    """Like BERT, with positions counted from pad_token_id + 1."""

    pad_token_id: int = changes_embeddings(1)

    def learned(self, shapes: Shapes, start: int = 0, **padding: Any) -> Learned:
        """Padding has the position pad_token_id."""
        pad_id = self.pad_token_id
        positions = super().learned(shapes)
        return dataclasses.replace(positions, start=pad_id + 1, at_padding=pad_id, pad_id=pad_id)


class T5(Settings):
    """Tokens only; positions are a bias in the attention."""

    aliases: ClassVar = {"hidden_size": ("d_model",), "num_attention_heads": ("num_heads",)}
    num_attention_heads: Count | None = None
    relative_attention_num_buckets: Count | None = None
    relative_attention_max_distance: int = changes_embeddings(128)
    dropout_rate: Rate = Rate(0.1)

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """The bias looks both ways in the encoder."""
        buckets, heads = shapes[BIAS]
        bias = {
            "num_heads": self.num_attention_heads or heads,
            "num_buckets": self.relative_attention_num_buckets or buckets,
            "max_distance": self.relative_attention_max_distance,
            "bidirectional": stack == "encoder",
        }
        return LayerArguments(self.options(shapes, dropout_rate=self.dropout_rate), bias=bias)


class Seq2Seq(Settings):
    """Tokens, in some models times the square root of their width, and positions."""

    aliases: ClassVar = {"hidden_size": ("d_model",)}
    scale_embedding: bool = changes_embeddings(False)
    dropout: Rate = Rate(0.1)

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Both stacks are alike."""
        scale, rate = self.scale_embedding, self.dropout
        options = {"scheme": self.scheme(shapes), "scale": scale, "dropout_rate": rate}
        return LayerArguments(self.options(shapes, **options))

    def scheme(self, shapes: Shapes) -> Scheme:
        """The position scheme."""
        raise NotImplementedError


class Marian(Seq2Seq):
    """Sinusoids, all sines first."""

    decoder_vocab_size: Count | None = None

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """The decoder may have a vocabulary of its own."""
        found = super().describe(shapes, stack)
        if stack == "decoder" and self.decoder_vocab_size is not None:
            found.options["vocab_size"] = self.decoder_vocab_size
        return found

    def scheme(self, shapes: Shapes) -> Scheme:
        """Counted from 0."""
        return Sinusoidal(layout="sin_cos")


class M2m100(Seq2Seq):
    """The sinusoids of fairseq."""

    scale_embedding: bool = changes_embeddings(True)
    pad_token_id: int = changes_embeddings(1)

    def scheme(self, shapes: Shapes) -> Scheme:
        """Counted from pad_token_id + 1."""
        pad_id = self.pad_token_id
        padding = {"start": pad_id + 1, "at_padding": pad_id, "pad_id": pad_id}
        return Sinusoidal(layout="sin_cos", shift=1, odd="zero", **padding)


class Bart(Seq2Seq, Clip):
    """Learned positions counted from 2, then a layer norm with a fixed epsilon."""

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """With the layer norm."""
        return super().options(shapes, layer_norm_eps=1e-5, **others)

    def scheme(self, shapes: Shapes) -> Scheme:
        """The table has two more rows than positions."""
        return self.learned(shapes, 2)


class Bloom(Settings):
    """Tokens and a layer norm; positions are ALiBi's bias."""

    aliases: ClassVar = {"num_attention_heads": ("n_head",)}
    num_attention_heads: Count
    layer_norm_epsilon: Positive = changes_embeddings(1e-5)

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """The bias has a slope for each head."""
        options = self.options(shapes, layer_norm_eps=self.layer_norm_epsilon)
        return LayerArguments(options, bias={"num_heads": self.num_attention_heads})


class Llama(Settings):
    """Tokens only; queries and keys are rotated in the half layout."""

    tie_word_embeddings: bool = False
    rope_theta: Positive = changes_embeddings(10_000.0)
    rope_scaling: rope.RopeScaling | None = None
    rope_parameters: None = None
    max_position_embeddings: Count | None = None
    original_max_position_embeddings: Count | None = None

    @classmethod
    def entries(cls, given: Mapping[str, Any], *, is_file: bool) -> dict[str, Any]:
        """Entries in the old form, so that `settings=` can replace the file's entries whichever
        form each uses."""
        found = rope.to_old_form(super().entries(given, is_file=is_file), is_file=is_file)
        inside = (found.get("rope_scaling") or {}).get(rope.ORIGINAL)
        if inside is not None and not is_file:
            found.setdefault(rope.ORIGINAL, inside)
        return {name: value for name, value in found.items() if name in cls.names() or not is_file}

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Every channel of a head is rotated."""
        return LayerArguments(self.options(shapes), rotary=self.rotary())

    def rotary(self, **others: Any) -> dict[str, Any]:
        """The arguments of `apply_rotary`."""
        original = self.original_max_position_embeddings
        return self.rotary_by(self.rope_theta, self.rope_scaling, original) | others

    def rotary_by(
        self, theta: float, entries: rope.RopeScaling | None, original: int | None = None
    ) -> dict[str, Any]:
        """The arguments of `apply_rotary` for a base and the entries of a scaling."""
        rotary = {"base": theta, "layout": "half"}
        scaling = entries and entries.scaling(self.max_position_embeddings, original)
        return rotary if scaling is None else rotary | {"scaling": scaling}


class Gemma(Llama):
    """Like Llama, with tokens times the square root of their width."""

    tie_word_embeddings: bool = True

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """The width's square root is not rounded to 16 bits."""
        return super().options(shapes, scale=True, **others)


class Gemma3(Gemma):
    """Like Gemma, with one rotation for layers with full attention and another for those with a
    sliding window."""

    rope_theta: Positive = changes_embeddings(1_000_000.0)
    rope_local_base_freq: Positive = changes_embeddings(10_000.0)
    sliding_rope_scaling: rope.RopeScaling | None = dataclasses.field(
        default=None, metadata={"is_internal": True}
    )
    original_max_position_embeddings: Count | None = dataclasses.field(
        default=None, metadata={"is_internal": True}
    )

    @classmethod
    def entries(cls, given: Mapping[str, Any], *, is_file: bool) -> dict[str, Any]:
        """Entries in the old form, as for Llama."""
        found = super(Llama, cls).entries(given, is_file=is_file)
        return rope.to_old_form_by_layer(found, is_file=is_file)

    def rotary(self, **others: Any) -> dict[str, Any]:
        """The arguments of `apply_rotary` for each kind of layer."""
        return {
            rope.FULL: self.rotary_by(self.rope_theta, self.rope_scaling),
            rope.SLIDING: self.rotary_by(self.rope_local_base_freq, self.sliding_rope_scaling),
        }


class Phi(Llama):
    """Like Llama, with only the first channels of a head rotated."""

    partial_rotary_factor: Positive = changes_embeddings(0.5)
    num_attention_heads: Count | None = changes_embeddings(None)
    head_dim: Count | None = None
    embd_pdrop: Rate = Rate(0.0)

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Heads split the model's width, unless head_dim is given."""
        rotary = self.rotary()
        if self.partial_rotary_factor != 1:
            head_dim = self.head_dim
            if head_dim is None:
                if self.num_attention_heads is None:
                    want = "an int, to compute head_dim"
                    raise arguments.value_error("num_attention_heads", want, "None")
                head_dim = (self.hidden_size or shapes[TOKENS][1]) // self.num_attention_heads
            rotary["rotary_dim"] = int(head_dim * self.partial_rotary_factor)
            try:
                rope.check(rotary, head_dim)
            except ValueError as error:
                raise ValueError(f"partial_rotary_factor: {error}") from error
        return LayerArguments(self.options(shapes, dropout_rate=self.embd_pdrop), rotary=rotary)


class Phi3(Phi):
    """Like Phi, with another default, and with the original length beside `rope_scaling` instead of
    in it."""

    partial_rotary_factor: Positive = changes_embeddings(1.0)
    original_max_position_embeddings: Count = changes_embeddings(4096)

    @classmethod
    def entries(cls, given: Mapping[str, Any], *, is_file: bool) -> dict[str, Any]:
        """Early files call LongRoPE yarn."""
        found = super().entries(given, is_file=is_file)
        scaling = found.get("rope_scaling") or {}
        if scaling.get("rope_type") == "yarn":
            found["rope_scaling"] = scaling | {"rope_type": "longrope"}
        return found


class GptNeox(Phi):
    """Like Phi, with other names."""

    aliases: ClassVar = {
        "rope_theta": ("rotary_emb_base",),
        "partial_rotary_factor": ("rotary_pct",),
        "embd_pdrop": ("hidden_dropout",),
    }
    partial_rotary_factor: Positive = changes_embeddings(0.25)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One kind of input layer.

    Args:
        model_types: as config.json calls the models.
        tensors: for each parameter, the names that its tensor may have, below the checkpoint's
            prefix; `{stack}` stands for encoder or decoder. A name that begins with "?" may be
            missing.
        settings: what its config.json says, and what that means.
        prefixes: prefixes of checkpoints that no other architecture has.
        has_unique_names: whether no other architecture has the names of `tensors`.
        refused: tensors that show that the input layer is different, with the reason.
    """

    model_types: tuple[str, ...]
    tensors: Mapping[str, tuple[str, ...]]
    settings: type[Settings]
    prefixes: tuple[str, ...] = ()
    has_unique_names: bool = False
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def has_stacks(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return any("{stack}" in name for names in self.tensors.values() for name in names)

    def is_unambiguous(self, prefix: str) -> bool:
        """Whether no other architecture has tensors of these names below a prefix."""
        return self.has_unique_names or any(
            prefix == own or (own and prefix.endswith(f".{own}")) for own in self.prefixes
        )


_BERT = {
    TOKENS: ("embeddings.word_embeddings.weight",),
    POSITIONS: ("embeddings.position_embeddings.weight",),
    TOKEN_TYPES: ("embeddings.token_type_embeddings.weight",),
    NORM_SCALE: ("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"),
    NORM_OFFSET: ("embeddings.LayerNorm.bias", "embeddings.LayerNorm.beta"),
}
# A stack's own table comes first: if the two are not tied, the shared one is not used.
_STACKED_TOKENS = ("{stack}.embed_tokens.weight", "shared.weight")
_DECODER_ONLY = {TOKENS: ("embed_tokens.weight",)}

# Without a config.json, only names that a single architecture has are recognised; for others, the
# user must give the model type.
ARCHITECTURES = (
    Architecture(("bert",), _BERT, Bert),
    Architecture(("roberta", "xlm-roberta", "camembert"), _BERT, Roberta, prefixes=("roberta.",)),
    Architecture(
        ("distilbert",),
        {name: _BERT[name] for name in _BERT if name != TOKEN_TYPES},
        DistilBert,
        prefixes=("distilbert.",),
    ),
    Architecture(
        ("albert",),
        _BERT
        | {
            WIDEN: ("encoder.embedding_hidden_mapping_in.weight",),
            WIDEN_OFFSET: ("encoder.embedding_hidden_mapping_in.bias",),
        },
        Albert,
        has_unique_names=True,
    ),
    Architecture(
        ("electra",),
        _BERT
        | {WIDEN: ("?embeddings_project.weight",), WIDEN_OFFSET: ("?embeddings_project.bias",)},
        Albert,
        prefixes=("electra.",),
    ),
    Architecture(
        ("gpt2",),
        {TOKENS: ("wte.weight",), POSITIONS: ("wpe.weight",)},
        Gpt2,
        prefixes=("", "transformer."),
    ),
    Architecture(
        ("opt",),
        {TOKENS: ("decoder.embed_tokens.weight",), POSITIONS: ("decoder.embed_positions.weight",)},
        Opt,
        refused={"decoder.project_in.weight": "it widens tokens before positions are added"},
    ),
    Architecture(
        ("t5", "mt5"),
        {
            TOKENS: _STACKED_TOKENS,
            BIAS: ("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
        },
        T5,
        refused={
            "{stack}.block.1.layer.0.SelfAttention.relative_attention_bias.weight": (
                "every layer has a bias of its own, as in UMT5"
            )
        },
    ),
    Architecture(("marian",), {TOKENS: _STACKED_TOKENS}, Marian),
    Architecture(("m2m_100",), {TOKENS: _STACKED_TOKENS}, M2m100),
    Architecture(
        ("bart", "mbart"),
        {
            TOKENS: _STACKED_TOKENS,
            POSITIONS: ("{stack}.embed_positions.weight",),
            NORM_SCALE: ("{stack}.layernorm_embedding.weight",),
            NORM_OFFSET: ("{stack}.layernorm_embedding.bias",),
        },
        Bart,
    ),
    Architecture(
        ("clip", "clip_text_model"),
        {
            TOKENS: ("embeddings.token_embedding.weight",),
            POSITIONS: ("embeddings.position_embedding.weight",),
        },
        Clip,
        has_unique_names=True,
    ),
    Architecture(("llama", "mistral", "qwen2", "qwen3"), _DECODER_ONLY, Llama),
    Architecture(("gemma", "gemma2"), _DECODER_ONLY, Gemma),
    Architecture(("gemma3", "gemma3_text"), _DECODER_ONLY, Gemma3),
    Architecture(("phi",), _DECODER_ONLY, Phi),
    Architecture(("phi3",), _DECODER_ONLY, Phi3),
    Architecture(("gpt_neox",), {TOKENS: ("embed_in.weight",)}, GptNeox, has_unique_names=True),
    Architecture(
        ("bloom",),
        {
            TOKENS: ("word_embeddings.weight",),
            NORM_SCALE: ("word_embeddings_layernorm.weight",),
            NORM_OFFSET: ("word_embeddings_layernorm.bias",),
        },
        Bloom,
        has_unique_names=True,
    ),
)


def by_model_type(model_type: Any) -> Architecture | None:
    """The architecture of config.json's model_type."""
    return next((each for each in ARCHITECTURES if model_type in each.model_types), None)
