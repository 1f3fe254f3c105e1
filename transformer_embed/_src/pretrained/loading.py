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
from transformer_embed._src.pretrained.files import as_path, check_mappings, read_json
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
        stack: `"encoder"` or `"decoder"`, for models with both. If None, the encoder. A stack's own
            table takes precedence over a shared one.
        settings: Entries of `config.json`, such as {"model_type": "bert"}. They override the
            entries of the checkpoint's config.json, which may be missing: entries that change the
            embeddings are then required. The entries of a rotation's scaling override one by one,
            unless they name another type. None for an entry that is not read says that it means
            nothing. A file of `save_embedder` takes no settings.
        config: With `names`, the config of any other model, such as one from a tutorial.
        names: The tensor name for each parameter of `Embedder(config).init`. A path may be
            shortened to a suffix that no other parameter has ("token_embedding/embeddings"). If a
            name ends with "kernel" or "w", a linear layer lies [in, out], as in Flax and Haiku;
            otherwise it lies [out, in], as in PyTorch. ".T" after any name says that the tensor is
            the parameter's transpose. None instead of a name gives zeros, for models without an
            offset in the layer norm or in the linear layer of `embedding_width`. Leading axes of 1
            are dropped.
        length: The number of tokens of the longest text that the model will read. You need it if
            the rotation depends on it (LongRoPE, as in Phi-3's 128k models, and dynamic NTK).
        part: The object in config.json that describes the part to load, for a model of several
            parts, such as "decoder" or "thinker_config.text_config". If None, the `text_config`, if
            there is one. If several parts have tensors of the same names, the tensors are read that
            begin with the part's name ("decoder.", "thinker.").
        shardings: How parameters are split over a mesh, by paths that may be shortened as for
            names: {"token_embedding/embeddings": NamedSharding(mesh, P("data"))}. Each device's
            part is read from the file on its own, so no device holds the whole table. The other
            parameters are whole on each device of the mesh. If None, all are on the default device.
        row_multiple: The `row_multiple` of the returned config: tables get rows of zeros at the
            end, so that the devices of a mesh can share them. A config of names has its own.

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
        UserWarning: an adapter of peft lies in the folder, which was not read; config.json has
            entries that nobody knows; or the model around a text model is of an unknown type.

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
        - Each tensor is copied once, into its final place: peak memory is at most 1.05 times the
          size of large tables.
        - No code in the file is run.
    """
    check_mappings(settings=settings, names=names, shardings=shardings)
    if (config is None) != (names is None):
        raise arguments.value_error("config and names", "both or neither", "one of them")
    tensors = open_tensors(path)
    is_own = METADATA in tensors.metadata
    if config is not None or is_own:
        # Empty settings, and a multiple of 1, say nothing.
        _check_left_out(
            settings=settings or None,
            length=length,
            stack=stack,
            part=part,
            row_multiple=None if row_multiple == 1 else row_multiple,
        )
    may_lack: Collection[str] = OFFSETS
    if config is not None and names is not None:
        named = _named(config, names)
        pretrained, may_lack = named.pretrained, named.may_lack
    elif is_own:
        # In a file that says what it has, a missing offset is damage.
        pretrained, may_lack = describe_own(tensors), ()
    else:
        beside = tensors.path.parent / "config.json"
        whole = read_json(beside) if beside.exists() else {}
        pretrained = describe_published(
            open_published(beside, whole, tensors, settings, stack, length, part)
        )
        padded = dataclasses.replace(pretrained.config, row_multiple=row_multiple)
        pretrained = pretrained._replace(config=padded)
    specs = check_tensors(tensors, pretrained, may_lack)
    split = full_paths(shardings or {}, specs, "shardings")
    for name, sharding in split.items():
        arguments.instance(f"shardings: {name}", sharding, NamedSharding, "a NamedSharding")
    return pretrained._replace(params=read_parameters(tensors, pretrained, specs, split))


def _check_left_out(**options: Any) -> None:
    """Raises a ValueError for an option of a file that needs none."""
    for name, value in options.items():
        arguments.check_left_out(name, value, "names or metadata say what it would")


class NamedInput(NamedTuple):
    """An input layer by names, and the parameters that need no tensor."""

    pretrained: PretrainedInput
    may_lack: Collection[str]


def _named(config: Any, names: Mapping[str, str]) -> NamedInput:
    """Returns the input layer whose tensors have these names."""
    if arguments.instance("config", config, EmbedderConfig, "an EmbedderConfig").spread:
        raise arguments.value_error("config.spread", "False; te.pretrained.resize spreads", True)
    paths = full_paths(names, shapes_of(config))
    # None stands for an offset of zeros; for another parameter, no tensor has this name.
    with_tensor = {path: name for path, name in paths.items() if name or path not in OFFSETS}
    pretrained = PretrainedInput(config=config, params={}, names=with_tensor)
    return NamedInput(pretrained=pretrained, may_lack=paths)


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
        stack: As for `load_embedder`.
        settings: As for `load_embedder`.
        length: As for `load_embedder`.
        part: As for `load_embedder`.

    Returns:
        A `PretrainedInput` as from `load_embedder`, with params {} and names None.

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
