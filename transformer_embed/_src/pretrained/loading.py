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
    own model. The `model_type`, in `config.json` or in `settings`, says which tensors belong to
    these layers, and only these tensors are read. If `save_embedder` wrote the file, all tensors
    are read. The page "Supported models" lists the model types that this package knows, and says
    how closely each type agrees with transformers.

    The first token of some models has a position above 0, which is `config.scheme.start`. For
    example, RoBERTa's first token has position 2. If you pass positions to the layer, add
    `config.scheme.start` to positions that count from 0, such as the positions of `TokenPositions`.
    If the model has token types, pass `token_types` to the layer. If you have no token types, pass
    zeros, as the original model does.

    Args:
        path: A safetensors file, an index file (`model.safetensors.index.json`) beside its shards,
            or a folder that holds `model.safetensors` or that index file.
        stack: Which part of an encoder-decoder model is read, `"encoder"` or `"decoder"`. If None,
            the encoder is read. If the file has a token table for the chosen stack and a token
            table that both stacks share, the table for the chosen stack is read.
        settings: Entries that override the entries of the checkpoint's config.json, such as
            {"model_type": "bert"}. If the checkpoint has no config.json, pass all entries that
            change the embeddings. A `rope_scaling` without a `rope_type`, or with the same
            `rope_type` as in config.json, changes only the numbers that you pass. A `rope_scaling`
            with another `rope_type` replaces the whole `rope_scaling` of config.json. If an error
            names an entry that your model does not use, pass None for this entry. If
            `save_embedder` wrote the file, do not pass settings.
        config: The config of the layer, for a model of a type that this package does not know, such
            as a model from a tutorial. If you pass `config`, you must pass `names` too. If None,
            the checkpoint says the config.
        names: The names of the tensors, as a dict {path of a parameter: name of a tensor}, with an
            entry for each parameter of `Embedder(config).init`. The end of a path, such as
            "token_embedding/embeddings", is enough if no other path ends with it.

            - The tensor of a linear layer is read as [in, out] if the name ends with "kernel" or
              "w", as Flax and Haiku store weights. Otherwise it is read as [out, in], as PyTorch
              stores weights.
            - If you add ".T" to the name of a tensor, the parameter is the transpose of the tensor.
            - If the layer norm of your model has no bias, pass None as the name for
              "layer_norm/offset". If you set `config.embedding_width`, the token table is followed
              by a linear layer. If this linear layer has no bias, pass None as the name for
              "widen/b". A parameter with the name None is filled with zeros.
            - Leading axes of length 1 are dropped. For example, a tensor [1, 512, 64] is read as
              [512, 64].
        length: The number of tokens of the longest text that the model will read. Required if the
            frequencies of the rotary embeddings depend on this number. They do so in two types of
            scaling: "longrope", as in Phi-3's 128k models, and "dynamic" (dynamic NTK, in which
            longer texts have lower frequencies).
        part: The name of the part to load, if the model has several parts. Pass the path of the
            object in config.json that describes the part, such as "decoder" or
            "thinker_config.text_config". If None, the object `text_config` is read if there is one,
            and otherwise all of config.json. If the safetensors file has the token tables of
            several parts, the table of the chosen part is read. For example, with "decoder" this is
            the table whose name begins with "decoder.", and with "thinker_config.text_config" it is
            the table whose name begins with "thinker.".
        shardings: How parameters are split over a mesh, as a dict {path of a parameter: sharding},
            such as {"token_embedding/embeddings": NamedSharding(mesh, P("data"))}. The end of a
            path is enough if no other path ends with it. The part of each device is read from the
            file separately, so no device holds the whole table. Parameters that you leave out are
            copied whole to each device of the mesh. If None, all parameters are on the default
            device.
        row_multiple: The `row_multiple` of the returned config. The token tables get further rows
            of zeros, so that their number of rows is a multiple of `row_multiple`, and you can
            split the tables over the devices of a mesh. For example, with 128, a table of 50,257
            rows gets 47 rows of zeros, and has 50,304 rows. If you pass a `config`, set
            `config.row_multiple` instead.

    Returns:
        A `PretrainedInput`. Each parameter has the dtype of its tensor, `config.param_dtype` is the
        dtype of the token table, and `config.dtype` is None. For a published model, `config.pad_id`
        is None. So the vector of a padding token is the table row of its id, as in the original
        model. (With a `pad_id`, the vector would be all zeros.) `config.output` is the output layer
        of the model. If `config.output` is None, `no_output` says why. In an encoder-decoder model,
        an untied output layer belongs to the decoder.

    Raises:
        FileNotFoundError: There is no file at the path.
        ValueError: There are several causes:

            - The file is damaged, or is not in the safetensors format.
            - A tensor has a dtype other than float32, bfloat16 or float16, or a shape that
              disagrees with the config.
            - The file has a tensor that may belong to the input layer, but that is not read for
              this model type.
            - The model type is not known.
            - An entry of config.json or of `settings` is missing, or has a wrong value.
            - config.json has an entry that may change the input or the output layer, but this
              package does not know the effect of the entry on models of this type.
            - `settings` has an entry that has no effect on models of this type.
            - The file has tensors of an adapter, such as LoRA from the library peft, that changes
              the input or the output layer.

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
        - In float32, the embeddings differ from the embeddings of transformers by at most 5 units
          in the last place (ulp) of the largest value. For example, if the largest value is 7, one
          ulp is 4.8e-7, so the embeddings differ by at most 2.4e-6. If `config.embedding_width` is
          set, a linear layer comes last, and the embeddings differ by at most 8 ulp.
        - Each tensor is copied once, to the memory of the returned array. So if you load a large
          table, you need at most 1.05 times the memory of the table itself.
        - No code in the file is run.
        - You get a UserWarning if the folder has an adapter, such as LoRA, that was saved with the
          library peft. The adapter is not read. You also get a UserWarning if config.json has
          entries that this package does not know, and if a text model is inside a larger model of
          an unknown type, such as a model for images and text.
    """
    check_mappings(settings=settings, names=names, shardings=shardings)
    if (config is None) != (names is None):
        raise arguments.value_error("config and names", "both or neither", "one of them")
    tensors = open_tensors(path)
    # `METADATA` is the name under which `save_embedder` stores a description of the layer.
    describes_itself = METADATA in tensors.metadata
    if config is not None or describes_itself:
        _check_left_out(settings, row_multiple, length=length, stack=stack, part=part)
    # In each case, `described` is the layer without its parameters, and `may_lack` has the paths of
    # parameters that may have no tensor.
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
        # The layer norm or the linear layer of a published model may have no bias.
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

    An offset, the bias of a layer norm or of a linear layer, may have None for a name. A parameter
    that `names` leaves out is later refused by `check_tensors`.
    """
    arguments.instance("config", config, EmbedderConfig, "an EmbedderConfig")
    # The rows of a spread table are in another order, which no published file has.
    if config.spread:
        raise arguments.value_error("config.spread", "False; te.pretrained.resize spreads", True)
    names_by_path = full_paths(names, shapes_of(config))
    names_of_tensors = {}
    for path, tensor_name in names_by_path.items():
        # An offset whose name is None is left out, and becomes zeros. For any other parameter, None
        # is kept, so that `check_tensors` raises an error: no tensor has this name.
        is_left_out = path in OFFSETS and not tensor_name
        if not is_left_out:
            names_of_tensors[path] = tensor_name
    described = PretrainedInput(config=config, params={}, names=names_of_tensors)
    # `may_lack` may have all named parameters, because only the offsets above have no tensor.
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

    Use it if you have the parameters in a checkpoint of Orbax, Flax or MaxText: this function gives
    you the config. Put the parameters into a tree with the paths and shapes of
    `Embedder(config).init`. If the output layer is untied, transpose its kernel [width,
    vocabulary]. config.json does not say whether an output layer has a bias, so the returned config
    has an output layer without a bias.

    Args:
        source: The path of a config.json, the path of a folder with a config.json, or a dict with
            the entries of a config.json.
        stack: Which part of an encoder-decoder model is described, `"encoder"` or `"decoder"`. If
            None, the encoder is described.
        settings: Entries that override the entries of config.json, such as {"vocab_size": 50304}.
            If an error names an entry that your model does not use, pass None for this entry.
        length: The number of tokens of the longest text that the model will read. Required if the
            frequencies of the rotary embeddings depend on this number. They do so in two types of
            scaling: "longrope", as in Phi-3's 128k models, and "dynamic" (dynamic NTK, in which
            longer texts have lower frequencies).
        part: The name of the part to read, if the model has several parts. Pass the path of the
            object in config.json that describes the part, such as "decoder" or
            "thinker_config.text_config". If None, the object `text_config` is read if there is one,
            and otherwise all of config.json.

    Returns:
        A `PretrainedInput`, as `load_embedder` returns it, but `params` is {} and `names` is None.

    Raises:
        FileNotFoundError: There is no file at the path.
        ValueError: There are several causes:

            - The model type is not known.
            - An entry of config.json or of `settings` is missing, or has a wrong value.
            - config.json has an entry that may change the input or the output layer, but this
              package does not know the effect of the entry on models of this type.
            - `settings` has an entry that has no effect on models of this type.
            - config.json does not say which tables the model has (DeBERTa, TrOCR).

    Example:
        >>> import transformer_embed as te
        >>> entries = {"model_type": "llama", "vocab_size": 9, "hidden_size": 4}
        >>> found = te.pretrained.load_config(entries | {"num_hidden_layers": 1})
        >>> found.layers[0].rotary
        {'base': 10000.0, 'layout': 'half'}

    Edge cases:
        - You get a UserWarning in two cases: if config.json has entries that this package does not
          know, or if a text model is inside a larger model of an unknown type, such as a model for
          images and text.
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
    no_header = Header(entries={}, metadata={})
    no_tensors = Tensors(path=config_path, files={}, metadata={}, header=lambda _: no_header)
    published = open_published(
        config_path, entries, no_tensors, settings=settings, stack=stack, length=length, part=part
    )
    return describe_config(published)
