"""Loads the input layers of published checkpoints from safetensors files."""

import os
from collections.abc import Mapping
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.pretrained.architecture import OFFSETS, STACKS
from transformer_embed._src.pretrained.description import describe
from transformer_embed._src.pretrained.files import DTYPES, open_tensors
from transformer_embed._src.pretrained.messages import check_mappings
from transformer_embed._src.pretrained.own import CONFIG, describe_own
from transformer_embed._src.pretrained.parameters import (
    PretrainedInput,
    check_tensors,
    full_paths,
    parameters_of,
    read_parameters,
)
from transformer_embed._src.pretrained.recognition import open_published, recognised


def load_embedder(
    path: str | os.PathLike[str],
    *,
    stack: str | None = None,
    settings: Mapping[str, Any] | None = None,
    config: EmbedderConfig | None = None,
    names: Mapping[str, str] | None = None,
    length: int | None = None,
) -> PretrainedInput:
    """Loads the parameters and the configuration of a checkpoint's input layer.

    Embeddings in float32 agree with the transformers library's to 5 units in the last place of the
    largest value, to 8 if a linear layer follows a norm. The page "Published models" lists the
    model types that are known, and how exactly each is reproduced. The type, in `config.json` or in
    `settings`, says which tensors make the layer. Only these are read, each copied once: peak
    memory is at most 1.05 times large tables. No code in the file is run.

    Positions that you pass are rows of the table of positions: add `config.scheme.start` to the
    published `position_ids` of OPT and BART, which count from 0. Models with token types need
    `token_types`; pass zeros if the original model is called without them.

    Args:
        path: a safetensors file, an index file (`model.safetensors.index.json`) beside its shards,
            or a folder that holds `model.safetensors` or that index file.
        stack: `"encoder"` or `"decoder"`, for models with both; None: the encoder. A stack's own
            table takes precedence over a shared one.
        settings: `config.json` entries, such as {"model_type": "bert"}. They override those in the
            checkpoint's config.json, which may be missing: entries that change the embeddings are
            then required. None for an entry that is not read says that it means nothing. A file of
            `save_embedder` takes none.
        config: with `names`, loads any other model, such as one from a tutorial.
        names: the tensor name for each parameter of `Embedder(config).init`. A path may be
            shortened to a suffix that no other parameter has ("token_embedding/embeddings"). None
            instead of a name gives zeros, for models without an offset in the layer norm or in the
            linear layer of `embedding_width`. Leading axes of 1 are dropped; float64 is rounded to
            the config's `param_dtype`.
        length: the number of tokens of the longest text that the model will read. Required if the
            rotation depends on it (LongRoPE, as in Phi-3's 128k models, and dynamic NTK), without
            effect otherwise.

    Returns:
        PretrainedInput(config, params, layers, bias, names, per_layer). Parameters have the dtypes
        of their tensors, `config.param_dtype` is that of the token table, and `config.dtype` is
        None. `config.pad_id` is None, because the padding row is read as it is stored.
        `config.output` is the model's output layer, with its table and bias if the file has them,
        or says in words why there is none. Of a model with two stacks, an untied one is the
        decoder's.

    Raises:
        FileNotFoundError: there is no such file.
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
    """
    if stack is not None:
        arguments.choice("stack", stack, STACKS)
    check_mappings(settings=settings, names=names)
    if (config is None) != (names is None):
        raise arguments.value_error("config and names", "both or neither", "one of them")
    tensors = open_tensors(path)
    is_own = CONFIG in tensors.metadata
    if config is not None or is_own:
        # Empty settings say nothing.
        left_out = {"stack": stack, "settings": settings or None, "length": length}
        for name, value in left_out.items():
            arguments.check_left_out(name, value, "names or metadata say what it would")
    may_lack = OFFSETS
    if config is not None and names is not None:
        may_lack = full_paths(names, parameters_of("config", config))
        # None stands for an offset of zeros; for another parameter, no tensor has this name.
        stored = {name: each for name, each in may_lack.items() if each or name not in OFFSETS}
        found = PretrainedInput(config, {}, names=stored)
        # Tutorials save float64 tables; they are rounded when they are read.
        tensors = tensors._replace(dtypes=(*DTYPES, "F64"))
    elif is_own:
        # A missing offset is damage.
        found, may_lack = describe_own(tensors), ()
    else:
        file, said = open_published(tensors, stack, length), dict(settings or {})
        found = describe(file, *recognised(file, said.pop("model_type", None)), said)
    parameters = check_tensors(tensors, found, may_lack)
    return found._replace(params=read_parameters(tensors, found, parameters))
