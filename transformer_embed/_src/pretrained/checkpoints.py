"""`load_embedder` and `save_embedder`, whose files describe themselves.

The metadata of such a file is JSON: a config, rotary embeddings, a bias, and names. What is read is
checked by the classes and functions that it is for.
"""

import dataclasses
import json
import os
import pathlib
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig, OutputConfig
from transformer_embed._src.layers.parameters import (
    ROOT,
    Params,
    by_path,
    layer_paths,
    table_path,
)
from transformer_embed._src.partitioning import gathered
from transformer_embed._src.positions.rotary_scaling import Scaling
from transformer_embed._src.positions.schemes import PositionScheme
from transformer_embed._src.pretrained.description import describe, describe_config
from transformer_embed._src.pretrained.entries import Options
from transformer_embed._src.pretrained.files import (
    as_path,
    call_with_named_errors,
    check_mappings,
    parse,
    read_json,
)
from transformer_embed._src.pretrained.layer_parts import (
    BIAS,
    LOGITS_BIAS,
    OFFSETS,
)
from transformer_embed._src.pretrained.layers import Layer
from transformer_embed._src.pretrained.parameters import (
    PretrainedInput,
    check_tensors,
    full_paths,
    read_parameters,
    shapes_of,
    stored,
)
from transformer_embed._src.pretrained.published import open_published
from transformer_embed._src.pretrained.tensors import Header, Tensors, open_tensors
from transformer_embed._src.pretrained.writing import written

# The entry of a file's metadata that has all but the parameters.
METADATA = "transformer_embed"
# The entry of an object that has the name of its class.
KIND = "kind"


def load_embedder(
    path: str | os.PathLike[str],
    *,
    stack: str | None = None,
    settings: Mapping[str, Any] | None = None,
    config: EmbedderConfig | None = None,
    names: Mapping[str, str] | None = None,
    length: int | None = None,
    part: str | None = None,
    shardings: Mapping[str, NamedSharding] | None = None,
    row_multiple: int = 1,
) -> PretrainedInput:
    """Loads the parameters and the configuration of a checkpoint's input layer.

    Embeddings in float32 agree with the transformers library's to 5 units in the last place of the
    largest value, to 8 if a linear layer follows a norm. The page "Published models" lists the
    model types that are known, and how exactly each is reproduced. The type, in `config.json` or in
    `settings`, says which tensors make the layer, and only these are read. Of a file of
    `save_embedder`, all tensors are. Each is copied once: peak memory is at most 1.05 times large
    tables. No code in the file is run.

    Positions that you pass are rows of the table of positions: add `config.scheme.start` to those
    that count from 0, such as a `TokenPositions` has by default, and the published `position_ids`
    of OPT and BART. Models with token types need `token_types`; pass zeros if the original model is
    called without them.

    Args:
        path: a safetensors file, an index file (`model.safetensors.index.json`) beside its shards,
            or a folder that holds `model.safetensors` or that index file.
        stack: `"encoder"` or `"decoder"`, for models with both; None: the encoder. A stack's own
            table takes precedence over a shared one.
        settings: `config.json` entries, such as {"model_type": "bert"}. They override those in the
            checkpoint's config.json, which may be missing: entries that change the embeddings are
            then required. Those of a rotation's scaling override entry by entry, unless they name
            another type. None for an entry that is not read says that it means nothing. A file of
            `save_embedder` takes none.
        config: with `names`, loads any other model, such as one from a tutorial.
        names: the tensor name for each parameter of `Embedder(config).init`. A path may be
            shortened to a suffix that no other parameter has ("token_embedding/embeddings"). A
            linear layer lies as PyTorch has it, [out, in], or as Flax and Haiku do, [in, out], if
            its name ends with "kernel" or "w"; ".T" after any name says that the tensor is the
            parameter's transpose. None
            instead of a name gives zeros, for models without an offset in the layer norm or in the
            linear layer of `embedding_width`. Leading axes of 1 are dropped.
        length: the number of tokens of the longest text that the model will read. Required if the
            rotation depends on it (LongRoPE, as in Phi-3's 128k models, and dynamic NTK), without
            effect otherwise.
        part: of a model of several parts, the object in config.json that describes the one to load,
            such as "decoder" or "thinker_config.text_config"; None: its `text_config`, if it has
            one. If several parts have tensors of the same names, those are read that begin with the
            part's name ("decoder.", "thinker.").
        shardings: how parameters are split over a mesh, by paths that may be shortened as for
            names: {"token_embedding/embeddings": NamedSharding(mesh, P("data"))}. Each device's
            part is read from the file on its own; the other parameters are whole on each device of
            the mesh. None: all are on the default device.
        row_multiple: of the returned config: tables get rows of zeros at the end, so that the
            devices of a mesh can share them. A config of names has its own.

    Returns:
        PretrainedInput(config, params, layers, bias, names, no_output). Parameters have the dtypes
        of their tensors, `config.param_dtype` is that of the token table, and `config.dtype` is
        None. `config.pad_id` is None, because the padding row is read as it is stored.
        `config.output` is the model's output layer, with its table and bias if the file has them,
        or None: `no_output` says why. Of a model with two stacks, an untied one is the
        decoder's.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or has another format; shapes disagree with the
            configuration; a dtype is not float32, bfloat16 or float16; the model is not known;
            settings are missing, invalid, or not read by the model; an adapter of peft changes the
            input or output layer.

    Warns:
        UserWarning: an adapter of peft lies in the folder, which was not read.

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
    """
    check_mappings(settings=settings, names=names, shardings=shardings)
    if (config is None) != (names is None):
        raise arguments.value_error("config and names", "both or neither", "one of them")
    tensors = open_tensors(path)
    is_own = METADATA in tensors.metadata
    if config is not None or is_own:
        # Empty settings say nothing.
        others = {"settings": settings or None, "length": length, "stack": stack, "part": part}
        others["row_multiple"] = None if row_multiple == 1 else row_multiple
        for name, value in others.items():
            arguments.check_left_out(name, value, "names or metadata say what it would")
    may_lack = OFFSETS
    if config is not None and names is not None:
        pretrained, may_lack = _named(config, names)
    elif is_own:
        # A missing offset is damage.
        pretrained, may_lack = describe_own(tensors), ()
    else:
        beside = tensors.path.parent / "config.json"
        whole = read_json(beside) if beside.exists() else {}
        pretrained = describe(open_published(beside, whole, tensors, settings, stack, length, part))
        padded = dataclasses.replace(pretrained.config, row_multiple=row_multiple)
        pretrained = pretrained._replace(config=padded)
    parameters = check_tensors(tensors, pretrained, may_lack)
    split = full_paths(shardings or {}, parameters, "shardings")
    for name, sharding in split.items():
        arguments.instance(f"shardings: {name}", sharding, NamedSharding, "a NamedSharding")
    return pretrained._replace(params=read_parameters(tensors, pretrained, parameters, split))


def _named(config: Any, names: Mapping[str, str]) -> tuple[PretrainedInput, Mapping[str, Any]]:
    """The input layer whose tensors have these names, by the parameters' full paths."""
    if arguments.instance("config", config, EmbedderConfig, "an EmbedderConfig").spread:
        raise arguments.value_error("config.spread", "False; te.pretrained.resize spreads", True)
    paths = full_paths(names, shapes_of(config))
    # None stands for an offset of zeros; for another parameter, no tensor has this name.
    stored = {name: each for name, each in paths.items() if each or name not in OFFSETS}
    return PretrainedInput(config, {}, names=stored), paths


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    stack: str | None = None,
    settings: Mapping[str, Any] | None = None,
    length: int | None = None,
    part: str | None = None,
) -> PretrainedInput:
    """The configuration of a published model's input layer without its parameters.

    For parameters from Orbax, Flax, MaxText or others, which you put at the paths and in the shapes
    of `Embedder(config).init`; the kernel [width, vocabulary] of an untied output layer is
    transposed. config.json does not say whether an output layer has a bias: `config.output` has
    none.

    Args:
        source: a config.json, a folder that holds one, or its entries.
        stack, settings, length, part: as for `load_embedder`.

    Returns:
        As `load_embedder` does, with params {} and names None.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as for `load_embedder`; or config.json does not say which tables there are
            (DeBERTa, TrOCR).

    Example:
        >>> import transformer_embed as te
        >>> entries = {"model_type": "llama", "vocab_size": 9, "hidden_size": 4}
        >>> found = te.pretrained.load_config(entries | {"num_hidden_layers": 1})
        >>> found.layers[0].rotary
        {'base': 10000.0, 'layout': 'half'}
    """
    check_mappings(settings=settings)
    path = pathlib.Path("config.json")
    if not isinstance(source, Mapping):
        path = as_path(source)
        path = path / "config.json" if path.is_dir() else path
        source = read_json(path)
    tensors = Tensors(path=path, files={}, metadata={}, header=lambda _: Header({}, {}))
    return describe_config(open_published(path, source, tensors, settings, stack, length, part))


def save_embedder(
    path: str | os.PathLike[str],
    config: EmbedderConfig,
    params: Params,
    layers: Sequence[Layer] = (),
    bias: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    no_output: str | None = None,
) -> None:
    """Writes a safetensors file that `load_embedder` reads back bit for bit.

    The file is written whole or not at all. The configuration is stored in its metadata. With the
    names that `load_embedder` returned, other libraries find the tensors under their original
    names. The checks of `load_embedder` run before anything is written. A replaced file keeps its
    permissions. If parameters lie on the devices of several
    processes, all must call it: each gathers them, the first one writes, and the others wait.

    Args:
        path: the file to write or replace.
        config: as for `Embedder`.
        params: a Haiku parameter tree with one layer of the config, at any path, as in a whole
            model; arrays of float32, bfloat16 or float16. The layer, and T5's table if `bias` has
            buckets, are written with the paths of `load_embedder`, other parameters with their own.
        layers: see `PretrainedInput`.
        bias: see `PretrainedInput`.
        names: a tensor name for each parameter; see `load_embedder` for shortened paths. Parameters
            that are left out keep their own names.
        no_output: see `PretrainedInput`.

    Raises:
        OSError: the file cannot be written.
        ValueError: params do not hold one layer of the config (of a model with several input
            layers, pass the modules of one); a name is used twice or cannot be stored; a dtype is
            not supported; the path is a folder, a pipe or a device.

    Example:
        >>> import pathlib, tempfile
        >>> import jax
        >>> import transformer_embed as te
        >>> config = te.EmbedderConfig(9, 4)
        >>> params = te.Embedder(config).init(jax.random.key(0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "mine.safetensors")
        >>> te.pretrained.save_embedder(path, config, params)
        >>> te.pretrained.load_embedder(path).config == config
        True

    Source:
        The safetensors format, https://github.com/huggingface/safetensors
    """
    pretrained = PretrainedInput(config, {}, layers, bias, names, no_output)
    _check(pretrained)
    leaves = by_path(_with_own_paths(config, params, bias))
    if slashed := [name for group in params.values() for name in group if "/" in name]:
        raise arguments.value_error("params", "names without a slash", repr(slashed[0]))
    tensor_names = {name: name for name in leaves} | full_paths(names or {}, leaves)
    arrays = _by_tensor_name(leaves, tensor_names)
    pretrained = pretrained._replace(layers=[*layers], names=tensor_names)
    texts = {METADATA: json.dumps(pretrained._asdict(), default=encoded)}
    path, metadata = as_path(path).resolve(), {"format": "pt"} | texts
    is_shared = not all(
        getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(params)
    )
    if not is_shared or jax.process_index() == 0:
        # What is written can be loaded.
        with written(path, arrays, metadata) as tensors:
            check_tensors(tensors, describe_own(tensors))
    if is_shared:
        # Slow to load, and only several processes need it.
        from jax.experimental import multihost_utils  # noqa: PLC0415

        multihost_utils.sync_global_devices("save_embedder")


def _check(found: PretrainedInput) -> None:
    """Raises unless all but the parameters have their types."""
    arguments.instance("config", found.config, EmbedderConfig, "an EmbedderConfig")
    check_mappings(bias=found.bias, names=found.names)
    arguments.entries("layers", found.layers, arguments.instance, kinds=Layer, want="a Layer")
    arguments.instance("no_output", found.no_output, str | None, "a sentence, or None")


def _by_tensor_name(leaves: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a file: each parameter under its tensor's name, and as that tensor lies."""
    lie = {name: stored(name, tensor) for name, tensor in names.items() if isinstance(tensor, str)}
    # The header keeps its metadata under this name.
    tensors = {tensor for tensor, _ in lie.values()} - {"__metadata__"}
    if len(tensors) < len(leaves):
        want = "a tensor's name of its own for each parameter, other than '__metadata__'"
        raise arguments.value_error("names", want, [*names.values()])
    arrays = {}
    for name, (tensor, is_transposed) in lie.items():
        array = gathered(name, arguments.unwrapped(leaves[name]))
        array = array.T if is_transposed else array
        # BART's own has an axis of 1 before it.
        array = array[None] if tensor.endswith(LOGITS_BIAS) else array
        # Its bytes are written as they lie.
        arrays[tensor] = np.asarray(array, order="C")
    return arrays


def _with_own_paths(config: EmbedderConfig, params: Params, bias: Options | None) -> Params:
    """The tree with the modules that `load_embedder` knows under the paths that it gives them."""
    paths = {path: ROOT + name for name, path in layer_paths("params", config, params).items()}
    if bias is not None and "num_buckets" in bias:
        module = BIAS.rpartition("/")[0]
        paths[table_path("params", params, module)] = module
    return {paths.get(path, path): leaves for path, leaves in params.items()}


def describe_own(tensors: Tensors) -> PretrainedInput:
    """The layer that `save_embedder` described in the metadata."""
    entries = parse(f"{tensors.path}: {METADATA}", tensors.metadata[METADATA], decoded)
    pretrained = call_with_named_errors(tensors.path, PretrainedInput, **entries)
    call_with_named_errors(tensors.path, _check, pretrained)
    return pretrained


def _kinds() -> dict[str, Callable]:
    """What a file may name: it can make no other object. A scheme may be the user's own."""
    schemes, scalings = PositionScheme.__subclasses__(), typing.get_args(Scaling)
    return {
        kind.__name__: kind for kind in (EmbedderConfig, OutputConfig, Layer, *schemes, *scalings)
    }


def encoded(value: Any) -> Any:
    """A value of a type that JSON does not have: a class has its name, with its fields."""
    kind = type(value).__name__
    if kind in _kinds():
        return {KIND: kind} | vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.dtype):
        return value.name
    # A number or an array of numpy, or a fraction.
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else float(value)


def decoded(entries: dict[str, Any]) -> Any:
    """An object with tuples for lists, or an instance of the class that it names."""
    for name, value in entries.items():
        # JSON has no tuples, which configurations and `pair_axes` are compared by.
        if isinstance(value, list):
            entries[name] = tuple(value)
    if KIND not in entries:
        return entries
    kinds = _kinds()
    return kinds[arguments.choice(KIND, entries.pop(KIND), tuple(kinds))](**entries)
