"""What is known of published models: the names of their input layer's tensors, and what their config.json says of it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformer_embed import _checks
from transformer_embed.functional import rotary_scaling
from transformer_embed.layers.schemes import Learned, Sinusoidal

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


class Settings:
    """The entries of a config.json. What is missing has the architecture's default, and is noted where there is no config.json."""

    def __init__(self, entries: Mapping[str, Any], is_complete: bool, stack: str):
        self.entries = entries
        self.is_complete = is_complete
        self.stack = stack
        self.missing: list[str] = []

    def get(self, *names: str) -> Any:
        """The first entry there is, or None."""
        return next((self.entries[name] for name in names if self.entries.get(name) is not None), None)

    def read(self, *names: str, default: Any) -> Any:
        """An entry that decides the numbers."""
        value = self.get(*names)
        if value is None and not self.is_complete:
            self.missing.append(names[0])
        return default if value is None else value

    def needed(self, *names: str) -> Any:
        """An entry without a default: 1, noted as missing, where there is none."""
        value = self.get(*names)
        if value is None:
            self.missing.append(names[0])
        return 1 if value is None else value

    def size(self, *names: str, shape: int) -> int:
        """An entry that the tensors' shapes say too."""
        value = self.get(*names)
        return shape if value is None else value

    def rate(self, *names: str, default: float = 0.1) -> float:
        """A dropout rate, which evaluation does without: never noted as missing."""
        value = self.get(*names)
        return default if value is None else value


class Described(NamedTuple):
    """The arguments of `EmbedderConfig`, of `apply_rotary`, and of `RelativePositionBias` or `alibi_bias`."""

    options: dict[str, Any]
    rotary: dict[str, Any] | None = None
    bias: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One kind of input layer.

    Args:
        model_types: as config.json calls the models.
        tensors: for each parameter, the names that its tensor may have, below the checkpoint's prefix; `{stack}` stands for
            encoder or decoder. What begins with "?" some of the models lack.
        describe: from the settings and the shapes of the tensors, in the order of the parameters.
        prefixes: the checkpoint's prefixes that no other architecture has.
        alone: whether the names of `tensors` are no other architecture's.
        refused: tensors that mean another input layer, with the reason.
    """

    model_types: tuple[str, ...]
    tensors: Mapping[str, tuple[str, ...]]
    describe: Callable[[Settings, Shapes], Described]
    prefixes: tuple[str, ...] = ()
    alone: bool = False
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def has_stacks(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return any("{stack}" in name for names in self.tensors.values() for name in names)

    def is_certain(self, prefix: str) -> bool:
        """Whether tensors of these names below a prefix are no other architecture's."""
        return self.alone or any(prefix == own or prefix.endswith(f".{own}") for own in self.prefixes)


def _bert(settings: Settings, shapes: Shapes) -> Described:
    if settings.get("position_embedding_type") not in (None, "absolute"):
        got = repr(settings.get("position_embedding_type"))
        raise ValueError(_checks.wanted("position_embedding_type", "'absolute', for the others are no part of an input layer", got))
    max_len = settings.size("max_position_embeddings", shape=shapes[POSITIONS][0])
    return Described(_encoder(settings, shapes, Learned(max_len), settings.read("layer_norm_eps", default=1e-12)))


def _roberta(settings: Settings, shapes: Shapes) -> Described:
    pad_id = settings.read("pad_token_id", default=1)
    max_len = settings.size("max_position_embeddings", shape=shapes[POSITIONS][0])
    positions = Learned(max_len, start=pad_id + 1, at_padding=pad_id, pad_id=pad_id)
    return Described(_encoder(settings, shapes, positions, settings.read("layer_norm_eps", default=1e-12)))


def _distilbert(settings: Settings, shapes: Shapes) -> Described:
    max_len = settings.size("max_position_embeddings", shape=shapes[POSITIONS][0])
    return Described(_encoder(settings, shapes, Learned(max_len), 1e-12))


def _encoder(settings: Settings, shapes: Shapes, positions: Learned, eps: float) -> dict[str, Any]:
    width = settings.size("embedding_size", shape=shapes[TOKENS][1])
    return _tokens(settings, shapes) | {
        "d_model": settings.size("hidden_size", "dim", shape=shapes[WIDEN][0] if WIDEN in shapes else shapes[TOKENS][1]),
        "embedding_width": width if WIDEN in shapes else None,
        "positions": positions,
        "num_token_types": settings.size("type_vocab_size", shape=shapes[TOKEN_TYPES][0]) if TOKEN_TYPES in shapes else None,
        "layer_norm_eps": eps,
        "dropout_rate": settings.rate("hidden_dropout_prob", "dropout"),
    }


def _tokens(settings: Settings, shapes: Shapes) -> dict[str, Any]:
    return {
        "vocab_size": settings.size("vocab_size", shape=shapes[TOKENS][0]),
        "d_model": settings.size("hidden_size", "n_embd", "d_model", shape=shapes[TOKENS][1]),
        "positions": None,
        "scale": False,
        "dropout_rate": 0.0,
    }


def _gpt2(settings: Settings, shapes: Shapes) -> Described:
    positions = Learned(settings.size("n_positions", "max_position_embeddings", shape=shapes[POSITIONS][0]))
    return Described(_tokens(settings, shapes) | {"positions": positions, "dropout_rate": settings.rate("embd_pdrop")})


def _clip(settings: Settings, shapes: Shapes) -> Described:
    positions = Learned(settings.size("max_position_embeddings", shape=shapes[POSITIONS][0]))
    return Described(_tokens(settings, shapes) | {"positions": positions})


def _opt(settings: Settings, shapes: Shapes) -> Described:
    rows = settings.size("max_position_embeddings", shape=shapes[POSITIONS][0] - 2) + 2
    positions = Learned(rows, start=2, at_padding=1, pad_id=settings.read("pad_token_id", default=1))
    return Described(_tokens(settings, shapes) | {"positions": positions})


def _t5(settings: Settings, shapes: Shapes) -> Described:
    bias = {
        "num_heads": settings.size("num_heads", shape=shapes[BIAS][1]),
        "num_buckets": settings.size("relative_attention_num_buckets", shape=shapes[BIAS][0]),
        "max_distance": settings.read("relative_attention_max_distance", default=128),
        "bidirectional": settings.stack == "encoder",
    }
    return Described(_tokens(settings, shapes) | {"dropout_rate": settings.rate("dropout_rate")}, bias=bias)


def _marian(settings: Settings, shapes: Shapes) -> Described:
    return _seq2seq(settings, shapes, Sinusoidal(layout="sin_cos"), scale=False)


def _m2m100(settings: Settings, shapes: Shapes) -> Described:
    pad_id = settings.read("pad_token_id", default=1)
    sinusoids = Sinusoidal(layout="sin_cos", shift=1, odd="zero", start=pad_id + 1, at_padding=pad_id, pad_id=pad_id)
    return _seq2seq(settings, shapes, sinusoids, scale=True)


def _bart(settings: Settings, shapes: Shapes) -> Described:
    rows = settings.size("max_position_embeddings", shape=shapes[POSITIONS][0] - 2) + 2
    return _seq2seq(settings, shapes, Learned(rows, start=2), scale=False, layer_norm_eps=1e-5)


def _seq2seq(settings: Settings, shapes: Shapes, positions: Learned | Sinusoidal, *, scale: bool, **options: Any) -> Described:
    scale = settings.read("scale_embedding", default=scale)
    return Described(
        _tokens(settings, shapes) | options | {"positions": positions, "scale": scale, "dropout_rate": settings.rate("dropout")}
    )


def _bloom(settings: Settings, shapes: Shapes) -> Described:
    bias = {"num_heads": settings.needed("n_head", "num_attention_heads")}
    return Described(_tokens(settings, shapes) | {"layer_norm_eps": settings.read("layer_norm_epsilon", default=1e-5)}, bias=bias)


def _rotary_model(settings: Settings, shapes: Shapes, share: float = 1.0) -> Described:
    dropout_rate = settings.rate("embd_pdrop", "hidden_dropout", default=0.0)
    return Described(_tokens(settings, shapes) | {"dropout_rate": dropout_rate}, rotary=_rotary(settings, share))


def _gemma(settings: Settings, shapes: Shapes) -> Described:
    return Described(_tokens(settings, shapes) | {"scale": True}, rotary=_rotary(settings))


def _gemma3(settings: Settings, shapes: Shapes) -> Described:
    if settings.get("rope_parameters"):
        return _gemma(settings, shapes)
    full = {"rope_theta": settings.read("rope_theta", default=1_000_000.0)} | (settings.get("rope_scaling") or {})
    sliding = {"rope_theta": settings.read("rope_local_base_freq", default=10_000.0)}
    by_layer = {"full_attention": _rotary_of(settings, full), "sliding_attention": _rotary_of(settings, sliding)}
    return Described(_tokens(settings, shapes) | {"scale": True}, rotary=by_layer)


def _rotary(settings: Settings, share: float = 1.0) -> dict[str, Any]:
    """The arguments of `apply_rotary`; where layers differ, those of each kind of layer."""
    parameters = settings.get("rope_parameters", "rope_scaling") or {}
    by_layer = {kind: entry for kind, entry in parameters.items() if isinstance(entry, Mapping)}
    if by_layer:
        return {kind: _rotary_of(settings, entry, share) for kind, entry in by_layer.items()}
    return _rotary_of(settings, parameters, share)


def _rotary_of(settings: Settings, parameters: Mapping[str, Any], share: float = 1.0) -> dict[str, Any]:
    base = parameters.get("rope_theta") or settings.read("rope_theta", "rotary_emb_base", default=10_000.0)
    names = ("partial_rotary_factor", "rotary_pct")
    part = parameters.get(names[0]) or (settings.get(*names) or 1.0 if share == 1 else settings.read(*names, default=share))
    scaling = _scaling(settings, parameters)
    found = {"base": float(base), "layout": "half"}
    if part != 1:
        head_dim = settings.get("head_dim") or settings.needed("hidden_size") // settings.needed("num_attention_heads")
        found["rotary_dim"] = int(head_dim * part)
    return found if scaling is None else found | {"scaling": scaling}


def _scaling(settings: Settings, parameters: Mapping[str, Any]) -> rotary_scaling.Scaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in SCALINGS:
        raise ValueError(_checks.wanted("rope_type", "one of " + ", ".join(map(repr, SCALINGS)), repr(kind)))
    make = SCALINGS[kind]
    return None if make is None else make(settings, parameters)


def _linear(settings: Settings, parameters: Mapping[str, Any]) -> rotary_scaling.LinearScaling:
    return rotary_scaling.LinearScaling(_entry(parameters, "factor"))


def _dynamic(settings: Settings, parameters: Mapping[str, Any]) -> rotary_scaling.DynamicNTKScaling:
    length = settings.needed("max_position_embeddings")
    return rotary_scaling.DynamicNTKScaling(_entry(parameters, "factor"), original_length=length, length=length)


def _yarn(settings: Settings, parameters: Mapping[str, Any]) -> rotary_scaling.YarnScaling:
    original = _original_length(settings, parameters)
    factor = parameters.get("factor") or settings.needed("max_position_embeddings") / original
    both = parameters.get("mscale") and parameters.get("mscale_all_dim")
    return rotary_scaling.YarnScaling(
        factor,
        original,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=parameters.get("truncate", True),
        mscale=parameters["mscale"] if both else 1.0,
        mscale_all_dim=parameters["mscale_all_dim"] if both else 0.0,
        attention_factor=parameters.get("attention_factor"),
    )


def _llama3(settings: Settings, parameters: Mapping[str, Any]) -> rotary_scaling.Llama3Scaling:
    factors = (_entry(parameters, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return rotary_scaling.Llama3Scaling(*factors, original_length=_original_length(settings, parameters))


def _longrope(settings: Settings, parameters: Mapping[str, Any]) -> rotary_scaling.LongRopeScaling:
    """For lengths up to the trained one: the caller replaces `length` to go beyond."""
    original = _original_length(settings, parameters)
    return rotary_scaling.LongRopeScaling(
        _entry(parameters, "short_factor"),
        _entry(parameters, "long_factor"),
        parameters.get("factor") or settings.needed("max_position_embeddings") / original,
        original_length=original,
        length=original,
        attention_factor=parameters.get("attention_factor"),
    )


def _original_length(settings: Settings, parameters: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    return settings.get(name) or parameters.get(name) or settings.needed("max_position_embeddings")


def _entry(parameters: Mapping[str, Any], name: str) -> Any:
    if parameters.get(name) is None:
        raise ValueError(_checks.wanted("rope_parameters", f"an entry {name}", f"only {sorted(parameters)}"))
    return parameters[name]


SCALINGS = {
    "default": None,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
}

_BERT = {
    TOKENS: ("embeddings.word_embeddings.weight",),
    POSITIONS: ("embeddings.position_embeddings.weight",),
    TOKEN_TYPES: ("embeddings.token_type_embeddings.weight",),
    NORM_SCALE: ("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"),
    NORM_OFFSET: ("embeddings.LayerNorm.bias", "embeddings.LayerNorm.beta"),
}
_STACKED_TOKENS = ("shared.weight", "{stack}.embed_tokens.weight")
_DECODER_ONLY = {TOKENS: ("embed_tokens.weight",)}

# Where no config.json says which it is, names that are one architecture's alone decide; others share theirs and are asked for.
ARCHITECTURES = (
    Architecture(("bert",), _BERT, _bert, prefixes=("bert.",)),
    Architecture(("roberta", "xlm-roberta", "camembert"), _BERT, _roberta, prefixes=("roberta.",)),
    Architecture(("distilbert",), {name: _BERT[name] for name in _BERT if name != TOKEN_TYPES}, _distilbert, prefixes=("distilbert.",)),
    Architecture(
        ("albert",),
        _BERT
        | {
            WIDEN: ("encoder.embedding_hidden_mapping_in.weight",),
            WIDEN_OFFSET: ("encoder.embedding_hidden_mapping_in.bias",),
        },
        _bert,
        alone=True,
    ),
    Architecture(
        ("electra",),
        _BERT | {WIDEN: ("?embeddings_project.weight",), WIDEN_OFFSET: ("?embeddings_project.bias",)},
        _bert,
        prefixes=("electra.",),
    ),
    Architecture(("gpt2",), {TOKENS: ("wte.weight",), POSITIONS: ("wpe.weight",)}, _gpt2, alone=True),
    Architecture(
        ("opt",),
        {TOKENS: ("decoder.embed_tokens.weight",), POSITIONS: ("decoder.embed_positions.weight",)},
        _opt,
        alone=True,
        refused={"decoder.project_in.weight": "it widens tokens before positions are added"},
    ),
    Architecture(
        ("t5", "mt5"),
        {TOKENS: _STACKED_TOKENS, BIAS: ("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",)},
        _t5,
        alone=True,
    ),
    Architecture(("marian",), {TOKENS: _STACKED_TOKENS}, _marian),
    Architecture(("m2m_100",), {TOKENS: _STACKED_TOKENS}, _m2m100),
    Architecture(
        ("bart", "mbart"),
        {
            TOKENS: _STACKED_TOKENS,
            POSITIONS: ("{stack}.embed_positions.weight",),
            NORM_SCALE: ("{stack}.layernorm_embedding.weight",),
            NORM_OFFSET: ("{stack}.layernorm_embedding.bias",),
        },
        _bart,
        alone=True,
    ),
    Architecture(
        ("clip", "clip_text_model"),
        {TOKENS: ("embeddings.token_embedding.weight",), POSITIONS: ("embeddings.position_embedding.weight",)},
        _clip,
        alone=True,
    ),
    Architecture(("llama", "mistral", "qwen2", "qwen3", "phi3"), _DECODER_ONLY, _rotary_model),
    Architecture(("gemma", "gemma2"), _DECODER_ONLY, _gemma),
    Architecture(("gemma3", "gemma3_text"), _DECODER_ONLY, _gemma3),
    Architecture(("phi",), _DECODER_ONLY, functools.partial(_rotary_model, share=0.5)),
    Architecture(("gpt_neox",), {TOKENS: ("embed_in.weight",)}, functools.partial(_rotary_model, share=0.25), alone=True),
    Architecture(
        ("bloom",),
        {
            TOKENS: ("word_embeddings.weight",),
            NORM_SCALE: ("word_embeddings_layernorm.weight",),
            NORM_OFFSET: ("word_embeddings_layernorm.bias",),
        },
        _bloom,
        alone=True,
    ),
)


def by_model_type(model_type: str) -> Architecture | None:
    """The architecture of config.json's model_type."""
    return next((each for each in ARCHITECTURES if model_type in each.model_types), None)
