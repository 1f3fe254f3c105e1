"""The registry of published models: the tensor names of their input layers, and the meaning of
their config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from transformer_embed._src import arguments
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
BIAS = "relative_position_bias/embeddings"

Shapes = Mapping[str, tuple[int, ...]]
VECTORS = (NORM_SCALE, NORM_OFFSET, WIDEN_OFFSET)
STACKS = ("encoder", "decoder")


class LayerArguments(NamedTuple):
    """The arguments of `EmbedderConfig`, of `apply_rotary`, and of `RelativePositionBias` or
    `alibi_bias`."""

    options: dict[str, Any]
    rotary: dict[str, Any] | None = None
    bias: dict[str, Any] | None = None


def changes_embeddings(default: Any) -> Any:
    """A field that changes the embeddings. Its default is used only if config.json names the model
    type."""
    return dataclasses.field(default=default, metadata={"changes_embeddings": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The entries of a config.json that a model reads. A size that is not given is taken from the
    tensors.

    Each subclass lists its own entries with their types and the defaults of the transformers
    library; `describe` interprets them.
    """

    # Names of a field in a model's config.json; they take precedence over the field's own name.
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    vocab_size: int | None = None
    hidden_size: int | None = None
    tie_word_embeddings: bool = True

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
        named = {
            field: [name for name in names if name in given] for field, names in cls.names().items()
        }
        return {
            field: next((given[n] for n in names if given[n] is not None), None)
            for field, names in named.items()
            if names
        }

    @classmethod
    def fields_that_change_embeddings(cls) -> list[str]:
        """The entries that change the embeddings, which have a default only if config.json names
        the model type."""
        return [
            field.name
            for field in dataclasses.fields(cls)
            if field.metadata.get("changes_embeddings")
        ]

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """The input layer that these entries describe, for tensors of these shapes."""
        raise NotImplementedError

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """The arguments of `EmbedderConfig`."""
        sizes = {
            "vocab_size": _or_tensor_size(self.vocab_size, shapes[TOKENS][0]),
            "d_model": _or_tensor_size(self.hidden_size, shapes[TOKENS][1]),
        }
        options = {"scheme": None, "scale": False, "dropout_rate": 0.0}
        return sizes | options | {"tied": self.tie_word_embeddings} | others


def _or_tensor_size(value: int | None, shape: int) -> int:
    return shape if value is None else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bert(Settings):
    """Tokens, positions and token types, then a layer norm."""

    max_position_embeddings: int | None = None
    type_vocab_size: int | None = None
    layer_norm_eps: float = changes_embeddings(1e-12)
    position_embedding_type: str | None = None
    hidden_dropout_prob: float = 0.1

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Learned positions, counted from 0."""
        if self.position_embedding_type not in (None, "absolute"):
            got = schema.short_repr(self.position_embedding_type)
            raise ValueError(
                arguments.wanted(
                    "position_embedding_type",
                    "'absolute', since others are not part of the input layer",
                    got,
                )
            )
        return self.described(
            shapes, Learned(_or_tensor_size(self.max_position_embeddings, shapes[POSITIONS][0]))
        )

    def described(self, shapes: Shapes, scheme: Learned) -> LayerArguments:
        """The layer with this scheme."""
        types = _or_tensor_size(self.type_vocab_size, shapes[TOKEN_TYPES][0])
        options = {
            "layer_norm_eps": self.layer_norm_eps,
            "num_token_types": types,
            "dropout_rate": self.hidden_dropout_prob,
        }
        return LayerArguments(self.options(shapes, scheme=scheme, **options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Albert(Bert):
    """Like BERT, but with narrow tables that a linear layer widens."""

    embedding_size: int | None = None

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """With both widths; ELECTRA has no linear layer if they are equal."""
        options = super().options(shapes, **others)
        if WIDEN not in shapes:
            return options
        sizes = (
            _or_tensor_size(self.hidden_size, shapes[WIDEN][0]),
            _or_tensor_size(self.embedding_size, shapes[TOKENS][1]),
        )
        return options | dict(zip(("d_model", "embedding_width"), sizes, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roberta(Bert):
    """Like BERT, with positions counted from pad_token_id + 1."""

    pad_token_id: int = changes_embeddings(1)

    def described(self, shapes: Shapes, scheme: Learned) -> LayerArguments:
        """Padding has the position pad_token_id."""
        pad_id = self.pad_token_id
        return super().described(
            shapes,
            dataclasses.replace(scheme, start=pad_id + 1, at_padding=pad_id, pad_id=pad_id),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilBert(Settings):
    """BERT without token types; its epsilon is fixed."""

    aliases: ClassVar = {"hidden_size": ("dim",)}
    max_position_embeddings: int | None = None
    dropout: float = 0.1

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Learned positions, counted from 0."""
        scheme = Learned(_or_tensor_size(self.max_position_embeddings, shapes[POSITIONS][0]))
        return LayerArguments(
            self.options(shapes, scheme=scheme, layer_norm_eps=1e-12, dropout_rate=self.dropout)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2(Settings):
    """Tokens and learned positions."""

    aliases: ClassVar = {"hidden_size": ("n_embd",), "max_position_embeddings": ("n_positions",)}
    max_position_embeddings: int | None = None
    embd_pdrop: float = 0.1

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Learned positions, counted from 0."""
        scheme = Learned(_or_tensor_size(self.max_position_embeddings, shapes[POSITIONS][0]))
        return LayerArguments(self.options(shapes, scheme=scheme, dropout_rate=self.embd_pdrop))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip(Settings):
    """Tokens and learned positions."""

    max_position_embeddings: int | None = None

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Learned positions, counted from 0."""
        return LayerArguments(
            self.options(
                shapes,
                scheme=Learned(_or_tensor_size(self.max_position_embeddings, shapes[POSITIONS][0])),
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opt(Settings):
    """Tokens and learned positions, counted from 2."""

    max_position_embeddings: int | None = None
    pad_token_id: int | None = changes_embeddings(1)

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Padding has position 1, if there is a padding id."""
        rows = _or_tensor_size(self.max_position_embeddings, shapes[POSITIONS][0] - 2) + 2
        padding = (
            {} if self.pad_token_id is None else {"at_padding": 1, "pad_id": self.pad_token_id}
        )
        return LayerArguments(self.options(shapes, scheme=Learned(rows, start=2, **padding)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5(Settings):
    """Tokens only; positions are a bias in the attention."""

    aliases: ClassVar = {"hidden_size": ("d_model",), "num_attention_heads": ("num_heads",)}
    num_attention_heads: int | None = None
    relative_attention_num_buckets: int | None = None
    relative_attention_max_distance: int = changes_embeddings(128)
    dropout_rate: float = 0.1

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """The bias looks both ways in the encoder."""
        bias = {
            "num_heads": _or_tensor_size(self.num_attention_heads, shapes[BIAS][1]),
            "num_buckets": _or_tensor_size(self.relative_attention_num_buckets, shapes[BIAS][0]),
            "max_distance": self.relative_attention_max_distance,
            "bidirectional": stack == "encoder",
        }
        return LayerArguments(self.options(shapes, dropout_rate=self.dropout_rate), bias=bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2Seq(Settings):
    """Tokens, in some models times the square root of their width, and positions."""

    aliases: ClassVar = {"hidden_size": ("d_model",)}
    scale_embedding: bool = changes_embeddings(False)
    dropout: float = 0.1

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Both stacks are alike."""
        return LayerArguments(
            self.options(
                shapes,
                scheme=self.scheme(shapes),
                scale=self.scale_embedding,
                dropout_rate=self.dropout,
            )
        )

    def scheme(self, shapes: Shapes) -> Scheme:
        """The position scheme."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marian(Seq2Seq):
    """Sinusoids, all sines first."""

    decoder_vocab_size: int | None = None

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """The decoder may have a vocabulary of its own."""
        own = stack == "decoder" and self.decoder_vocab_size is not None
        same = dataclasses.replace(
            self,
            decoder_vocab_size=None,
            vocab_size=self.decoder_vocab_size if own else self.vocab_size,
        )
        return super(Marian, same).describe(shapes, stack)

    def scheme(self, shapes: Shapes) -> Scheme:
        """Counted from 0."""
        return Sinusoidal(layout="sin_cos")


@dataclasses.dataclass(frozen=True, kw_only=True)
class M2m100(Seq2Seq):
    """The sinusoids of fairseq."""

    scale_embedding: bool = changes_embeddings(True)
    pad_token_id: int = changes_embeddings(1)

    def scheme(self, shapes: Shapes) -> Scheme:
        """Counted from pad_token_id + 1."""
        pad_id = self.pad_token_id
        return Sinusoidal(
            layout="sin_cos",
            shift=1,
            odd="zero",
            start=pad_id + 1,
            at_padding=pad_id,
            pad_id=pad_id,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bart(Seq2Seq):
    """Learned positions, then a layer norm with a fixed epsilon."""

    max_position_embeddings: int | None = None

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """With the layer norm."""
        return super().options(shapes, **others) | {"layer_norm_eps": 1e-5}

    def scheme(self, shapes: Shapes) -> Scheme:
        """Counted from 2: the table has two more rows than positions."""
        return Learned(
            _or_tensor_size(self.max_position_embeddings, shapes[POSITIONS][0] - 2) + 2, start=2
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bloom(Settings):
    """Tokens and a layer norm; positions are ALiBi's bias."""

    aliases: ClassVar = {"num_attention_heads": ("n_head",)}
    num_attention_heads: int
    layer_norm_epsilon: float = changes_embeddings(1e-5)

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """The bias has a slope for each head."""
        return LayerArguments(
            self.options(shapes, layer_norm_eps=self.layer_norm_epsilon),
            bias={"num_heads": self.num_attention_heads},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama(Settings):
    """Tokens only; queries and keys are rotated in the half layout."""

    tie_word_embeddings: bool = False
    rope_theta: float = changes_embeddings(10_000.0)
    rope_scaling: rope.RopeScaling | None = None
    rope_parameters: None = None
    max_position_embeddings: int | None = None
    original_max_position_embeddings: int | None = None

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
        scaling = self.rope_scaling and self.rope_scaling.scaling(
            self.max_position_embeddings, self.original_max_position_embeddings
        )
        return _rotary(self.rope_theta, scaling) | others


def _rotary(theta: float, scaling: Any) -> dict[str, Any]:
    rope.Rotary(base=theta)
    return {"base": theta, "layout": "half"} | ({} if scaling is None else {"scaling": scaling})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma(Llama):
    """Like Llama, with tokens times the square root of their width."""

    tie_word_embeddings: bool = True

    def options(self, shapes: Shapes, **others: Any) -> dict[str, Any]:
        """The width's square root is not rounded to 16 bits."""
        return super().options(shapes, **others) | {"scale": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(Settings):
    """Like Gemma, with one rotation for layers with full attention and another for those with a
    sliding window."""

    rope_theta: float = changes_embeddings(1_000_000.0)
    rope_local_base_freq: float = changes_embeddings(10_000.0)
    rope_scaling: rope.RopeScaling | None = None
    rope_parameters: None = None
    sliding_rope_scaling: rope.RopeScaling | None = dataclasses.field(
        default=None, metadata={"is_internal": True}
    )
    max_position_embeddings: int | None = None

    @classmethod
    def entries(cls, given: Mapping[str, Any], *, is_file: bool) -> dict[str, Any]:
        """Entries in the old form, as for Llama."""
        return rope.by_layer(super().entries(given, is_file=is_file), is_file=is_file)

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """The arguments of `apply_rotary` for each kind of layer."""
        layers = {
            rope.FULL: (self.rope_theta, self.rope_scaling),
            rope.SLIDING: (self.rope_local_base_freq, self.sliding_rope_scaling),
        }
        rotary = {
            layer: _rotary(theta, scaling and scaling.scaling(self.max_position_embeddings))
            for layer, (theta, scaling) in layers.items()
        }
        return LayerArguments(self.options(shapes, scale=True), rotary=rotary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi(Llama):
    """Like Llama, with only the first channels of a head rotated."""

    partial_rotary_factor: float = changes_embeddings(0.5)
    num_attention_heads: int | None = changes_embeddings(None)
    head_dim: int | None = None
    embd_pdrop: float = 0.0

    def describe(self, shapes: Shapes, stack: str) -> LayerArguments:
        """Heads split the model's width, unless head_dim is given."""
        if arguments.real("partial_rotary_factor", self.partial_rotary_factor, above=0) == 1:
            return LayerArguments(
                self.options(shapes, dropout_rate=self.embd_pdrop), rotary=self.rotary()
            )
        part = rope.rotary_dim(int(self._head_dim(shapes) * self.partial_rotary_factor))
        return LayerArguments(
            self.options(shapes, dropout_rate=self.embd_pdrop), rotary=self.rotary(rotary_dim=part)
        )

    def _head_dim(self, shapes: Shapes) -> int:
        if self.head_dim is not None:
            return arguments.integer("head_dim", self.head_dim, at_least=1)
        if self.num_attention_heads is None:
            raise ValueError(
                arguments.wanted("num_attention_heads", "an int, to compute head_dim", "None")
            )
        heads = arguments.integer("num_attention_heads", self.num_attention_heads, at_least=1)
        return _or_tensor_size(self.hidden_size, shapes[TOKENS][1]) // heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3(Phi):
    """Like Phi, with another default, and with the original length beside `rope_scaling` instead of
    in it."""

    partial_rotary_factor: float = changes_embeddings(1.0)
    original_max_position_embeddings: int = changes_embeddings(4096)

    @classmethod
    def entries(cls, given: Mapping[str, Any], *, is_file: bool) -> dict[str, Any]:
        """Early files call LongRoPE yarn."""
        found = super().entries(given, is_file=is_file)
        scaling = found.get("rope_scaling")
        return found | (
            {"rope_scaling": scaling | {"rope_type": "longrope"}}
            if scaling and scaling.get("rope_type") == "yarn"
            else {}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptNeox(Phi):
    """Like Phi, with other names."""

    aliases: ClassVar = {
        "rope_theta": ("rotary_emb_base",),
        "partial_rotary_factor": ("rotary_pct",),
        "embd_pdrop": ("hidden_dropout",),
    }
    partial_rotary_factor: float = changes_embeddings(0.25)


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
            "{stack}.block.1.layer.0.SelfAttention.relative_attention_bias.weight": "every layer has a bias of its own, as in UMT5"
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
