"""Files of `save_embedder`, which describe themselves: reading and checking the description.

The description is JSON in the file's metadata: a config, the layers, a bias, and names. Each part
of it is checked by the class or the function that will get it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.attention.attention_mask import AttentionMask
from transformer_embed._src.layers.config import EmbedderConfig, OutputConfig
from transformer_embed._src.layers.relative_position_bias import RelativePositionBias
from transformer_embed._src.positions.query_scale import query_scale
from transformer_embed._src.positions.relative_bias import alibi_bias
from transformer_embed._src.positions.rotary import apply_rotary
from transformer_embed._src.positions.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    YarnScaling,
)
from transformer_embed._src.positions.schemes import PositionScheme
from transformer_embed._src.pretrained.files import (
    call_with_named_errors,
    check_mappings,
    parse,
)
from transformer_embed._src.pretrained.layers import Layer
from transformer_embed._src.pretrained.model_type import ANYWHERE, IN_WINDOW
from transformer_embed._src.pretrained.parameters import PretrainedInput
from transformer_embed._src.pretrained.rope import MOST_CHANNELS
from transformer_embed._src.pretrained.tensors import Tensors
from transformer_embed._src.sequences.token_positions import TokenPositions

# The entry of a file's metadata that has all but the parameters.
METADATA = "transformer_embed"
SCALING_CLASSES = (LinearScaling, NTKScaling, YarnScaling, Llama3Scaling, LongRopeScaling)
# The JSON of an object has the name of the object's class under this key.
KIND = "kind"
# The number of channels of the head on which rotary options are tried, if the options do not say
# how many channels they need.
CHANNELS = 64


def describe_own(tensors: Tensors) -> PretrainedInput:
    """Returns the layer that `save_embedder` described in the metadata, without parameters.

    Raises a ValueError if the description is damaged.
    """
    # `METADATA` is the name in the file's header under which the layer is described, as JSON.
    entries = parse(f"{tensors.path}: {METADATA}", tensors.metadata[METADATA], decode_from_json)
    # `call_with_named_errors` calls a function. If it raises an error, the error names the file.
    pretrained = call_with_named_errors(tensors.path, PretrainedInput, **entries)
    pretrained = pretrained._replace(bias=_with_causal(pretrained.bias))
    call_with_named_errors(tensors.path, check_described, pretrained)
    return pretrained


def _with_causal(bias: Any) -> Any:
    """Adds `causal` to the bias of a file that was written when `causal` had a default.

    The default was True in `alibi_bias`, and False in `RelativePositionBias`.
    """
    if not isinstance(bias, Mapping) or "causal" in bias:
        return bias
    is_alibi = "num_buckets" not in bias
    return {**bias, "causal": is_alibi}


def check_described(found: PretrainedInput) -> None:
    """Checks that the arguments in a description are valid for the functions that will get them.

    Raises:
        TypeError: a field of the description has a wrong type.
        ValueError: a function of this package, such as `apply_rotary`, refuses its arguments.
    """
    arguments.instance("config", found.config, EmbedderConfig, "an EmbedderConfig")
    check_mappings(bias=found.bias, names=found.names)
    # `layers` must be a sequence. For each element, `entries` calls `arguments.instance` with the
    # keywords that follow, which checks that the element is a Layer.
    arguments.entries("layers", found.layers, arguments.instance, kinds=Layer, want="a Layer")
    # A sentence that says why the model has no output layer, or None.
    arguments.instance("no_output", found.no_output, str | None, "a sentence, or None")
    checked_texts = set()
    for index, layer in enumerate(found.layers):
        # Equal layers are checked once. They are compared by their texts, because a layer holds
        # dictionaries, which are not hashable.
        text = repr(layer)
        if text not in checked_texts:
            _check_layer(f"layers[{index}]", layer)
            checked_texts.add(text)
    if found.bias is not None:
        _check_options("bias", _make_bias, dict(found.bias))


def _check_layer(name: str, layer: Layer) -> None:
    """Raises an error if a field of a layer is not valid for the function that will get it.

    `name` is the name of the layer for errors, such as "layers[0]".
    """
    arguments.instance(f"{name}.type", layer.type, str, "a kind of layers")
    for field in ("rotary", "mask", "query_scale", "attention"):
        options = getattr(layer, field)
        arguments.instance(f"{name}.{field}", options, Mapping | None, "a mapping, or None")
    # `_check_options` calls the function that it gets, such as `_rotate_head`, with the options, as
    # a caller will do, but on the smallest input. An error names the field.
    if layer.rotary is not None:
        _check_options(f"{name}.rotary", _rotate_head, dict(layer.rotary))
    _check_options(f"{name}.mask", _make_mask, dict(layer.mask))
    if layer.query_scale is not None:
        _check_options(f"{name}.query_scale", _make_query_scale, dict(layer.query_scale))
    if layer.image_blocks is not None:
        arguments.choice(f"{name}.image_blocks", layer.image_blocks, (ANYWHERE, IN_WINDOW))
    if layer.norm_eps is not None:
        arguments.positive(f"{name}.norm_eps", layer.norm_eps)


def _check_options(
    name: str, function: Callable[[dict[str, Any]], Any], options: dict[str, Any]
) -> None:
    """Raises an error that starts with `name` if a function refuses these options.

    The function is called by `jax.eval_shape`, so that only its checks run. The result is not used.
    """
    call_with_named_errors(name, jax.eval_shape, lambda: function(options))


def _rotate_head(options: dict[str, Any]) -> Any:
    """Rotates a head of zeros, so that `apply_rotary` checks the options.

    The head has as many channels as the options need.
    """
    scaling: Any = options.get("scaling")
    pair_axes = options.get("pair_axes")
    channels = options.get("rotary_dim") or CHANNELS
    if options.get("rotary_dim") is None:
        # `short_factor`, of a LongRopeScaling, and `pair_axes` have a value for each pair of
        # channels.
        if hasattr(scaling, "short_factor"):
            channels = 2 * len(scaling.short_factor)
        elif pair_axes is not None:
            channels = 2 * len(pair_axes)
    # The number has a limit, because memory is taken for each channel.
    channels = arguments.integer("rotary_dim", channels, at_least=1, at_most=MOST_CHANNELS)
    head = np.zeros((1, 1, channels), np.float32)
    positions_shape = (1,)
    if pair_axes is not None:
        # A position has a number for each axis, and axes count from 0.
        number_of_axes = 1 + max(pair_axes, default=0)
        positions_shape = (1, number_of_axes)
    positions = np.zeros(positions_shape, np.int32)
    return apply_rotary(head, positions, **options)


def _make_mask(options: dict[str, Any]) -> Any:
    """Makes the mask of one token, so that `AttentionMask` checks the options."""
    one_token = TokenPositions.from_offset(0, 1)
    return AttentionMask(one_token, **options).dense()


def _make_query_scale(options: dict[str, Any]) -> Any:
    """Computes the factor of one query, so that `query_scale` checks the options."""
    return query_scale([0], **options)


def _make_bias(options: dict[str, Any]) -> Any:
    """Computes the bias of one pair of tokens, so that the function of the bias checks the options.

    The result is not used. For T5, it is the parameters of the bias.
    """
    # The number has a limit, because memory is taken for each head.
    arguments.integer("num_heads", options.get("num_heads"), at_least=1, at_most=MOST_CHANNELS)
    if "num_buckets" not in options:
        return alibi_bias([0], [0], **options)

    def bias_of_t5() -> Any:
        """Computes the bias of one pair, in a function that Haiku can transform."""
        module = RelativePositionBias(**options)
        return module([0], [0])

    return hk.transform(bias_of_t5).init(jax.random.key(0))


def _stored_classes() -> dict[str, Callable]:
    """Returns the classes whose objects a file may have, by the names of the classes.

    A file can make objects of these classes only. The subclasses of `PositionScheme` are looked up
    at each call, because a user may have defined one.
    """
    schemes = PositionScheme.__subclasses__()
    classes = (EmbedderConfig, OutputConfig, Layer, *schemes, *SCALING_CLASSES)
    return {stored_class.__name__: stored_class for stored_class in classes}


def encode_for_json(value: Any) -> Any:
    """Converts a value that JSON cannot hold to a value that JSON can hold.

    `json.dumps` calls this function, its argument `default`. An object becomes a dict of its fields
    and the name of its class: {"kind": "Learned", "max_len": 8}.
    """
    class_name = type(value).__name__
    if class_name in _stored_classes():
        return {KIND: class_name, **vars(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, np.ndarray):
        # This raises an error for a masked array, because `tolist` would write null for the values
        # that the mask hides. It also changes the bytes to the order of this machine.
        native_array = arguments.native("layers and bias", value)
        return native_array.tolist()
    if isinstance(value, np.generic):
        return value.item()
    # Any other value must be a number, such as a `fractions.Fraction`.
    return float(value)


def decode_from_json(entries: dict[str, Any]) -> Any:
    """Converts a JSON object back to what `encode_for_json` got: an object of a class, or a dict.

    Lists inside become tuples, since JSON has lists for both.
    """
    for name, value in entries.items():
        if isinstance(value, list):
            entries[name] = tuple(value)
    if KIND not in entries:
        return entries
    classes = _stored_classes()
    class_name = arguments.choice(KIND, entries.pop(KIND), tuple(classes))
    return classes[class_name](**entries)
