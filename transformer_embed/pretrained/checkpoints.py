"""Input layers of published checkpoints, from safetensors files and back."""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from transformer_embed import _checks
from transformer_embed.functional.lookup import Table
from transformer_embed.layers.config import EmbedderConfig
from transformer_embed.layers.embedder import Params, make_embedder
from transformer_embed.pretrained import architectures as known
from transformer_embed.pretrained.config_json import config_from_json, config_to_json, extras_from_json, extras_to_json
from transformer_embed.pretrained.files import DTYPES, Tensors, open_tensors, read_json, write_tensors

CONFIG = "transformer_embed.config"
EXTRAS = "transformer_embed.extras"
LISTED = 40
BY_HAND = (
    "; map another model by hand: load_embedder(path, config=EmbedderConfig(vocab_size, d_model, positions=None, scale=False), "
    f"names={{{known.TOKENS!r}: 'embedding.weight'}})"
)


class PretrainedInput(NamedTuple):
    """The input layer of a checkpoint, as `load_embedder` returns it; `save_embedder(path, *pretrained)` writes all of it.

    Args:
        config: for `make_embedder`.
        params: for the `apply` of that embedder; and, under `relative_position_bias`, T5's table.
        rotary: arguments of `apply_rotary`; None: the model does not rotate. Where layers differ (Gemma 3), one such dict for each
            kind of layer.
        bias: arguments of `RelativePositionBias` (T5), or of `alibi_bias` (Bloom); None: the model has no bias.
        names: the tensor that each parameter came from.

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
    """The parameters and the configuration of a checkpoint's input layer.

    The tensors' names and the `config.json` beside them say what the layer is. Only its own tensors are read, each copied once from
    the mapped file; no code in the file is ever run, and either all is loaded or nothing.

    Known are: BERT (MiniLM too), RoBERTa, XLM-R, CamemBERT, DistilBERT, ALBERT, ELECTRA, GPT-2, OPT, T5, mT5, Marian, M2M100, BART,
    mBART, CLIP's text model, Llama, Mistral, Qwen 2 and 3, Phi, Phi-3, Gemma 1 to 3, GPT-NeoX and Bloom, as the transformers library
    names their tensors. In float32 the numbers are that library's to 1e-6, but for what it rounds itself: long rotary positions,
    T5's bucket at some boundaries, and Gemma's factor in bfloat16. At padding, M2M100's sinusoid is here that of position 1, there
    zeros: the mask hides it.

    `config.pad_id` is None, for the row of padding is read as it is stored. Models with token types want `token_types`, as ever:
    zeros, where the original has none given.

    Args:
        path: a safetensors file, an index file (`model.safetensors.index.json`) with its shards, or a folder with one of them under
            its usual name.
        stack: `"encoder"` or `"decoder"`, for models with both; None: the encoder.
        settings: entries of `config.json`, taken before those of the file, or in its place: {"model_type": "bert", ...}.
        config: with names, of a model that is not known, such as a tutorial's own.
        names: the tensor of each parameter of `make_embedder(config).init`; no other tensor and no setting is looked at.

    Returns:
        PretrainedInput(config, params, rotary, bias, names), with parameters of the tensors' dtypes and a config of the token table's.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: an argument of another type.
        ValueError: a damaged file, or one of another format; shapes that disagree with the configuration; another dtype than float32,
            bfloat16 and float16; a model that is not known; settings that no file says.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> import safetensors.numpy
        >>> import transformer_embed as te
        >>> path = pathlib.Path(tempfile.mkdtemp(), "tutorial.safetensors")
        >>> safetensors.numpy.save_file({"embedding.weight": np.ones([9, 4], np.float32)}, path)
        >>> config = te.EmbedderConfig(9, 4, positions=te.Sinusoidal())
        >>> names = {"transformer_embedding/~/token_embedding/embeddings": "embedding.weight"}
        >>> config, params, *_ = te.pretrained.load_embedder(path, config=config, names=names)
        >>> te.make_embedder(config).apply(params, None, [[1, 2, 3]], is_training=False).shape
        (1, 3, 4)

    Source:
        The models' published checkpoints and the transformers library, https://github.com/huggingface/transformers
    """
    if stack is not None:
        _checks.choice("stack", stack, known.STACKS)
    for name, value in (("settings", settings), ("names", names)):
        if not isinstance(value, Mapping | None):
            raise TypeError(_checks.wanted(name, "a mapping, or None", type(value).__name__))
    if (config is None) != (names is None):
        raise ValueError(_checks.wanted("config and names", "both or neither", "one of them"))
    tensors = open_tensors(path)
    is_own = settings is None and CONFIG in tensors.metadata
    if config is not None or is_own:
        _checks.unwanted("stack", stack, "each parameter is named: by the file, where save_embedder wrote it, or by names")
    if config is not None and names is not None:
        by_hand = PretrainedInput(config, {}, names=dict(names))
        wanted = _wanted(by_hand)
        if unknown := sorted(set(names) - set(wanted)):
            raise ValueError(_checks.wanted("names", f"parameters that the config has, {sorted(wanted)}", unknown))
        return _loaded(tensors, by_hand)
    if is_own:
        return _loaded(tensors, _from_metadata(tensors))
    return _loaded(tensors, _recognised(tensors, stack, dict(settings or {})))


def save_embedder(
    path: str | os.PathLike[str],
    config: EmbedderConfig,
    params: Params,
    rotary: Mapping[str, Any] | None = None,
    bias: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file that `load_embedder` reads back bit for bit; whole, or not at all.

    The configuration stands in the file's metadata. With the names that `load_embedder` gave, other libraries find the tensors under
    the names of the original.

    Args:
        path: the file to write, or to replace.
        config: as for `make_embedder`.
        params: all that it wants, and what else there is (T5's table); arrays of float32, bfloat16 or float16.
        rotary: as in `PretrainedInput`, as are the next ones.
        bias: as above.
        names: as above; None: the parameters' own names.

    Raises:
        OSError: the file cannot be written.
        TypeError: an argument of another type.
        ValueError: parameters that disagree with the config; two of one name; another dtype.

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
    _checks.params(params)
    leaves = {f"{module}/{name}": _on_host(f"{module}/{name}", leaf) for module, group in params.items() for name, leaf in group.items()}
    if unknown := sorted(set(names or {}) - set(leaves)):
        raise ValueError(_checks.wanted("names", f"names of parameters, of {sorted(leaves)}", unknown))
    names = {name: (names or {}).get(name, name) for name in leaves}
    found = PretrainedInput(config, params, rotary, bias, names)
    for name, shape in _wanted(found).items():
        if name not in leaves or leaves[name].shape != shape:
            got = f"shape {list(leaves[name].shape)}" if name in leaves else f"none among {sorted(leaves)}"
            raise ValueError(_checks.wanted(f"params: {name}", f"shape {list(shape)}, as the config says", got))
    for name, leaf in leaves.items():
        if leaf.dtype not in DTYPES.values():
            raise ValueError(_checks.wanted(f"params: {name}", "float32, bfloat16 or float16", leaf.dtype))
    arrays = {tensor: leaves[name].T if _is_turned(name, tensor) else leaves[name] for name, tensor in names.items()}
    if len(arrays) < len(leaves):
        raise ValueError(_checks.wanted("names", "a tensor of its own for each parameter", sorted(names.values())))
    extras = extras_to_json({"rotary": rotary, "bias": bias, "names": names})
    write_tensors(pathlib.Path(os.path.realpath(path)), arrays, {"format": "pt", CONFIG: config_to_json(config), EXTRAS: extras})


def _on_host(name: str, leaf: Any) -> np.ndarray:
    if isinstance(leaf, Table):
        raise TypeError(_checks.wanted(f"params: {name}", "a whole array", f"a table held as {type(leaf).__name__}"))
    return np.asarray(leaf)


def _loaded(tensors: Tensors, found: PretrainedInput) -> PretrainedInput:
    """The description with its parameters, once all shapes and dtypes are seen to be right."""
    wanted, names = _wanted(found), found.names or {}
    if unnamed := sorted(set(wanted) - set(names)):
        raise ValueError(_checks.wanted("names", f"a tensor for each parameter, {sorted(wanted)}", f"none for {unnamed}"))
    for name, tensor in names.items():
        if tensor not in tensors.files:
            raise ValueError(_checks.wanted(str(tensors.path), f"a tensor {tensor!r}", _listed(tensors)))
        entry = tensors.entry(tensor)
        expected = wanted.get(name, entry.shape)
        shape = expected[::-1] if _is_turned(name, tensor) else expected
        if entry.shape != shape or entry.dtype not in DTYPES:
            want = f"shape {list(shape)}, as the configuration says, of F32, BF16 or F16"
            raise ValueError(_checks.wanted(f"{tensors.path}: {tensor}", want, entry))
    params: dict[str, dict[str, Array]] = {}
    for name in names:
        module, leaf = name.rsplit("/", 1)
        params.setdefault(module, {})[leaf] = tensors.read(names[name], transposed=_is_turned(name, names[name]))
    return found._replace(params=params)


def _wanted(found: PretrainedInput) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter."""
    tree = jax.eval_shape(make_embedder(found.config).init, jax.random.key(0))
    shapes = {f"{module}/{name}": leaf.shape for module, leaves in tree.items() for name, leaf in leaves.items()}
    if found.bias is not None and "num_buckets" in found.bias:
        shapes[known.BIAS] = (found.bias["num_buckets"], found.bias["num_heads"])
    return shapes


def _is_turned(name: str, tensor: str) -> bool:
    """A linear layer's weights are [out, in] wherever they do not have our own name."""
    return name == known.WIDEN and tensor != name


def _recognised(tensors: Tensors, stack: str | None, settings: dict[str, Any]) -> PretrainedInput:
    beside = tensors.path.parent / "config.json"
    has_file = beside.is_file()
    entries = read_json(beside) if has_file else {}
    text = entries.get("text_config")
    types = [settings.get("model_type"), entries.get("model_type"), text.get("model_type") if isinstance(text, dict) else None]
    entries = entries | (text if isinstance(text, dict) else {}) | settings
    kind, names = _kind(tensors, [each for each in types if each is not None], stack or known.STACKS[0])
    if stack is not None and not kind.has_stacks:
        raise ValueError(_checks.wanted("stack", f"None, since {kind.model_types[0]} has one stack", repr(stack)))
    read = known.Settings(entries, has_file, stack or known.STACKS[0])
    shapes = {name: tensors.entry(tensor).shape for name, tensor in names.items()}
    source = str(beside) if has_file else "settings"
    for name, tensor in names.items():
        rank = 1 if name in known.VECTORS else 2
        if len(shapes[name]) != rank:
            raise ValueError(_checks.wanted(f"{tensors.path}: {tensor}", f"a tensor of rank {rank}", tensors.entry(tensor)))
    try:
        described = kind.describe(read, shapes)
        dtype = DTYPES.get(tensors.entry(names[known.TOKENS]).dtype, jnp.dtype("float32"))
        config = EmbedderConfig(**described.options, param_dtype=dtype, dtype=dtype)
        wanted = _wanted(PretrainedInput(config, {}, bias=described.bias))
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{source}, for a model {kind.model_types[0]}: {error}") from error
    if read.missing:
        want = f"{sorted(set(read.missing))} of a model {kind.model_types[0]}, from a config.json beside the tensors or as settings={{...}}"
        raise ValueError(_checks.wanted(str(tensors.path), want, "none of them" if has_file else "no config.json"))
    return PretrainedInput(config, {}, described.rotary, described.bias, {name: names[name] for name in wanted if name in names})


def _kind(tensors: Tensors, model_types: list[Any], stack: str) -> tuple[known.Architecture, dict[str, str]]:
    """The architecture, and the tensor of each of its parameters."""
    named = next((kind for kind in map(known.by_model_type, model_types) if kind is not None), None)
    if model_types and named is None:
        what = "one of " + ", ".join(sorted(name for each in known.ARCHITECTURES for name in each.model_types))
        raise ValueError(_checks.wanted("model_type", what, f"{model_types[0]!r}, with {_listed(tensors)}{BY_HAND}"))
    kinds = known.ARCHITECTURES if named is None else (named,)
    matches = [(kind, prefix, names) for kind in kinds for prefix, names in _matches(kind, tensors.files, stack)]
    if named is None and matches:
        certain = [match for match in matches if match[0].is_certain(match[1])]
        if not certain:
            types = sorted({name for kind, *_ in matches for name in kind.model_types})
            raise ValueError(_checks.wanted("settings", f"an entry model_type, for these tensors are those of {types}", _listed(tensors)))
        most = max(len(names) for _, _, names in certain)
        matches = [match for match in certain if len(match[2]) == most]
    if len(matches) != 1:
        what = "the tensors of " + (f"a model {named.model_types[0]}" if named else "one model that is known")
        got = f"{len(matches)} sets of them, below {[prefix for _, prefix, _ in matches]}" if matches else _listed(tensors)
        raise ValueError(_checks.wanted(str(tensors.path), what, got + BY_HAND))
    kind, prefix, names = matches[0]
    refused = next((reason for tensor, reason in kind.refused.items() if prefix + tensor in tensors.files), None)
    if refused is not None:
        raise ValueError(_checks.wanted(str(tensors.path), f"a model {kind.model_types[0]} that EmbedderConfig can say", refused))
    return kind, names


def _matches(kind: known.Architecture, files: Mapping[str, pathlib.Path], stack: str) -> list[tuple[str, dict[str, str]]]:
    """Each prefix below which all tensors of an architecture are, with the tensor of each parameter."""
    ends = [end.format(stack=stack) for end in kind.tensors[known.TOKENS]]
    prefixes = dict.fromkeys(name[: -len(end)] for end in ends for name in files if name == end or name.endswith(f".{end}"))
    found = ((prefix, _below(prefix, kind, files, stack)) for prefix in prefixes)
    return [(prefix, names) for prefix, names in found if names is not None]


def _below(prefix: str, kind: known.Architecture, files: Mapping[str, pathlib.Path], stack: str) -> dict[str, str] | None:
    names = {}
    for parameter, ends in kind.tensors.items():
        candidates = (prefix + end.removeprefix("?").format(stack=stack) for end in ends)
        tensor = next((candidate for candidate in candidates if candidate in files), None)
        if tensor is not None:
            names[parameter] = tensor
        elif not ends[0].startswith("?"):
            return None
    return names


def _listed(tensors: Tensors) -> str:
    """The tensors' names, layers' numbers left out."""
    is_open = set(tensors.files.values()) == {tensors.path}
    seen = {re.sub(r"\b\d+\b", "*", name): f" {tensors.entry(name)}" if is_open else "" for name in sorted(tensors.files)}
    # Those of an input layer first.
    order = sorted(seen, key=lambda name: ("*" in name, name))
    more = f" and {len(order) - LISTED} more" if len(order) > LISTED else ""
    return "the tensors " + (", ".join(name + seen[name] for name in order[:LISTED]) + more if order else "of an empty file")


def _from_metadata(tensors: Tensors) -> PretrainedInput:
    """What `save_embedder` wrote about its parameters."""
    try:
        config = config_from_json(tensors.metadata[CONFIG])
        extras = extras_from_json(tensors.metadata.get(EXTRAS, "{}"))
        found = PretrainedInput(config, {}, extras.get("rotary"), extras.get("bias"))
        return found._replace(names=extras.get("names") or {name: name for name in _wanted(found)})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(_checks.wanted(f"{tensors.path}: {CONFIG}", "an EmbedderConfig as JSON", repr(error))) from error
