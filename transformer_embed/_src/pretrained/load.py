"""Loads the input layers of published checkpoints from safetensors files."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig, OutputLayer
from transformer_embed._src.layers.embedder import Params
from transformer_embed._src.pretrained import schema
from transformer_embed._src.pretrained.config_json import (
    CONFIG,
    EXTRAS,
    check_rotary,
    extras_from_json,
    options_from_json,
)
from transformer_embed._src.pretrained.description import (
    LOGITS_BIAS,
    OFFSETS,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    STACKS,
    TOKENS,
    VECTORS,
    Architecture,
    LayerArguments,
    Shapes,
)
from transformer_embed._src.pretrained.files import (
    DTYPES,
    FLOAT64,
    Tensors,
    open_tensors,
    read_json,
    shown_path,
)
from transformer_embed._src.pretrained.parameters import (
    full_paths,
    is_transposed,
    parameters_of,
    short_path,
)
from transformer_embed._src.pretrained.recognition import listed, recognised

# The text model's own entries, in a config.json of several models.
TEXT_MODEL = ("text_config", "text")


class PretrainedInput(NamedTuple):
    """The input layer of a checkpoint, as `load_embedder` returns it; `save_embedder(path,
    *pretrained)` writes all of it.

    Args:
        config: for `Embedder` and `TransformerEmbedding`.
        params: for the `apply` of that embedder; T5's table of biases is under
            `relative_position_bias`.
        rotary: the keyword arguments of `apply_rotary`; None if the model has no rotary embeddings.
            If layers differ (Gemma 3, Cohere 2), a dict with such arguments for each kind of layer,
            as config.json's `layer_types` names them, and None for a kind that is not rotated.
            (Where config.json lists `no_rope_layers`: "rope" and "no_rope".)
        bias: the keyword arguments of `RelativePositionBias` (T5) or `alibi_bias` (Bloom); None if
            the model has no bias.
        names: the name of the tensor that each parameter came from.

    Example:
        >>> import transformer_embed as te
        >>> te.pretrained.PretrainedInput._fields
        ('config', 'params', 'rotary', 'bias', 'names')

    Source:
        The safetensors format, https://github.com/huggingface/safetensors
    """

    config: EmbedderConfig
    params: Params
    rotary: Mapping[str, Any] | None = None
    bias: Mapping[str, Any] | None = None
    names: Mapping[str, str] | None = None


def load_embedder(
    path: str | os.PathLike[str],
    *,
    stack: str | None = None,
    settings: Mapping[str, Any] | None = None,
    config: EmbedderConfig | None = None,
    names: Mapping[str, str] | None = None,
) -> PretrainedInput:
    """Loads the parameters and the configuration of a checkpoint's input layer.

    The layer is recognised by the names of the tensors and the `config.json` beside them. Only its
    own tensors are read, each copied once; peak memory is at most 1.25 times the tables. No code in
    the file is run. Either everything is loaded or an error is raised.

    The page "Published models" of the documentation lists the model types that are known, with how
    far each is from the transformers library: BERT, RoBERTa, GPT-2, OPT, T5, BART, Whisper's
    decoder, CLIP, Llama, Mistral, Qwen, Gemma, Phi, Cohere, DeepSeek, Granite, ModernBERT and more.
    Embeddings in float32 have the same bits as that library's, or agree to 5 units in the last
    place of the largest value where a layer norm sums in another order. M2M100 differs by 250 such
    units at 500 tokens, because the library computes angles in float32; here they are exact, as are
    long rotary positions, T5's bucket at some boundaries and Gemma's factor in bfloat16. M2M100's
    sinusoid at padding is that of position 1 here and zeros there; the mask hides it.

    Positions that you pass are rows of the table of positions: add `config.scheme.start` to the
    published `position_ids` of OPT and BART, which count from 0.

    `config.output` is the model's output layer, with its table and bias if the file has them, or
    says in words why there is none. Of a model with two stacks, an untied one is the decoder's.

    `config.pad_id` is None, because the padding row is read as it is stored. Models with token
    types need `token_types`; pass zeros if the original model is called without them.

    Args:
        path: a safetensors file, an index file (`model.safetensors.index.json`) beside its shards,
            or a folder that holds `model.safetensors` or that index file.
        stack: `"encoder"` or `"decoder"`, for models with both; None: the encoder. A stack's own
            table takes precedence over a shared one.
        settings: `config.json` entries, such as {"model_type": "bert"}. They override those in the
            checkpoint's config.json, which may be missing. A scaling (`rope_scaling`,
            `rope_parameters`) replaces the file's as a whole, except for a `rope_theta` or
            `partial_rotary_factor` that it leaves out. If no config.json names the model type,
            entries that change the embeddings are required.
        config: with `names`, loads any other model, such as one from a tutorial.
        names: the tensor name for each parameter of `Embedder(config).init`. A path may be
            shortened to a suffix that no other parameter has ("token_embedding/embeddings"). None
            instead of a name gives zeros, for models without an offset in the layer norm or in the
            linear layer of `embedding_width`. Leading axes of 1 are dropped; float64 is rounded to
            the config's `param_dtype`.

    Returns:
        PretrainedInput(config, params, rotary, bias, names). Parameters have the dtypes of their
        tensors, `config.param_dtype` is that of the token table, and `config.dtype` is None.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: an argument has the wrong type.
        ValueError: the file is damaged or has another format; shapes disagree with the
            configuration; a dtype is not float32, bfloat16 or float16; the model is not known;
            settings are missing, invalid, or not read by the model.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> import safetensors.numpy
        >>> import transformer_embed as te
        >>> path = pathlib.Path(tempfile.mkdtemp(), "tutorial.safetensors")
        >>> safetensors.numpy.save_file({"embedding.weight": np.ones([9, 4], np.float32)}, path)
        >>> config = te.EmbedderConfig(9, 4, scheme=te.Sinusoidal())
        >>> names = {"token_embedding/embeddings": "embedding.weight"}
        >>> config, params, *_ = te.pretrained.load_embedder(path, config=config, names=names)
        >>> te.Embedder(config).apply(params, None, [[1, 2, 3]], is_training=False).shape
        (1, 3, 4)

    Source:
        The models' published checkpoints and the transformers library,
        https://github.com/huggingface/transformers
    """
    if stack is not None:
        arguments.choice("stack", stack, STACKS)
    for name, value in (("settings", settings), ("names", names)):
        if not isinstance(value, Mapping | None):
            raise arguments.type_error(name, "a mapping, or None", type(value).__name__)
    if not isinstance(config, EmbedderConfig | None):
        raise arguments.type_error("config", "an EmbedderConfig, or None", type(config).__name__)
    if (config is None) != (names is None):
        raise arguments.value_error("config and names", "both or neither", "one of them")
    tensors = open_tensors(path)
    if config is not None and names is not None:
        arguments.check_left_out("stack", stack, "names says the tensor of each parameter")
        return _read_by_hand(tensors, config, names)
    if not settings and CONFIG in tensors.metadata:
        arguments.check_left_out(
            "stack", stack, "the file, which save_embedder wrote, says the tensor of each parameter"
        )
        return _read_own(tensors)
    return _read_published(tensors, stack, dict(settings or {}))


def _read_by_hand(
    tensors: Tensors, config: EmbedderConfig, names: Mapping[str, str | None]
) -> PretrainedInput:
    """The tensors that `names` gives. Leading axes of 1 are dropped, and float64 is rounded."""
    parameters = parameters_of("config", config)
    full = full_paths(names, parameters)
    for name, tensor in full.items():
        if not isinstance(tensor, str) and not (tensor is None and name in OFFSETS):
            want = "a tensor's name" + (", or None for zeros" if name in OFFSETS else "")
            raise arguments.type_error(f"names: {name}", want, schema.short_repr(tensor))
    if missing := [short_path(name) for name in parameters if name not in full]:
        want = f"a tensor for each parameter, also for {', '.join(missing)}"
        got = f"only {schema.short_repr(sorted(names))}"
        raise arguments.value_error("names", want, got)
    given = {name: tensor for name, tensor in full.items() if tensor is not None}
    params = _read(tensors, parameters, given, is_by_hand=True)
    return PretrainedInput(config, params, names=given)


def _read_own(tensors: Tensors) -> PretrainedInput:
    """The layer that `save_embedder` described in the metadata."""
    where = shown_path(tensors.path)
    options = options_from_json(f"{where}: {CONFIG}", tensors.metadata[CONFIG])
    place = f"{where}: {EXTRAS}"
    extras = extras_from_json(place, tensors.metadata.get(EXTRAS, "{}"))
    for name in extras.names or ():
        module, _, leaf = name.rpartition("/")
        if not module or not leaf:
            got = schema.short_repr(name)
            raise arguments.value_error(f"{place}: names", "parameters as module/name", got)
    described = LayerArguments(options, extras.rotary, extras.bias)
    return _read_described(tensors, f"{where}: {CONFIG}", described, extras.names)


def _read_published(
    tensors: Tensors, stack: str | None, settings: dict[str, Any]
) -> PretrainedInput:
    """The layer of a known model, which config.json and `settings` describe."""
    beside = tensors.path.parent / "config.json"
    in_file = read_json(beside) if beside.is_file() else {}
    parts = [in_file[name] for name in TEXT_MODEL if isinstance(in_file.get(name), dict)]
    entries = (parts or [in_file])[0]
    type_in_file = entries.get("model_type") or in_file.get("model_type")
    model_type = settings.pop("model_type", None) or type_in_file
    kind, names = recognised(tensors, model_type, stack, beside)
    model = f"for a model {kind.name}"
    found = kind.read(f"{shown_path(beside)}, {model}", entries, is_file=True)
    found |= _entries_in_settings(kind, settings)
    required = kind.required(is_named=type_in_file in kind.model_types)
    if missing := [kind.names()[name][0] for name in required if name not in found]:
        want = (
            f"{', '.join(sorted(missing))} of a model {kind.name}, as settings={{...}} or in "
            f"a config.json that names the model_type"
        )
        got = _config_in_words(kind, in_file, type_in_file)
        raise arguments.value_error(shown_path(beside), want, got)
    is_tied = found.get("tie_word_embeddings", kind.entries["tie_word_embeddings"].default)
    table = names.get(OUTPUT_TABLE)
    # As in the library: two tables that differ are not tied, whatever config.json says.
    if table and is_tied and tensors.are_equal(table, names[TOKENS]):
        del names[OUTPUT_TABLE]
    shapes = _shapes_in_file(tensors, names)
    sources = ["settings"] if settings or not in_file else []
    sources += [shown_path(beside)] if in_file else []
    where = f"{' and '.join(sources)}, {model}"
    described = schema.call_with_named_errors(
        where, kind.describe, found, shapes, stack or STACKS[0]
    )
    output = described.options["output"]
    is_used = {
        OUTPUT_TABLE: isinstance(output, OutputLayer) and not output.tied,
        OUTPUT_BIAS: isinstance(output, OutputLayer) and output.bias,
    }
    names = {name: tensor for name, tensor in names.items() if is_used.get(name, True)}
    dtype = tensors.entry(names[TOKENS]).dtype
    described.options["param_dtype"] = DTYPES.get(dtype, jnp.dtype("float32"))
    hint = f" (if the vocabulary was resized: settings={{'vocab_size': {shapes[TOKENS][0]}}})"
    return _read_described(tensors, where, described, names, hint=hint, may_lack=OFFSETS)


def _config_in_words(kind: Architecture, in_file: Mapping[str, Any], type_in_file: Any) -> str:
    """What config.json is, where it lacks entries."""
    if type_in_file in kind.model_types:
        return "none"
    if not in_file:
        return "no config.json"
    return "a config.json " + (
        f"of a model {type_in_file}" if type_in_file else "without model_type"
    )


def _shapes_in_file(tensors: Tensors, names: Mapping[str, str]) -> Shapes:
    """The shape of each parameter's tensor, which has the parameter's rank."""
    shapes = {name: tensors.entry(tensor).shape for name, tensor in names.items()}
    if names.get(OUTPUT_BIAS, "").endswith(LOGITS_BIAS):
        shapes[OUTPUT_BIAS] = shapes[OUTPUT_BIAS][1:]
    for name, tensor in names.items():
        rank = 1 if name in VECTORS else 2
        if len(shapes[name]) != rank:
            place = f"{shown_path(tensors.path)}: {schema.shorten(tensor)}"
            want = f"a tensor of rank {rank}"
            raise arguments.value_error(place, want, tensors.entry(tensor))
    return shapes


def _entries_in_settings(kind: Architecture, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `settings`, which the model must read."""
    names = kind.names().values()
    accepted = [name for several in names for name in several]
    if unknown := [name for name in settings if name not in accepted]:
        reads = ", ".join(several[0] for several in names)
        want = f"entries that a model {kind.name} reads ({reads})"
        raise arguments.value_error("settings", want, schema.short_repr(unknown[0]))
    return kind.read("settings", settings, is_file=False)


def _read_described(
    tensors: Tensors,
    where: str,
    described: LayerArguments,
    names: Mapping[str, str] | None,
    *,
    hint: str = "",
    may_lack: Sequence[str] = (),
) -> PretrainedInput:
    """The layer that these arguments describe; names=None: each parameter has a tensor of its own
    name."""
    options, rotary, bias = described
    given = {TOKENS: TOKENS} if names is None else names
    for tensor in given.values():
        _check_presence(tensors, tensor)
    _check_completeness(where, given, [TOKENS])
    # Compared first: the time to make a config grows with its width.
    table = (options["vocab_size"], options.get("embedding_width") or options["d_model"])
    _check_entry(tensors, given[TOKENS], table, hint=hint)
    config = schema.call_with_named_errors(where, EmbedderConfig, **options)
    check_rotary(where, rotary)
    parameters = parameters_of(where, config, bias)
    if names is None:
        names = {name: name for name in parameters}
    _check_completeness(where, names, [name for name in parameters if name not in may_lack])
    return PretrainedInput(config, _read(tensors, parameters, names), rotary, bias, names)


def _check_completeness(where: str, names: Mapping[str, str], parameters: Iterable[str]) -> None:
    if missing := [short_path(name) for name in parameters if name not in names]:
        got = f"none for {missing[0]}"
        raise arguments.value_error(f"{where}: names", "a tensor for each parameter", got)


def _read(
    tensors: Tensors,
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    names: Mapping[str, str],
    *,
    is_by_hand: bool = False,
) -> dict[str, dict[str, Array]]:
    """Checks all shapes and dtypes, then reads the parameters, and what stands beside them.

    Parameters without a tensor are zeros.
    """
    expected = dict(parameters)
    for name, tensor in names.items():
        _check_presence(tensors, tensor)
        if name not in expected:
            expected[name] = jax.ShapeDtypeStruct(tensors.entry(tensor).shape, jnp.float32)
        shape = expected[name].shape
        stored = shape[::-1] if is_transposed(name, tensor) else shape
        _check_entry(tensors, tensor, stored, is_by_hand=is_by_hand)
    params: dict[str, dict[str, Array]] = {}
    for name, tensor in names.items():
        module, leaf = name.rsplit("/", 1)
        shape, dtype = expected[name].shape, expected[name].dtype
        array = tensors.read(tensor, shape, dtype, transposed=is_transposed(name, tensor))
        params.setdefault(module, {})[leaf] = array
    for name in parameters.keys() - names.keys():
        module, leaf = name.rsplit("/", 1)
        params[module][leaf] = jnp.zeros(parameters[name].shape, parameters[name].dtype)
    return params


def _check_presence(tensors: Tensors, tensor: str) -> None:
    if tensor not in tensors.files:
        want = f"a tensor {schema.shorten(tensor)}"
        raise arguments.value_error(shown_path(tensors.path), want, listed(tensors))


def _check_entry(
    tensors: Tensors,
    tensor: str,
    shape: tuple[int, ...],
    *,
    is_by_hand: bool = False,
    hint: str = "",
) -> None:
    """Raises unless a tensor has this shape and a dtype that is read."""
    entry = tensors.entry(tensor)
    ones = len(entry.shape) - len(shape)
    may_lead = is_by_hand or tensor.endswith(LOGITS_BIAS)
    is_same = entry.shape == shape or (may_lead and entry.shape == (1,) * ones + shape)
    dtypes = (*DTYPES, FLOAT64) if is_by_hand else tuple(DTYPES)
    if is_same and entry.dtype in dtypes:
        return
    want = (
        f"shape {list(shape)}, as the configuration says, of {', '.join(dtypes[:-1])} or "
        f"{dtypes[-1]}"
    )
    if is_same and entry.dtype == FLOAT64:
        want += " (config and names load it by hand, rounded to the config's param_dtype)"
    elif not is_same and entry.shape[1:] == shape[1:]:
        want += hint
    place = f"{shown_path(tensors.path)}: {schema.shorten(tensor)}"
    raise arguments.value_error(place, want, entry)
