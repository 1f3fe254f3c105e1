"""What the registry says of a model type: the tensors and the entries of config.json of its layer.

It names the parts of a layer; `TENSORS` and `READS` say which tensors and which entries of
config.json a part has.
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import SQRT_D_MODEL
from transformer_embed._src.layers.parameters import ROOT
from transformer_embed._src.positions.schemes import Sinusoidal

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
PER_LAYER_TABLE = "per_layer_inputs/embeddings"
PER_LAYER_WEIGHTS = "per_layer_inputs/w"
PER_LAYER_SCALE = "per_layer_inputs/scale"
# Modules that may be the output layer.
HEADS = (
    "lm_head.decoder lm_head output embed_out output_projection decoder.output_projection proj_out "
    "lm_loss pred_layer.proj"
)
# Of BART and its like, [1, vocab_size].
LOGITS_BIAS = "final_logits_bias"

# Parameters that a published model may lack; zeros are equivalent.
OFFSETS = (NORM_OFFSET, WIDEN_OFFSET)
STACKS = ("encoder", "decoder")
# Kinds of layers, as config.json's `layer_types` names them.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Only sliding layers rotate, or all of them in a model without a window.
WINDOWLESS = "windowless"
INDEXED, LINEAR, CROSS = "indexed_attention", "linear_attention", "cross_attention"


# --- Parts of a layer, by the field of `Architecture` that names them.

# For each parameter, its part and the names that its tensor may have, with {} for a module of the
# part. (In older files of BERT, a norm has gamma and beta. BART has no bias in its head, but a
# buffer beside its stacks.)
TENSORS = {
    TOKENS: ("tokens", "{}.weight"),
    POSITIONS: ("positions", "{}.weight"),
    TOKEN_TYPES: ("token_types", "{}.weight"),
    NORM_SCALE: ("norm", "{}.weight {}.gamma"),
    NORM_OFFSET: ("norm", "{}.bias {}.beta"),
    WIDEN: ("widen", "{}.weight"),
    WIDEN_OFFSET: ("widen", "{}.bias"),
    BIAS: ("bias", "{}.weight"),
    PER_LAYER_TABLE: ("per_layer", "embed_tokens_{}.weight"),
    PER_LAYER_WEIGHTS: ("per_layer", "{}_model_projection.weight"),
    PER_LAYER_SCALE: ("per_layer", "{}_projection_norm.weight"),
    OUTPUT_TABLE: ("head", "{}.weight"),
    OUTPUT_BIAS: ("head", "{}.bias " + LOGITS_BIAS),
}
# The entries that describe each part, or that another entry needs.
READS = {
    "tokens": "vocab_size hidden_size tie_word_embeddings num_hidden_layers layer_types "
    "per_layer_config is_causal",
    "positions": "max_position_embeddings",
    "norm": "layer_norm_eps",
    "token_types": "type_vocab_size",
    "widen": "embedding_size",
    "bias": "num_attention_heads relative_attention_num_buckets relative_attention_max_distance",
    "has_alibi": "num_attention_heads alibi_bias_max",
    "sections": "mrope_section num_attention_heads head_dim",
    "attn_scale": "floor_scale attn_temperature_tuning",
    "rotary": "rope_theta rope_scaling rope_parameters max_position_embeddings "
    "original_max_position_embeddings",
    "partial_rotary_factor": "num_attention_heads head_dim",
    "no_rope_layer_interval": "no_rope_layers",
    "mlp_layer_types": "first_k_dense_replace",
    "decoder_vocab_size": "share_encoder_decoder_embeddings",
    "rope_local_base_freq": "sliding_rope_scaling partial_rotary_factor sliding_rotary_factor "
    "num_attention_heads head_dim global_head_dim",
}
# Other names of an entry, in any model.
ALIASES = {
    "num_hidden_layers": "n_layer n_layers num_layers",
    "hidden_size": "n_embd d_model dim emb_dim n_embed",
    "num_attention_heads": "n_head n_heads num_heads",
    "max_position_embeddings": "n_positions max_target_positions",
    "layer_norm_eps": "norm_eps layer_norm_epsilon",
    "rope_theta": "global_rope_theta rotary_emb_base",
    "rope_local_base_freq": "local_rope_theta swa_rope_theta",
    "partial_rotary_factor": "rope_pct rope_percent rotary_pct rotary_emb_fraction",
    "layer_types": "attention_layers layers_block_type hybrid_override_pattern "
    "hybrid_layer_pattern",
    "attn_layer_indices": "full_attn_idxs",
    "sliding_window": "window_size attention_window_size",
    "sliding_window_pattern": "global_attn_every_n_layers full_attention_interval",
    "dropout": "embd_pdrop embed_dropout embedding_dropout hidden_dropout hidden_dropout_prob "
    "dropout_rate",
    "tie_word_embeddings": "tie_embedding",
    "final_logit_softcapping": "logits_soft_cap",
}


# --- Entries of config.json.

Options = Mapping[str, Any]
REQUIRED: Any = object()
Check = Callable[[str, Any], Any]
count: Check = functools.partial(arguments.integer, at_least=1)


def as_scale(value: Any) -> Any:
    """The `scale` of a config, where files say whether there is one: published and older ones."""
    if isinstance(value, bool):
        return SQRT_D_MODEL if value else 1.0
    return value


def _names(name: str, value: Any) -> tuple[Any, ...]:
    # Nemotron-H writes a letter for each layer, MiMo a 0 or a 1.
    letters = [*value] if isinstance(value, str) else value
    check = functools.partial(arguments.instance, kinds=str | int, want="a kind of layers")
    return arguments.entries(name, letters, check)


def _by_layer(name: str, value: Any) -> dict[int, Options]:
    arguments.instance(name, value, Mapping, "an object")
    return {
        int(layer): arguments.instance(f"{name}: {layer}", own, Mapping, "an object")
        for layer, own in value.items()
    }


_integers: Check = functools.partial(arguments.entries, convert=arguments.integer)
_sections: Check = functools.partial(_integers, at_least=0)
_bases: Check = functools.partial(arguments.entries, convert=arguments.not_negative)


def _unchecked(_: str, value: Any) -> Any:
    return value


# The check of each entry that is known, under the library's names.
ENTRIES: dict[str, Check] = {
    name: check
    for check, names in (
        (
            count,
            "vocab_size decoder_vocab_size hidden_size embedding_size max_position_embeddings "
            "original_max_position_embeddings num_attention_heads head_dim global_head_dim "
            "relative_attention_num_buckets rotary_dim dim_model_base num_hidden_layers "
            "max_window_layers no_rope_layer_interval attention_chunk_size local_attention "
            "sliding_window_size floor_scale",
        ),
        (
            arguments.integer,
            "type_vocab_size sliding_window first_k_dense_replace pad_token_id "
            "relative_attention_max_distance",
        ),
        (arguments.rate, "dropout"),
        (
            arguments.positive,
            "layer_norm_eps embedding_multiplier partial_rotary_factor logit_scale "
            "logits_scaling alibi_bias_max scale_emb rope_theta sliding_rotary_factor "
            "rope_local_base_freq final_logit_softcapping attn_scale llama_4_scaling_beta",
        ),
        (
            arguments.flag,
            "scale_embedding rescale_embeddings mup_enabled rotary_emb_interleaved "
            "scale_decoder_outputs rope_interleave tie_word_embeddings "
            "share_encoder_decoder_embeddings use_sliding_window is_decoder is_causal "
            "token_dropout",
        ),
        (_names, "layer_types mlp_layer_types"),
        (_integers, "no_rope_layers attn_layer_indices cross_attention_layers"),
        (_sections, "mrope_section"),
        (_by_layer, "per_layer_config"),
        (_bases, "layer_rope_theta"),
        # Checked where they are used.
        (
            _unchecked,
            "rope_scaling rope_parameters sliding_rope_scaling position_embedding_type "
            "sliding_window_pattern use_bidirectional_attention attn_temperature_tuning",
        ),
    )
    for name in names.split()
}
# The library's defaults; types have others of their own. Of the other entries, tensors say them, or
# they mean nothing: config.json may then say null.
DEFAULTS = {
    name: default
    for default, names in (
        (128, "relative_attention_max_distance"),
        (0.0, "dropout"),
        (1e-12, "layer_norm_eps"),
        (1.0, "embedding_multiplier partial_rotary_factor logit_scale logits_scaling"),
        (8.0, "alibi_bias_max"),
        (12.0, "scale_emb"),
        (10_000.0, "rope_theta"),
        ("rope", "position_embedding_type"),
        (
            False,
            "scale_embedding rescale_embeddings mup_enabled rotary_emb_interleaved "
            "scale_decoder_outputs",
        ),
        (8192, "floor_scale"),
        (
            True,
            "attn_temperature_tuning rope_interleave tie_word_embeddings "
            "share_encoder_decoder_embeddings",
        ),
    )
    for name in names.split()
}
# Those that do not change the embeddings: a missing one has its default even if config.json does
# not name the model type.
HARMLESS = (
    "dropout tie_word_embeddings share_encoder_decoder_embeddings scale_decoder_outputs "
    "logit_scale logits_scaling"
)

# Words in the names of entries that concern the layer, if no part of the name is elsewhere: in
# attention, feed-forward layers and routers, in towers for images, in the drawing of weights, or in
# sizes, which tensors say.
CONCERNS = re.compile(
    r"posit|pos_|rot(ary|at)|rope|alibi|relative|rel_|sinus|theta|emb|scal|multiplier|mup_|"
    r"tie_|tying|tied|share_|sharing|padding_idx|soft_?cap|lm_head|^asm$"
)
ELSEWHERE = re.compile(
    r"(?<!relative_)att|key|query|kv_|qk_|softmax|index|mlp|ffn|ssm|resid|rout|depth|time|init|vision|visual|image|"
    r"audio|video|pool|mtp_|emb[a-z]*(_proj)?_(dim|size)|\bn_embe?d|\b(n|max)_\w*pos|_ids?\b|lm_head_bias|finetuned"
)


class Architecture(NamedTuple):
    """The input layer of a model type, as the registry says.

    Several names in one string are separated by spaces. Modules are names of the checkpoint's
    tensors without ".weight", below its prefix; `{stack}` stands for encoder or decoder.

    Args:
        type: as config.json's model_type names it.
        tokens: the module of the token table; of several, the first that is there.
        positions, token_types, norm, widen, bias: likewise; "": there is none.
        per_layer: what the names of the three modules of the inputs of layers share.
        may_lack: parameters whose tensors may be missing, by the ends of their paths.
        start: the first position; or the entry that has the id of padding: one more. If that id
            is known, padding is at the position before the first; otherwise it is counted like
            tokens.
        sinusoids: its scheme, without what `start` says; None: positions are learned.
        scale: of the tokens, as for `EmbedderConfig`, or the entry that has it.
        rotary: the layout, as for `apply_rotary`, or the entry that says whether it is interleaved;
            "": nothing is rotated.
        kinds: if config.json does not list them, the kinds of the layers between and of every nth,
            where n is the entry sliding_window_pattern, or of those that other entries choose; one:
            that of all; (): they are not known.
        phase: the number of the first layer of the second kind; below 0, from the nth.
        rotates: which layers rotate. SLIDING: the sliding ones; WINDOWLESS: these, or all in a
            model without a window; "": all.
        is_causal: whether a token sees only those before it.
        sections: how pairs are shared out to time, height and width: CONSECUTIVE or IN_TURNS.
        has_alpha: whether the scaling "dynamic" may have the alpha of `NTKScaling`.
        has_alibi: whether attention is biased by `alibi_bias`.
        entries: those that it reads, besides those of its parts (`READS`) and those that the other
            fields name, and those whose default is not the one in `DEFAULTS`; with the defaults.
        fixed: entries of its parts that it does not read; they have their defaults.
        meaningless: entries that mean nothing to it, although their names concern the layer.
        aliases: "entry: names" that only this model has, which take precedence.
        head: the modules that may be its output layer.
        no_output: why an `OutputConfig` cannot say its output layer; "": it can.
    """

    type: str
    tokens: str
    positions: str = ""
    token_types: str = ""
    norm: str = ""
    widen: str = ""
    bias: str = ""
    per_layer: str = ""
    may_lack: str = ""
    start: int | str = 0
    sinusoids: Sinusoidal | None = None
    scale: Any = False
    rotary: str = ""
    kinds: tuple[str, ...] = (SLIDING, FULL)
    phase: int = -1
    rotates: str = ""
    is_causal: bool = True
    sections: str = ""
    has_alpha: bool = False
    has_alibi: bool = False
    entries: Mapping[str, Any] = {}
    fixed: str = ""
    meaningless: str = ""
    aliases: str = ""
    head: str = HEADS
    no_output: str = ""

    def default(self, entry: str) -> Any:
        """The value of an entry that config.json leaves out."""
        return self.entries.get(entry, DEFAULTS.get(entry))

    @property
    def has_stacks(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return "{stack}" in self.tokens

    def tensors(self, files: Collection[str], stack: str, prefix: str) -> dict[str, str]:
        """The tensor of each parameter, below a prefix; {} if one is missing that it needs.

        Those of the output layer are there too, or further out.
        """
        names, parts = {}, prefix.split(".")
        # From the prefix outwards: a model of images has the head in its text model or around it.
        outer = [".".join([*parts[:n], ""]) for n in reversed(range(len(parts)))]
        may_lack = (*self.may_lack.split(), OUTPUT_TABLE, OUTPUT_BIAS)
        for parameter, (part, ends) in TENSORS.items():
            modules = getattr(self, part).format(stack=stack).split()
            known = [
                start + end.format(module)
                for start in (outer if part == "head" else [prefix])
                for module in modules
                for end in ends.split()
            ]
            if found := [name for name in known if name in files]:
                names[parameter] = found[0]
            elif modules and not parameter.endswith(may_lack):
                return {}
        return names

    def names(self) -> dict[str, tuple[str, ...]]:
        """The entries that are read, each with its names; the first that says something counts."""
        reads = [self.start, self.scale, self.rotary, *self.entries]
        entry, _, own = self.aliases.partition(": ")
        for part, entries in READS.items():
            if part in self.entries or getattr(self, part, None):
                reads += entries.split()
        known = [name for name in ENTRIES if name in reads and name not in self.fixed.split()]
        return {
            name: (*own.split() * (name == entry), name, *ALIASES.get(name, "").split())
            for name in known
        }

    def ignores(self, entry: str) -> bool:
        """Whether an entry means nothing, also inside an object ("rope_scaling: interleaved")."""
        return entry.rpartition(" ")[2] in self.meaningless.split()

    def concerns(self, entry: str, value: Any) -> bool:
        """Whether an entry that is not read may change the layer or its output layer."""
        # A factor of 1 changes nothing; True equals 1, but switches something on.
        is_neutral = not value or value == "absolute" or (value == 1 and value is not True)
        if is_neutral or self.ignores(entry):
            return False
        # The other layers have norms too: an epsilon concerns this one if it has a norm.
        is_norm = self.norm and re.search(r"eps(ilon)?$", entry)
        return bool(is_norm or (CONCERNS.search(entry) and not ELSEWHERE.search(entry)))
