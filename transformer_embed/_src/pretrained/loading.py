"""`load_embedder` and `load_config`, which read published models and files of `save_embedder`."""

import dataclasses
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.pretrained.description import describe_config, describe_published
from transformer_embed._src.pretrained.files import (
    as_path,
    check_mappings,
    read_json,
    read_json_if_there,
)
from transformer_embed._src.pretrained.layer_parts import OFFSETS
from transformer_embed._src.pretrained.own_files import METADATA, describe_own
from transformer_embed._src.pretrained.parameters import (
    PretrainedInput,
    check_tensors,
    full_paths,
    read_parameters,
    shapes_of,
)
from transformer_embed._src.pretrained.published import open_published
from transformer_embed._src.pretrained.tensors import Header, Tensors, open_tensors


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

    Use it to put the embeddings, the positions and the output layer of a published model into your
    own model. The type of the model, in `config.json` or in `settings`, says which tensors make the
    layer, and only these are read. From a file of `save_embedder`, all tensors are read. The page
    "Published models" lists the types that are known, and how exactly each is reproduced.

    If you pass positions to the layer, they are rows of the table of positions. So add
    `config.scheme.start` to positions that count from 0, such as the positions of `TokenPositions`.
    If the model has token types, pass `token_types`; zeros are what the original model uses if it
    gets none.

    Args:
        path: A safetensors file, an index file (`model.safetensors.index.json`) beside its shards,
            or a folder that holds `model.safetensors` or that index file.
        stack: `"encoder"` or `"decoder"`, for models with both. If None, the encoder. If the file
            has a token table of this stack and a shared one, the stack's own table is read.
        settings: Entries of `config.json`, such as {"model_type": "bert"}. They override the
            entries of the checkpoint's config.json. If the checkpoint has no config.json, you must
            pass all entries that change the embeddings. The entries of a rotation's scaling
            override one by one, unless settings name another type of scaling. If config.json has an
            entry that is refused, but that means nothing in your model, pass None for this entry. A
            file of `save_embedder` takes no settings.
        config: With `names`, the config of any other model, such as one from a tutorial.
        names: The tensor name for each parameter of `Embedder(config).init`. A parameter's path may
            be shortened to a suffix that no other parameter has ("token_embedding/embeddings"). If
            the tensor name of a linear layer ends with "kernel" or "w", the tensor is read as
            [in, out], as Flax and Haiku store it; otherwise as [out, in], as PyTorch stores it. If
            you add ".T" to any name, the tensor is transposed. None instead of a name gives zeros:
            use it for models without an offset in the layer norm, or in the linear layer of
            `embedding_width`. Leading axes of length 1 are dropped.
        length: The number of tokens of the longest text that the model will read. You need it if
            the rotation depends on it (LongRoPE, as in Phi-3's 128k models, and dynamic NTK).
        part: The object in config.json that describes the part to load, for a model of several
            parts, such as "decoder" or "thinker_config.text_config". If None, the object
            `text_config` is used, or all of config.json if there is no such object. If several
            parts have tensors of the same names, the tensors are read that begin with the part's
            name ("decoder.", "thinker.").
        shardings: How parameters are split over a mesh, by their paths:
            {"token_embedding/embeddings": NamedSharding(mesh, P("data"))}. A path may be shortened
            to a suffix that no other parameter has. Each device's part is read from the file on its
            own, so no device holds the whole table. The parameters that you leave out are whole on
            each device of the mesh. If None, all parameters are on the default device.
        row_multiple: The `row_multiple` of the returned config: tables get rows of zeros at the
            end, so that the devices of a mesh can share them. If you pass a config, set its
            `row_multiple` instead.

    Returns:
        A `PretrainedInput`. Parameters have the dtypes of their tensors, `config.param_dtype` is
        the dtype of the token table, and `config.dtype` is None. `config.pad_id` is None, because
        the padding row is read as it is stored. `config.output` is the model's output layer, or
        None: then `no_output` says why. In a model with two stacks, an untied output layer is the
        decoder's.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or has another format; shapes disagree with the
            configuration; a dtype is not float32, bfloat16 or float16; the model is not known;
            settings are missing, invalid, or not read by the model; an adapter of peft changes the
            input or output layer.

    Warns:
        UserWarning: the folder has an adapter of peft, which is not read; config.json has entries
            that are not known; or the model around a text model is of an unknown type.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> import safetensors.numpy
        >>> import transformer_embed as te
        >>> path = pathlib.Path(tempfile.mkdtemp(), "tutorial.safetensors")
        >>> safetensors.numpy.save_file({"embedding.weight": np.ones([9, 4], np.float32)}, path)
        >>> config = te.EmbedderConfig(9, 4, scheme=te.Sinusoidal())
        >>> names = {"token_embedding/embeddings": "embedding.weight"}
        >>> found = te.pretrained.load_embedder(path, config=config, names=names)
        >>> ids = [[1, 2, 3]]
        >>> te.Embedder(config).apply(found.params, None, ids, is_training=False).shape
        (1, 3, 4)

    Edge cases:
        - Embeddings in float32 agree with transformers to 5 units in the last place of the
          largest value, or to 8 if a linear layer follows a norm.
        - Each tensor is copied once, to the memory of the returned array. So peak memory is at most
          1.05 times the size of large tables.
        - No code in the file is run.
    """
    check_mappings(settings=settings, names=names, shardings=shardings)
    if (config is None) != (names is None):
        raise arguments.value_error("config and names", "both or neither", "one of them")
    tensors = open_tensors(path)
    describes_itself = METADATA in tensors.metadata
    if config is not None or describes_itself:
        _check_left_out(settings, row_multiple, length=length, stack=stack, part=part)
    if config is not None and names is not None:
        named = _describe_named(config, names)
        described = named.described
        may_lack: Collection[str] = named.may_lack
    elif describes_itself:
        described = describe_own(tensors)
        # `save_embedder` writes all offsets, so a file without one is damaged.
        may_lack = ()
    else:
        config_path = tensors.path.parent / "config.json"
        entries = read_json_if_there(config_path)
        published = open_published(
            config_path, entries, tensors, settings=settings, stack=stack, length=length, part=part
        )
        described = _with_row_multiple(describe_published(published), row_multiple)
        may_lack = OFFSETS
    # The shape and the dtype of each parameter, by its path.
    specs = check_tensors(tensors, described, may_lack)
    shardings_by_path = _shardings_by_path(shardings or {}, specs)
    params = read_parameters(tensors, described, specs, shardings_by_path)
    return described._replace(params=params)


def _check_left_out(settings: Mapping[str, Any] | None, row_multiple: int, **options: Any) -> None:
    """Raises a ValueError for an option of `load_embedder` that could have no effect.

    The options describe a published model. A file of `save_embedder` describes itself, and if the
    caller passes a config and names, they describe the layer.
    """
    # Empty settings and a multiple of 1 are the same as leaving the option out.
    options["settings"] = settings or None
    options["row_multiple"] = None if row_multiple == 1 else row_multiple
    for name, value in options.items():
        arguments.check_left_out(name, value, "names or metadata say what it would")


def _shardings_by_path(
    shardings: Mapping[str, NamedSharding], paths: Collection[str]
) -> dict[str, NamedSharding]:
    """Returns the shardings of parameters by their whole paths, which are some of `paths`."""
    shardings_by_path = full_paths(shardings, paths, "shardings")
    for path, sharding in shardings_by_path.items():
        arguments.instance(f"shardings: {path}", sharding, NamedSharding, "a NamedSharding")
    return shardings_by_path


def _with_row_multiple(described: PretrainedInput, row_multiple: int) -> PretrainedInput:
    """Returns the input layer with this `row_multiple` in its config."""
    config = dataclasses.replace(described.config, row_multiple=row_multiple)
    return described._replace(config=config)


class NamedInput(NamedTuple):
    """An input layer that the caller described, and the parameters that are zeros without a tensor.

    Args:
        described: The input layer without its parameters.
        may_lack: The paths of the parameters that may have no tensor.
    """

    described: PretrainedInput
    may_lack: Collection[str]


def _describe_named(config: EmbedderConfig, names: Mapping[str, str | None]) -> NamedInput:
    """Returns the input layer that a config and the names of its tensors describe.

    An offset may have None for a name. A parameter that `names` leaves out is later refused by
    `check_tensors`.
    """
    arguments.instance("config", config, EmbedderConfig, "an EmbedderConfig")
    if config.spread:
        raise arguments.value_error("config.spread", "False; te.pretrained.resize spreads", True)
    names_by_path = full_paths(names, shapes_of(config))
    names_of_tensors = {}
    for path, tensor_name in names_by_path.items():
        # An offset whose name is None is left out, and becomes zeros. Any other None is kept, and
        # `check_tensors` refuses it, because no tensor has this name.
        if tensor_name or path not in OFFSETS:
            names_of_tensors[path] = tensor_name
    described = PretrainedInput(config=config, params={}, names=names_of_tensors)
    return NamedInput(described=described, may_lack=names_by_path)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    stack: str | None = None,
    settings: Mapping[str, Any] | None = None,
    length: int | None = None,
    part: str | None = None,
) -> PretrainedInput:
    """Returns the configuration of a published model's input layer, without its parameters.

    Use it if you have the parameters from Orbax, Flax or MaxText: put them at the paths and in the
    shapes of `Embedder(config).init`, and transpose the kernel [width, vocabulary] of an untied
    output layer. config.json does not say whether an output layer has a bias, so `config.output`
    has none.

    Args:
        source: A config.json, a folder that holds one, or its entries.
        stack: `"encoder"` or `"decoder"`, for models with both. If None, the encoder.
        settings: Entries that override the ones of config.json, such as {"vocab_size": 50304}. If
            config.json has an entry that is refused, but that means nothing in your model, pass
            None for this entry.
        length: The number of tokens of the longest text that the model will read. You need it if
            the rotation depends on it (LongRoPE, as in Phi-3's 128k models, and dynamic NTK).
        part: The object in config.json that describes the part, for a model of several parts, such
            as "decoder" or "thinker_config.text_config". If None, the object `text_config` is used,
            or all of config.json if there is no such object.

    Returns:
        A `PretrainedInput` as from `load_embedder`, with params {} and names None.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the model is not known; settings are missing, invalid, or not read by the model;
            or config.json does not say which tables there are (DeBERTa, TrOCR).

    Warns:
        UserWarning: config.json has entries that are not known; or the model around a text model is
            of an unknown type.

    Example:
        >>> import transformer_embed as te
        >>> entries = {"model_type": "llama", "vocab_size": 9, "hidden_size": 4}
        >>> found = te.pretrained.load_config(entries | {"num_hidden_layers": 1})
        >>> found.layers[0].rotary
        {'base': 10000.0, 'layout': 'half'}
    """
    check_mappings(settings=settings)
    if isinstance(source, Mapping):
        entries: Mapping[str, Any] = source
        # Errors name this path.
        config_path = pathlib.Path("config.json")
    else:
        path = as_path(source)
        config_path = path / "config.json" if path.is_dir() else path
        entries = read_json(config_path)
    no_tensors = Tensors(path=config_path, files={}, metadata={}, header=lambda _: Header({}, {}))
    published = open_published(
        config_path, entries, no_tensors, settings=settings, stack=stack, length=length, part=part
    )
    return describe_config(published)
