"""Entries of config.json: which are known, their values, and which may concern an input layer."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments

REQUIRED: Any = object()
Check = Callable[[str, Any], Any]
count: Check = functools.partial(arguments.integer, at_least=1)


class Entry(NamedTuple):
    """The check of an entry's value, and the library's default.

    None: tensors say it, or it means nothing; config.json may then say null.
    """

    check: Check
    default: Any = None


def as_scale(value: Any) -> Any:
    """The `scale` of a config, where files say whether there is one: published and older ones."""
    if isinstance(value, bool):
        return None if value else 1.0
    return value


def _names(name: str, value: Any) -> tuple[Any, ...]:
    # Nemotron-H writes a letter for each layer, MiMo a 0 or a 1.
    letters = [*value] if isinstance(value, str) else value
    check = functools.partial(arguments.instance, kinds=str | int, want="a kind of layers")
    return arguments.entries(name, letters, check)


def _by_layer(name: str, value: Any) -> dict[int, Mapping[str, Any]]:
    arguments.instance(name, value, Mapping, "an object")
    return {
        int(layer): arguments.instance(f"{name}: {layer}", own, Mapping, "an object")
        for layer, own in value.items()
    }


_integers: Check = functools.partial(arguments.entries, convert=arguments.integer)
_bases: Check = functools.partial(arguments.entries, convert=arguments.not_negative)


def _unchecked(_: str, value: Any) -> Any:
    return value


# The entries that are known, under the library's names. Types have defaults of their own.
ENTRIES = {
    name: Entry(check, default)
    for check, default, names in (
        (
            count,
            None,
            "vocab_size decoder_vocab_size hidden_size embedding_size max_position_embeddings "
            "original_max_position_embeddings num_attention_heads head_dim global_head_dim "
            "relative_attention_num_buckets rotary_dim dim_model_base num_hidden_layers "
            "max_window_layers no_rope_layer_interval attention_chunk_size local_attention "
            "sliding_window_size",
        ),
        (
            arguments.integer,
            None,
            "type_vocab_size sliding_window first_k_dense_replace pad_token_id",
        ),
        (arguments.integer, 128, "relative_attention_max_distance"),
        (arguments.rate, 0.1, "dropout"),
        (arguments.positive, 1e-12, "layer_norm_eps"),
        (arguments.positive, 1e-6, "rms_norm_eps"),
        (arguments.positive, 1.0, "embedding_multiplier partial_rotary_factor"),
        (arguments.positive, 1.0, "logit_scale logits_scaling"),
        (arguments.positive, 8.0, "alibi_bias_max"),
        (arguments.positive, 12.0, "scale_emb"),
        (arguments.positive, 10_000.0, "rope_theta"),
        (
            arguments.positive,
            None,
            "sliding_rotary_factor rope_local_base_freq final_logit_softcapping",
        ),
        (
            arguments.flag,
            False,
            "scale_embedding rescale_embeddings mup_enabled rotary_emb_interleaved",
        ),
        (
            arguments.flag,
            True,
            "rope_interleave tie_word_embeddings share_encoder_decoder_embeddings "
            "scale_decoder_outputs",
        ),
        (arguments.flag, None, "use_sliding_window is_decoder"),
        (_names, None, "layer_types mlp_layer_types"),
        (_integers, None, "no_rope_layers attn_layer_indices cross_attention_layers"),
        (_by_layer, None, "per_layer_config"),
        (_bases, None, "layer_rope_theta"),
        # Checked where they are used.
        (
            _unchecked,
            None,
            "rope_scaling rope_parameters sliding_rope_scaling position_embedding_type "
            "sliding_window_pattern use_bidirectional_attention",
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
    r"audio|video|pool|emb[a-z]*(_proj)?_(dim|size)|\bn_embe?d|\b(n|max)_\w*pos|_ids?\b|lm_head_bias|finetuned"
)
