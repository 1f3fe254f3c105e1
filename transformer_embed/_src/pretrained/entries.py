"""The table of the entries of config.json that some model type reads.

An entry is a name and a value of JSON, such as "vocab_size": 50257.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments

Options = Mapping[str, Any]
# A function of an entry's name and value, which returns the value or raises an error.
Check = Callable[[str, Any], Any]


class _Required:
    """The class of `REQUIRED`."""

    def __repr__(self) -> str:
        return "REQUIRED"


# The default of an entry that has no default: config.json or settings must say the value.
REQUIRED: Any = _Required()

check_count: Check = functools.partial(arguments.integer, at_least=1)
# These three checks are for lists of numbers.
_sections: Check = functools.partial(
    arguments.entries, convert=functools.partial(arguments.integer, at_least=0)
)
_integers: Check = functools.partial(arguments.entries, convert=arguments.integer)
_bases: Check = functools.partial(arguments.entries, convert=arguments.not_negative)


def _kinds_of_layers(name: str, value: Any) -> tuple[Any, ...]:
    """Returns a tuple with the kind of each layer: a name, a letter, or a number.

    Nemotron-H writes a text with a letter for each layer, such as "M*M", and MiMo a list of 0 and 1
    (`layer_kinds.RENAMED` translates them).
    """
    kinds = [*value] if isinstance(value, str) else value
    check_kind = functools.partial(arguments.instance, kinds=str | int, want="a kind of layers")
    return arguments.entries(name, kinds, check_kind)


def _objects_by_layer(name: str, value: Any) -> dict[int, Options]:
    """Returns the JSON object of each layer that has one, by the layer's index as an int.

    In JSON, the index is a text: {"3": {"head_dim": 64}} becomes {3: {"head_dim": 64}}.
    """
    arguments.instance(name, value, Mapping, "an object")
    objects = {}
    for index, layer_object in value.items():
        arguments.instance(f"{name}: {index}", layer_object, Mapping, "an object")
        objects[int(index)] = layer_object
    return objects


def _unchecked(_: str, value: Any) -> Any:
    """Returns the value as it is, because it is checked where it is used."""
    return value


class Entry(NamedTuple):
    """What is true of an entry of config.json in all model types.

    Args:
        check: A function of the entry's name and value. It returns the value, converted, or raises
            an error that names the entry.
        default: The default that most types have in transformers. If None, there is no default:
            the tensors say the value, or the model goes without. config.json may then say null.
        is_loud: Whether the entry is refused by a model type that does not read it.
        is_harmless: Whether the entry changes no embeddings. Such an entry has its default even if
            config.json does not name the model type.
        only_with: The name of another entry, such as "sliding_window". A model type that does not
            read the other entry may ignore this one. If empty, there is no such entry.
    """

    check: Check
    default: Any = None
    is_loud: bool = False
    is_harmless: bool = False
    only_with: str = ""


ENTRIES: dict[str, Entry] = {
    # Sizes.
    "vocab_size": Entry(check_count),
    "decoder_vocab_size": Entry(check_count),
    "hidden_size": Entry(check_count),
    "embedding_size": Entry(check_count),
    "type_vocab_size": Entry(arguments.integer),
    "num_hidden_layers": Entry(check_count),
    "num_attention_heads": Entry(check_count),
    "head_dim": Entry(check_count),
    "global_head_dim": Entry(check_count),
    # Positions, token types and the norm of the input layer.
    "max_position_embeddings": Entry(check_count),
    "position_embedding_type": Entry(_unchecked, default="rope", is_loud=True),
    "pad_token_id": Entry(arguments.integer),
    "layer_norm_eps": Entry(arguments.positive, default=1e-12),
    "dropout": Entry(arguments.rate, default=0.0, is_harmless=True),
    "token_dropout": Entry(arguments.flag),
    # The scale of the tokens.
    "scale_embedding": Entry(arguments.flag, default=False, is_loud=True),
    "rescale_embeddings": Entry(arguments.flag, default=False, is_loud=True),
    "mup_enabled": Entry(arguments.flag, default=False, is_loud=True),
    "embedding_multiplier": Entry(arguments.positive, default=1.0, is_loud=True),
    "scale_emb": Entry(arguments.positive, default=12.0, is_loud=True),
    # The output layer.
    "tie_word_embeddings": Entry(arguments.flag, default=True, is_loud=True, is_harmless=True),
    "share_encoder_decoder_embeddings": Entry(
        arguments.flag, default=True, is_loud=True, is_harmless=True
    ),
    "scale_decoder_outputs": Entry(arguments.flag, default=False, is_loud=True, is_harmless=True),
    "logit_scale": Entry(arguments.positive, default=1.0, is_loud=True, is_harmless=True),
    "logits_scaling": Entry(arguments.positive, default=1.0, is_loud=True, is_harmless=True),
    "dim_model_base": Entry(check_count),
    "final_logit_softcapping": Entry(arguments.positive, is_loud=True),
    # Biases of attention.
    "alibi_bias_max": Entry(arguments.positive, default=8.0, is_loud=True),
    "relative_attention_num_buckets": Entry(check_count, is_loud=True),
    "relative_attention_max_distance": Entry(arguments.integer, default=128, is_loud=True),
    # Rotations.
    "rope_theta": Entry(arguments.positive, default=10_000.0, is_loud=True),
    "rope_scaling": Entry(_unchecked, is_loud=True),
    "rope_parameters": Entry(_unchecked, is_loud=True),
    "original_max_position_embeddings": Entry(check_count, is_loud=True),
    "partial_rotary_factor": Entry(arguments.positive, default=1.0, is_loud=True),
    "rotary_dim": Entry(check_count, is_loud=True),
    "rotary_emb_interleaved": Entry(arguments.flag, default=False, is_loud=True),
    "rope_interleave": Entry(arguments.flag, default=True, is_loud=True),
    "mrope_section": Entry(_sections, is_loud=True),
    # Rotations of layers with a window, which concern no model without windows.
    "rope_local_base_freq": Entry(arguments.positive, is_loud=True, only_with="sliding_window"),
    "sliding_rotary_factor": Entry(arguments.positive, is_loud=True, only_with="sliding_window"),
    "sliding_rope_scaling": Entry(_unchecked, is_loud=True, only_with="sliding_window"),
    # The rotation of layers that see averages of tokens.
    "compress_rope_theta": Entry(arguments.positive, is_loud=True),
    # Rotations of single layers.
    "layer_rope_theta": Entry(_bases, is_loud=True),
    "no_rope_layers": Entry(_integers, is_loud=True),
    "no_rope_layer_interval": Entry(check_count, is_loud=True),
    # The growth of queries with their positions. A growth of 0 is none.
    "llama_4_scaling_beta": Entry(arguments.not_negative, is_loud=True),
    "attn_scale": Entry(arguments.positive),
    "floor_scale": Entry(check_count, default=8192, is_loud=True),
    "attn_temperature_tuning": Entry(_unchecked, default=True),
    # Kinds of layers, and their masks.
    "layer_types": Entry(_kinds_of_layers),
    "mlp_layer_types": Entry(_kinds_of_layers),
    "per_layer_config": Entry(_objects_by_layer),
    "attn_layer_indices": Entry(_integers),
    "compress_ratios": Entry(_integers),
    "cross_attention_layers": Entry(_integers),
    "first_k_dense_replace": Entry(arguments.integer),
    "sliding_window": Entry(arguments.integer),
    "use_sliding_window": Entry(arguments.flag),
    "max_window_layers": Entry(check_count),
    "sliding_window_pattern": Entry(_unchecked),
    "sliding_window_size": Entry(check_count),
    "local_attention": Entry(check_count),
    "attention_chunk_size": Entry(check_count),
    "is_decoder": Entry(arguments.flag),
    "is_causal": Entry(arguments.flag),
    "use_bidirectional_attention": Entry(_unchecked),
}
ENTRY_DEFAULTS = {
    name: entry.default for name, entry in ENTRIES.items() if entry.default is not None
}

# Other names that an entry has in some files.
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
# The entry that a name in a file means: "n_layer" and "num_hidden_layers" mean the entry
# "num_hidden_layers". Entries without other names are left out.
ENTRY_OF_NAME = {
    name: entry for entry, aliases in ALIASES.items() for name in (entry, *aliases.split())
}
