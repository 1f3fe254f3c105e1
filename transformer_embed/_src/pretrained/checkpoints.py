"""Loads the input layers of published checkpoints from safetensors files, and saves them."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup import Table
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embedder import Params
from transformer_embed._src.layers.schemes import Learned, Sinusoidal
from transformer_embed._src.pretrained import architectures as known
from transformer_embed._src.pretrained import schema
from transformer_embed._src.pretrained.config_json import (
    config_to_json,
    extras_from_json,
    extras_to_json,
    options_from_json,
)
from transformer_embed._src.pretrained.files import (
    DTYPES,
    FLOAT64,
    Tensors,
    open_tensors,
    read_json,
    shown_path,
    write_tensors,
)
from transformer_embed._src.pretrained.recognition import listed, recognised

CONFIG = "transformer_embed.config"
EXTRAS = "transformer_embed.extras"
# Parameters that a published model may lack; zeros are equivalent.
OFFSETS = (known.NORM_OFFSET, known.WIDEN_OFFSET)


class PretrainedInput(NamedTuple):
    """The input layer of a checkpoint, as `load_embedder` returns it; `save_embedder(path,
    *pretrained)` writes all of it.

    Args:
        config: for `make_embedder` and `TransformerEmbedding`.
        params: for the `apply` of that embedder; T5's table of biases is under
            `relative_position_bias`.
        rotary: the keyword arguments of `apply_rotary`; None if the model has no rotary embeddings.
            If layers differ (Gemma 3), a dict with such arguments for each kind of layer.
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

    Known models, with the tensor names of the transformers library: BERT (and MiniLM), RoBERTa,
    XLM-R, CamemBERT, DistilBERT, ALBERT, ELECTRA, GPT-2, OPT, T5, mT5, Marian, M2M100, BART, mBART,
    CLIP's text model, Llama, Mistral, Qwen 2 and 3, Phi, Phi-3, Gemma 1 to 3, GPT-NeoX and Bloom.
    Embeddings in float32 agree with that library's to 3 units in the last place of the largest
    value. Four things differ. Long rotary positions, T5's bucket at some boundaries and Gemma's
    factor in bfloat16 are exact here. M2M100's sinusoid at padding is that of position 1 here and
    zeros there; the mask hides it.

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
        names: the tensor name for each parameter of `make_embedder(config).init`. A path may be
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
        >>> te.make_embedder(config).apply(params, None, [[1, 2, 3]], is_training=False).shape
        (1, 3, 4)

    Source:
        The models' published checkpoints and the transformers library,
        https://github.com/huggingface/transformers
    """
    if stack is not None:
        arguments.choice("stack", stack, known.STACKS)
    for name, value in (("settings", settings), ("names", names)):
        if not isinstance(value, Mapping | None):
            raise TypeError(arguments.wanted(name, "a mapping, or None", type(value).__name__))
    if not isinstance(config, EmbedderConfig | None):
        raise TypeError(
            arguments.wanted("config", "an EmbedderConfig, or None", type(config).__name__)
        )
    if (config is None) != (names is None):
        raise ValueError(arguments.wanted("config and names", "both or neither", "one of them"))
    tensors = open_tensors(path)
    if config is not None and names is not None:
        arguments.unwanted("stack", stack, "names says the tensor of each parameter")
        return _loaded(tensors, _by_hand(config, names))
    if settings is None and CONFIG in tensors.metadata:
        arguments.unwanted(
            "stack", stack, "the file, which save_embedder wrote, says the tensor of each parameter"
        )
        return _loaded(tensors, _from_metadata(shown_path(tensors.path), tensors.metadata))
    return _loaded(tensors, _recognised(tensors, stack, dict(settings or {})))


def save_embedder(
    path: str | os.PathLike[str],
    config: EmbedderConfig,
    params: Params,
    rotary: Mapping[str, Any] | None = None,
    bias: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file that `load_embedder` reads back bit for bit; the file is written
    whole or not at all.

    The configuration is stored in the file's metadata. With the names that `load_embedder`
    returned, other libraries find the tensors under their original names. The checks of
    `load_embedder` run before anything is written. A replaced file keeps its permissions, and
    temporary files of a save that was killed are removed from the folder.

    Args:
        path: the file to write or replace.
        config: as for `make_embedder`.
        params: all parameters of the config, and any others (T5's table); arrays of float32,
            bfloat16 or float16.
        rotary: see `PretrainedInput`.
        bias: see `PretrainedInput`.
        names: a tensor name for each parameter; see `load_embedder` for shortened paths. Parameters
            that are left out keep their own names.

    Raises:
        OSError: the file cannot be written.
        TypeError: an argument has the wrong type.
        ValueError: parameters disagree with the config; a name is used twice or cannot be stored; a
            dtype is not supported; `rotary` or `bias` has arguments that their functions do not
            take; the path is a folder, a pipe or a device.

    Example:
        >>> import pathlib, tempfile
        >>> import jax
        >>> import transformer_embed as te
        >>> config = te.EmbedderConfig(9, 4)
        >>> params = te.make_embedder(config).init(jax.random.key(0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "mine.safetensors")
        >>> te.pretrained.save_embedder(path, config, params)
        >>> te.pretrained.load_embedder(path).config == config
        True

    Source:
        The safetensors format, https://github.com/huggingface/safetensors
    """
    if not isinstance(config, EmbedderConfig):
        raise TypeError(arguments.wanted("config", "an EmbedderConfig", type(config).__name__))
    if not isinstance(path, str | os.PathLike):
        raise TypeError(arguments.wanted("path", "a str or a path", type(path).__name__))
    arguments.params(params)
    for name, value in (("rotary", rotary), ("bias", bias), ("names", names)):
        if not isinstance(value, Mapping | None):
            raise TypeError(arguments.wanted(name, "a mapping, or None", type(value).__name__))
    leaves = {
        _leaf_name(module, name): _on_host(f"{module}/{name}", leaf)
        for module, group in params.items()
        for name, leaf in group.items()
    }
    own = {name: name for name in leaves}
    names = own | {
        name: _tensor_name(tensor) for name, tensor in _full_paths(names or {}, leaves).items()
    }
    arrays = {
        tensor: leaves[name].T if _is_transposed(name, tensor) else leaves[name]
        for name, tensor in names.items()
    }
    if len(arrays) < len(leaves):
        raise ValueError(
            arguments.wanted(
                "names",
                "a tensor of its own for each parameter",
                schema.short_repr(sorted(names.values())),
            )
        )
    metadata = {
        CONFIG: config_to_json(config),
        EXTRAS: extras_to_json({"rotary": rotary, "bias": bias, "names": names}),
    }
    extras = extras_from_json("save_embedder", metadata[EXTRAS])
    for name, shape in _shapes(_Description("", _options(config), bias=extras.bias)).items():
        if name not in leaves or leaves[name].shape != shape:
            got = (
                f"shape {list(leaves[name].shape)}"
                if name in leaves
                else f"none among {schema.short_repr(sorted(leaves))}"
            )
            raise ValueError(
                arguments.wanted(
                    f"params: {schema.shorten(name)}",
                    f"shape {list(shape)}, as the config says",
                    got,
                )
            )
    # The checks of load_embedder: a file that passes them can be loaded.
    found = _from_metadata("save_embedder", metadata)
    schema.call_with_named_errors(found.where, EmbedderConfig, found.options)
    write_tensors(pathlib.Path(os.path.realpath(path)), arrays, {"format": "pt"} | metadata)


def _leaf_name(module: Any, name: Any) -> str:
    """A parameter's path: valid UTF-8 that can be split into module and name again."""
    for each in (module, name):
        if not isinstance(each, str):
            raise TypeError(
                arguments.wanted("params", "names that are strings", schema.short_repr(each))
            )
    if not name or "/" in name:
        raise ValueError(
            arguments.wanted(
                "params",
                "names of parameters without a slash",
                schema.short_repr(f"{module}/{name}"),
            )
        )
    return _tensor_name(f"{module}/{name}")


def _tensor_name(name: Any) -> str:
    """A name that a safetensors file can hold."""
    if not isinstance(name, str):
        raise TypeError(
            arguments.wanted("names", "tensors' names as strings", schema.short_repr(name))
        )
    if name == "__metadata__" or any(0xD800 <= ord(letter) < 0xE000 for letter in name):
        raise ValueError(
            arguments.wanted(
                "names",
                "names that UTF-8 can encode, other than '__metadata__'",
                schema.short_repr(name),
            )
        )
    return name


def _on_host(name: str, leaf: Any) -> np.ndarray:
    want = "an array of float32, bfloat16 or float16"
    if isinstance(leaf, Table):
        rows = leaf.in_vocabulary_order()
        if rows is None:
            raise TypeError(
                arguments.wanted(
                    f"params: {schema.shorten(name)}",
                    "a whole array",
                    f"a table held as {type(leaf).__name__}",
                )
            )
        leaf = rows
    if isinstance(leaf, np.ma.MaskedArray) or not isinstance(
        leaf, np.ndarray | np.generic | jax.Array
    ):
        raise TypeError(
            arguments.wanted(f"params: {schema.shorten(name)}", want, type(leaf).__name__)
        )
    if arguments.is_traced(leaf):
        raise TypeError(
            arguments.wanted(
                f"params: {schema.shorten(name)}", f"{want}, outside jit", "a traced array"
            )
        )
    dtype = leaf.dtype.newbyteorder("=") if isinstance(leaf.dtype, np.dtype) else None
    if dtype not in DTYPES.values():
        raise ValueError(
            arguments.wanted(
                f"params: {schema.shorten(name)}", "float32, bfloat16 or float16", leaf.dtype
            )
        )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            arguments.wanted(
                f"params: {schema.shorten(name)}",
                "an array on this process's devices (gather it first)",
                "one on other processes too",
            )
        )
    return np.asarray(leaf, dtype)


class _Description(NamedTuple):
    """The description of a checkpoint, before arrays are allocated: the config's arguments, and a
    tensor for each parameter."""

    where: str
    options: Mapping[str, Any]
    rotary: Mapping[str, Any] | None = None
    bias: Mapping[str, Any] | None = None
    names: Mapping[str, str | None] | None = None
    is_by_hand: bool = False


def _by_hand(config: EmbedderConfig, names: Mapping[str, str | None]) -> _Description:
    found = _Description("names", _options(config), is_by_hand=True)
    expected = _shapes(found)
    full = _full_paths(names, expected)
    for name, tensor in full.items():
        if not isinstance(tensor, str) and not (tensor is None and name in OFFSETS):
            want = "a tensor's name" + (", or None for zeros" if name in OFFSETS else "")
            raise TypeError(arguments.wanted(f"names: {name}", want, schema.short_repr(tensor)))
    if missing := [_short_path(name) for name in expected if name not in full]:
        raise ValueError(
            arguments.wanted(
                "names",
                f"a tensor for each parameter, also for {', '.join(missing)}",
                f"only {schema.short_repr(sorted(names))}",
            )
        )
    return found._replace(names=full)


def _options(config: EmbedderConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _full_paths(names: Mapping[Any, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The same mapping with full paths; a key is a path, or a suffix of exactly one path."""
    full = {}
    for name, value in names.items():
        ends = [path for path in paths if isinstance(name, str) and path.endswith(f"/{name}")]
        found = [name] if name in paths else ends
        if len(found) != 1 or found[0] in full:
            want = f"a parameter's path, or a suffix that only one path has, among {', '.join(map(_short_path, paths))}"
            raise ValueError(arguments.wanted("names", want[:250], schema.short_repr(name)))
        full[found[0]] = value
    return full


def _short_path(path: str) -> str:
    """The last two parts of a path."""
    return "/".join(path.split("/")[-2:])


def _loaded(tensors: Tensors, found: _Description) -> PretrainedInput:
    """Checks all shapes and dtypes, then reads the parameters."""
    expected, names = _shapes(found), found.names or {}
    for tensor in names.values():
        if tensor is not None and tensor not in tensors.files:
            raise ValueError(
                arguments.wanted(
                    shown_path(tensors.path), f"a tensor {schema.shorten(tensor)}", listed(tensors)
                )
            )
    given = {name: tensor for name, tensor in names.items() if tensor is not None}
    shapes = {
        name: expected[name] if name in expected else tensors.entry(tensor).shape
        for name, tensor in given.items()
    }
    for name, tensor in given.items():
        _check_entry(
            tensors,
            tensor,
            shapes[name][::-1] if _is_transposed(name, tensor) else shapes[name],
            found,
        )
    config = schema.call_with_named_errors(found.where, EmbedderConfig, found.options)
    params: dict[str, dict[str, Array]] = {}
    for name, tensor in names.items():
        module, leaf = name.rsplit("/", 1)
        if tensor is None:
            array = jnp.zeros(expected[name], _dtype_of(name, config))
        else:
            array = tensors.read(
                tensor,
                shapes[name],
                _dtype_of(name, config),
                transposed=_is_transposed(name, tensor),
            )
        params.setdefault(module, {})[leaf] = array
    return PretrainedInput(config, params, found.rotary, found.bias, given)


def _check_entry(
    tensors: Tensors, tensor: str, shape: tuple[int, ...], found: _Description
) -> None:
    entry = tensors.entry(tensor)
    ones = len(entry.shape) - len(shape)
    same = entry.shape == shape or (
        found.is_by_hand and ones > 0 and entry.shape == (1,) * ones + shape
    )
    dtypes = (*DTYPES, FLOAT64) if found.is_by_hand else tuple(DTYPES)
    if not same or entry.dtype not in dtypes:
        want = f"shape {list(shape)}, as the configuration says, of {', '.join(dtypes[:-1])} or {dtypes[-1]}"
        if same and entry.dtype == FLOAT64:
            want += " (config and names load it by hand, rounded to the config's param_dtype)"
        raise ValueError(
            arguments.wanted(f"{shown_path(tensors.path)}: {schema.shorten(tensor)}", want, entry)
        )


def _dtype_of(name: str, config: EmbedderConfig) -> np.dtype:
    """The dtype that the module gives the parameter; the layer norm is float32."""
    return (
        jnp.dtype("float32")
        if name in (known.NORM_SCALE, known.NORM_OFFSET)
        else jnp.dtype(config.param_dtype)
    )


def _shapes(found: _Description) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, computed without allocating any array."""
    options, scheme = found.options, found.options.get("scheme", Sinusoidal())
    d_model = options["d_model"]
    width = options.get("embedding_width") or d_model
    shapes = {known.TOKENS: (options["vocab_size"], width)}
    if isinstance(scheme, Learned):
        shapes[known.POSITIONS] = (scheme.max_len, width)
    if options.get("num_token_types") is not None:
        shapes[known.TOKEN_TYPES] = (options["num_token_types"], width)
    if options.get("layer_norm_eps") is not None:
        shapes |= {known.NORM_SCALE: (width,), known.NORM_OFFSET: (width,)}
    if options.get("embedding_width") is not None:
        shapes |= {known.WIDEN: (width, d_model), known.WIDEN_OFFSET: (d_model,)}
    if found.bias is not None and "num_buckets" in found.bias:
        shapes[known.BIAS] = (found.bias["num_buckets"], found.bias["num_heads"])
    return shapes


def _is_transposed(name: str, tensor: str | None) -> bool:
    """Whether a tensor is [out, in], as a linear layer's weights are unless they have this
    package's own name."""
    return name == known.WIDEN and tensor != name


def _recognised(tensors: Tensors, stack: str | None, settings: dict[str, Any]) -> _Description:
    beside = tensors.path.parent / "config.json"
    in_file = read_json(beside) if beside.is_file() else {}
    text = in_file.get("text_config")
    text = text if isinstance(text, dict) else {}
    said = [
        each for each in (in_file.get("model_type"), text.get("model_type")) if each is not None
    ]
    chosen = [settings.pop("model_type")] if settings.get("model_type") is not None else said
    kind, names = recognised(tensors, chosen, stack or known.STACKS[0], beside)
    model = kind.model_types[0]
    if stack is not None and not kind.has_stacks:
        raise ValueError(
            arguments.wanted("stack", f"None, since {model} has one stack", repr(stack))
        )
    where = f"{shown_path(beside) if in_file else 'settings'}, for a model {model}"
    read = _config_entries(where, kind, in_file | text, settings)
    is_named = any(each in kind.model_types for each in said)
    if missing := [
        kind.settings.names()[name][0] for name in _required(kind, is_named) if name not in read
    ]:
        want = f"{', '.join(sorted(missing))} of a model {model}, as settings={{...}} or in a config.json that names the model_type"
        got = (
            "none"
            if is_named
            else "a config.json without model_type"
            if in_file
            else "no config.json"
        )
        raise ValueError(arguments.wanted(shown_path(beside), want, got))
    shapes = {name: tensors.entry(tensor).shape for name, tensor in names.items()}
    for name, tensor in names.items():
        rank = 1 if name in known.VECTORS else 2
        if len(shapes[name]) != rank:
            want = f"a tensor of rank {rank}"
            raise ValueError(
                arguments.wanted(
                    f"{shown_path(tensors.path)}: {schema.shorten(tensor)}",
                    want,
                    tensors.entry(tensor),
                )
            )
    try:
        described = kind.settings(**read).describe(shapes, stack or known.STACKS[0])
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {str(error)[:200]}") from error
    dtype = DTYPES.get(tensors.entry(names[known.TOKENS]).dtype, jnp.dtype("float32"))
    options = described.options | {"param_dtype": dtype}
    return _Description(where, options, described.rotary, described.bias, names)


def _config_entries(
    where: str, kind: known.Architecture, in_file: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The entries of config.json, overridden by settings; an error names the source of a wrong
    entry."""
    own = kind.settings
    accepted = [name for names in own.names().values() for name in names]
    if unknown := [name for name in settings if name not in accepted]:
        reads = ", ".join(names[0] for names in own.names().values())
        raise ValueError(
            f"settings: wanted entries that a model {kind.model_types[0]} reads ({reads}), got {schema.short_repr(unknown[0])}"
        )
    found: dict[str, Any] = {}
    for source, entries in ((where, in_file), ("settings", settings)):
        try:
            given = own.entries(entries, is_file=entries is in_file)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        found |= schema.fields(source, own, given, is_partial=True)
    return found


def _required(kind: known.Architecture, is_named: bool) -> list[str]:
    """The required entries; if config.json does not name the model type, also those that change the
    embeddings."""
    required = [
        field.name for field in dataclasses.fields(kind.settings) if schema.is_required(field)
    ]
    return required if is_named else required + kind.settings.fields_that_change_embeddings()


def _from_metadata(where: str, metadata: Mapping[str, str]) -> _Description:
    """The description that `save_embedder` wrote into the metadata."""
    options = options_from_json(f"{where}: {CONFIG}", metadata[CONFIG])
    extras = extras_from_json(f"{where}: {EXTRAS}", metadata.get(EXTRAS, "{}"))
    found = _Description(f"{where}: {CONFIG}", options, extras.rotary, extras.bias)
    expected = _shapes(found)
    names = {name: name for name in expected} if extras.names is None else extras.names
    for name in names:
        module, _, leaf = name.rpartition("/")
        if not module or not leaf:
            raise ValueError(
                arguments.wanted(
                    f"{where}: {EXTRAS}: names",
                    "parameters as module/name",
                    schema.short_repr(name),
                )
            )
    if missing := [_short_path(name) for name in expected if name not in names]:
        raise ValueError(
            arguments.wanted(
                f"{where}: {EXTRAS}: names", "a tensor for each parameter", f"none for {missing[0]}"
            )
        )
    return found._replace(names=names)
