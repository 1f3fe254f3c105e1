"""Compares te.pretrained with every model type of the transformers library.

Run: python tests/pretrained/sweep.py [TYPE ...] [--page]
Needs: torch (a CPU build), transformers, and this package's dependencies. It takes some minutes;
    no test runs it.

Each type is built small with random weights, twice: with odd settings that config.json says, and
with the library's defaults that config.json leaves out. Its embeddings are the input of its first
block, its rotations what its own function returns. --page writes notebooks/supported_models.md.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import os
import pathlib
import re
import sys
import tempfile
import textwrap
import warnings

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "notebooks" / "supported_models.md"

import jax  # noqa: F401 (before torch: each brings a thread pool)
import torch
import transformers
from tqdm import tqdm
from transformers.models.auto import configuration_auto, modeling_auto

import transformer_embed as te

BATCH, LENGTH, VOCAB, PAD = 3, 7, 64, 3
IDS = np.array([
    [5, 6, 7, 8, 9, 10, 11], [PAD, PAD, 12, 5, 13, 14, 15], [16, 17, 18, 5, 19, PAD, PAD],
])  # fmt: skip
IS_TOKEN = IDS != PAD
ARE_TOKENS = IS_TOKEN[:, None, :, None] & IS_TOKEN[:, None, None]
TYPES = np.arange(IDS.size).reshape(IDS.shape) % 2
# The library's models count positions with padding or without.
NEAR = [np.arange(LENGTH), np.asarray(te.TokenPositions.from_ids(IDS, pad_id=PAD).positions)]
FAR = np.array([0, 1, 30, 500, 7000, 50_000, 100_000])
ULPS = 5
# If a linear layer follows a norm.
WIDENED_ULPS = 8
TOKENS = "transformer_embedding/~/token_embedding"
# Scores of rotated heads: float32 angles of the library, positions below 7.
SCORE = 2e-5
# The same at positions up to 100,000, where a float32 angle is off by 4e-3.
FAR_SCORE = 1e-2
# Of the largest logit.
# The library's own float32 logits of mT5 are off by 6e-6 of those in float64.
LOGIT = 2e-5
MOST_PARAMETERS = 8e7
MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_PRETRAINING",
    "MODEL",
)
# Patterns of entries with their small sizes and their odd numbers, ids of tokens, and what some types
# need besides: one of them a base that this version of the library does not read.
SMALL = json.loads(pathlib.Path(__file__).with_name("small_models.json").read_text())


# Their attention makes another mask of the one that a layer is given.
OWN_MASKS = {"gpt_neo", "mpt"}
# Functions that rotate what only chooses the keys that attention reads.
OF_INDEXERS = {("modeling_deepseek_v32", "apply_rotary_pos_emb")}


# What the page calls the comparisons of rotations.
ROTATED = {
    "past": "scaled rotations to 100,000",
    "far": "rotations to 100,000",
    "rotation": "rotations to 6",
}
# In the order of an estimate of their downloads from the hub.
MOST_USED = (
    "bert mpnet xlm-roberta roberta distilbert qwen3 qwen2 llama electra clip gpt2 t5 opt qwen2_5_vl "
    "qwen3_vl gpt_oss modernbert nomic_bert deberta-v2 whisper siglip gemma3 gemma3_text mistral "
    "bart albert camembert marian m2m_100 qwen3_moe qwen2_vl phi3 gemma2 mixtral deepseek_v3 "
    "mt5 gpt_neox bloom mbart llava"
)


class NotSweptError(Exception):
    """The type has no input layer of tokens, or cannot be built or measured here."""


class WrongError(Exception):
    """Something differs from the library."""


def has_text(entries):
    """Whether a configuration has a vocabulary anywhere."""
    return any(
        has_text(value) if isinstance(value, dict) else "vocab" in str(key) and type(value) is int
        for key, value in entries.items()
    )


def small_entry(key, value, layers, tokens, is_odd):  # noqa: PLR0911 (a rule for each kind)
    """A small size, an odd number, or an id of a small vocabulary in place of a value."""
    if isinstance(value, dict) and key not in ("rope_parameters", "id2label", "label2id"):
        return resized(value, is_odd=is_odd)
    if isinstance(value, list) and len(value) == layers > 3:
        return value[1:4]
    if value is None:
        return 2 if key == "num_key_value_heads" else None
    if key in SMALL["ids"]:
        return SMALL["ids"][key]
    if isinstance(value, int) and re.search(r"token_(id|index)$|image_token|forced", key):
        return next(tokens, VOCAB - 1)
    if key == "scale_embedding" and is_odd:
        return not value
    rules = {int: SMALL["sizes"], float: SMALL["odd"] if is_odd else {}}.get(type(value), {})
    return next((number for pattern, number in rules.items() if re.fullmatch(pattern, key)), value)


def resized(entries, *, is_odd):
    """Entries of a config.json with small sizes, and odd numbers if asked."""
    layers, tokens = entries.get("num_hidden_layers") or 0, iter(range(40, VOCAB))
    small = {key: small_entry(key, value, layers, tokens, is_odd) for key, value in entries.items()}
    if isinstance(small.get("layer_types"), list):
        small["layer_types"] = ([*dict.fromkeys(small["layer_types"])] * 3)[:3]
    if own := small.get("per_layer_config"):
        # As the library writes Gemma 4: what full layers have of their own.
        wide = dict(next(iter(own.values()))) | {"head_dim": 48}
        full = [n for n, kind in enumerate(small["layer_types"]) if kind == "full_attention"]
        small["per_layer_config"] = {str(number): wide for number in full}
    if "qk_rope_head_dim" in entries:
        small |= {"head_dim": 8, "num_key_value_heads": 4}
    small |= SMALL["of types"].get(entries.get("model_type"), {})
    change = functools.partial(turned, entries=small, is_odd=is_odd)
    return changed_rope(small, change)


def changed_rope(entries, change):
    """The entries, with those of each rotation changed: of all layers, or of each kind."""
    rope = entries.get("rope_parameters")
    if not isinstance(rope, dict):
        return entries
    is_of_kinds = rope and all(isinstance(value, dict) for value in rope.values())
    if is_of_kinds:
        rope = {kind: change(value) for kind, value in rope.items()}
    return entries | {"rope_parameters": rope if is_of_kinds else change(rope)}


def turned(rope, entries, is_odd):
    """The entries of a rotation, odd ones if asked; sections have the pairs of a small head."""
    rope = dict(rope)
    if is_odd:
        rope["rope_theta"] = 700.0 + len(rope)
        if "partial_rotary_factor" in rope:
            rope["partial_rotary_factor"] = 0.5
    if "mrope_section" in rope or re.search(
        "_(vl|omni)_text|glm(4v|_ocr|_image).*text", entries["model_type"]
    ):
        head = entries.get("head_dim") or entries["hidden_size"] // entries["num_attention_heads"]
        pairs = int(head * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return rope


def scaled(rope):
    """Rotations with YaRN where they have no scaling, first trained on 8 positions."""
    if rope.get("rope_type", "default") != "default" or "mrope_section" in rope:
        return rope
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    return rope | yarn


def config_of(model_type, *, is_odd):
    """A small configuration."""
    kind = configuration_auto.CONFIG_MAPPING[model_type]
    default = kind().to_dict()
    if not has_text(default):
        raise NotSweptError("no vocabulary")
    small = resized(default, is_odd=is_odd)
    text = small.get("text_config", small)
    if is_odd and model_type in LONG:
        share = small["rope_parameters"].get("partial_rotary_factor", 1)
        pairs = int(small["hidden_size"] // small["num_attention_heads"] * share) // 2
        factors = {"short_factor": [1.5] * pairs, "long_factor": [7.0] * pairs}
        small["rope_parameters"] |= {"rope_type": "longrope"} | factors
        small["original_max_position_embeddings"] = 8
    elif is_odd and model_type not in UNSCALED:
        text |= changed_rope(text, scaled)
    if text.get("head_dim", 0) is None:
        # Neither YaRN in the library nor some of its models expect it.
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    text_kind = configuration_auto.CONFIG_MAPPING[text.get("model_type", model_type)]
    if getattr(text_kind, "attention_multiplier", 1) is None:
        # The class computed it from its own head size, and computes it again from the small one.
        text.pop("attention_multiplier")
    return kind.from_dict(small)


def without_defaults(entries, config):
    """The entries that differ from the defaults of the configuration's class."""
    default = type(config)().to_dict()
    rest = {}
    for key, value in entries.items():
        part = getattr(config, key, None)
        if isinstance(value, dict) and isinstance(part, transformers.PreTrainedConfig):
            rest[key] = without_defaults(value, part)
        elif key == "model_type" or value != default.get(key):
            rest[key] = value
    return rest


def classes(config):
    """Model classes of a configuration, those with a head first."""
    for mapping in MAPPINGS:
        found = getattr(modeling_auto, f"{mapping}_MAPPING", {}).get(type(config), ())
        yield from found if isinstance(found, tuple) else (found,)
    package = type(config).__module__.rpartition(".")[0]
    name = package.rpartition(".")[2]
    with contextlib.suppress(ImportError):
        module = importlib.import_module(f"{package}.modeling_{name}")
        models = [
            kind
            for kind in vars(module).values()
            if inspect.isclass(kind)
            and issubclass(kind, transformers.PreTrainedModel)
            and getattr(kind, "config_class", None) is type(config)
        ]
        yield from sorted(models, key=lambda kind: ("For" not in kind.__name__, kind.__name__))


def built(config):
    """A model with random weights."""
    problems = []
    for kind in dict.fromkeys(classes(config)):
        try:
            with torch.device("meta"):
                shell = kind._from_config(config)
            size = sum(parameter.numel() for parameter in shell.parameters())
            if not 0 < size < MOST_PARAMETERS:
                raise NotSweptError(f"{size:,} parameters")
            record_rotations(shell)
            torch.manual_seed(0)
            model = kind._from_config(config).eval().float()
        except Exception as error:
            problems.append(error)
            continue
        fixed = {
            id(parameter)
            for part in model.modules()
            if "Sinusoidal" in type(part).__name__
            for parameter in part.parameters()
        }
        for parameter in model.parameters():
            # A norm of ones and a padding row of zeros would hide a wrong tensor; sinusoids stay.
            if parameter.requires_grad and id(parameter) not in fixed:
                parameter.data += 0.1 * torch.randn_like(parameter)
        return model
    # The first is that of the class that was meant.
    first = next(iter(problems), NotSweptError("no model class"))
    raise first if isinstance(first, NotSweptError) else NotSweptError(f"not built: {first!r:.90}")


# What calls of a model recorded: the heads before and after each rotation, by layer; the same at far
# positions; layers that were reached; of each layer, which tokens see which; the last hidden states
# of a model, and its logits.
ROTATIONS, FAR_ROTATIONS, REACHED, MASKS, HEADS = [], [], set(), {}, []
LAYER = [None]


def record_rotations(model):
    """Wraps the functions that rotate in the files of a model's classes."""
    for name in {type(part).__module__ for part in model.modules()}:
        module = sys.modules[name]
        for label, function in list(vars(module).items()):
            if not re.match(r"apply_.*rot", label) or hasattr(function, "plain"):
                continue
            if (name.rpartition(".")[2], label) in OF_INDEXERS:
                continue
            if not callable(function) or "vision" in label or inspect.isclass(function):
                continue

            def wrapped(*arguments, plain=function, **options):
                given = [
                    each.detach().clone() if torch.is_tensor(each) else each for each in arguments
                ]
                given += [options[key] for key in ("q", "k", "xq", "xk") if key in options]
                found = plain(*arguments, **options)
                pairs = zip(given, found if isinstance(found, tuple) else (found,), strict=False)
                if plain.__module__.endswith("deepseek_v4"):
                    pairs = last_channels(*given, found)
                for before, after in pairs:
                    if torch.is_tensor(before) and before.ndim == 4 and before.shape == after.shape:
                        ROTATIONS.append((LAYER[0], before.numpy(), after.detach().numpy()))
                return found

            wrapped.plain = function
            setattr(module, label, wrapped)


def last_channels(before, cos, sin, after):
    """The channels of DeepSeek V4's queries and keys that rotate, before and after.

    It also rotates averages of tokens, which are fewer, and rotates outputs of attention back.
    """
    if before.shape[2] != LENGTH:
        return []
    # The second position is 1, whose sine is above 0.
    is_back = sin[0, 1, 0] < 0
    if is_back:
        return []
    channels = 2 * cos.shape[-1]
    return [(before[..., -channels:], after[..., -channels:])]


def seen_by(model):
    """What the first block of each list of blocks is given, by the list's name."""
    inputs, handles, table, states = {}, [], [], []

    def before(_, args, kwargs, name, n):
        LAYER[0] = (name, n)
        REACHED.add(LAYER[0])
        mask = kwargs.get("attention_mask")
        if torch.is_tensor(mask) and mask.ndim == 4 and mask.shape[-2:] == (LENGTH,) * 2:
            seen = mask if mask.dtype == torch.bool else mask > -1
            MASKS.setdefault(LAYER[0], seen[:, :1].numpy().copy())
        first = args[0] if args else kwargs.get("hidden_states")
        if n == 0 and torch.is_tensor(first) and first.is_floating_point() and table:
            # Gemma 3n and DeepSeek V4 have several hidden vectors of each token.
            if first.ndim == 4:
                first = first[0] if first.shape[0] != BATCH else first[:, :, 0]
            if first.shape[:2] == (LENGTH, BATCH):
                first = first.swapaxes(0, 1)
            inputs.setdefault(name, first.detach().numpy().copy())

    def after(_, args, output):
        state = getattr(output, "last_hidden_state", None)
        if state is not None:
            states.append(state.numpy())

    for name, part in model.named_modules():
        if isinstance(part, torch.nn.ModuleList) and not re.search("rotary|norm|altup", name):
            for n, block in enumerate(part):
                hook = functools.partial(before, name=name, n=n)
                handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))
        if isinstance(part, torch.nn.Embedding):
            handles.append(part.register_forward_hook(lambda *_: table.append(1)))
    ids = torch.tensor(IDS)
    given = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "decoder_input_ids": ids}
    given |= {"use_cache": False}
    if any("token_type" in name for name, _ in model.named_parameters()):
        given |= {"token_type_ids": torch.tensor(TYPES)}
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    handles += [part.register_forward_hook(after) for part in parts]
    features = {"input_features": torch.zeros(BATCH, 80, 80)}
    far = {"input_ids": ids, "position_ids": torch.tensor(FAR).expand(BATCH, -1)}
    for part in parts:
        accepted = inspect.signature(part.forward).parameters
        options = {key: value for key, value in given.items() if key in accepted}
        for more in (features, {}):
            with contextlib.suppress(Exception):
                if more.keys() <= accepted.keys():
                    found = part(**options | more)
                    HEADS.append((states[-1], found.logits.numpy()))
    near = [*ROTATIONS]
    for part in parts:
        with contextlib.suppress(Exception):
            if "position_ids" in inspect.signature(part.forward).parameters:
                part(**far, use_cache=False)
    FAR_ROTATIONS[:], ROTATIONS[:] = ROTATIONS[len(near) :], near
    for handle in handles:
        handle.remove()
    is_embedded = lambda value: value.ndim == 3 and value.shape[:2] == (BATCH, LENGTH)
    return {name: value for name, value in inputs.items() if is_embedded(value)}


def of_stack(inputs, stack, model, table):
    """The input of the blocks that follow the table of tokens, with the blocks' name."""
    owners = [
        name
        for name, weights in model.named_parameters(remove_duplicate=False)
        if weights.shape == table.shape and np.array_equal(weights.numpy(), table)
    ]
    names = [name for name in inputs if stack is None or stack in name]
    if not names:
        raise NotSweptError("not measured")
    # The blocks that share most of the table's path.
    paths = [owner.split(".") for owner in owners]
    shared = lambda name, path: len(os.path.commonprefix([name.split("."), path]))  # noqa: RUF071
    name = max(names, key=lambda name: max(shared(name, path) for path in paths))
    return name, inputs[name]


def ulps(ours, theirs):
    """The worst difference, in units in the last place of the largest value."""
    if ours.shape != theirs.shape:
        return np.inf
    return float(np.abs(ours - theirs).max() / np.spacing(np.abs(theirs).max()))


def by_length(heads):
    """[batch, length, heads, head_dim], of which the library's functions have another order."""
    return np.moveaxis(heads, 1 if heads.shape[1] == LENGTH else 2, 1)


def scores(heads):
    """Products of heads at any two positions: alike in either order of a head's channels."""
    heads = by_length(heads).astype(np.float64)
    return np.einsum("bthd,bshd->bhts", heads, heads)


def heads_error(options, several, before, after):
    """The difference of the scores of rotated heads, at one of several positions."""
    errors, theirs = [], scores(after)
    for positions in several:
        if "pair_axes" in options:
            axes = 1 + max(options["pair_axes"])
            positions = np.repeat(positions[..., None], axes, -1)  # noqa: PLW2901
        ours = scores(np.asarray(te.apply_rotary(by_length(before), positions, **options)))
        change = np.abs(ours - theirs) * ARE_TOKENS
        errors.append(change.max() / max(1, np.abs(theirs).max()))
    return min(errors)


def rotation_error(found, blocks, calls, model, several):
    """The worst difference of any layer; infinite if one should not rotate, NaN without calls."""
    calls = [(layer[1], heads) for layer, *heads in calls if layer and layer[0] == blocks]
    rotaries = [layer.rotary for layer in found.layers]
    if not any(rotaries):
        return np.inf if calls and rotaries else 0.0
    if not calls:
        return np.nan
    worst, last = [0.0], max(n for name, n in REACHED if name == blocks)
    for number, options in enumerate(rotaries[:3]):
        mine = [heads for n, heads in calls if n == number]
        # A model may stop early, for want of images or of fitting sizes.
        if not mine and number >= last:
            continue
        if (options is None) == bool(mine) and attends(model.get_submodule(f"{blocks}.{number}")):
            return np.inf
        worst += [heads_error(options, several, *heads) for heads in mine]
    return max(worst)


def mask_error(found, blocks):
    """Which layer sees other tokens than in the library, in words; "": none that was seen."""
    tokens = te.TokenPositions.from_ids(IDS, pad_id=PAD)
    for (name, number), theirs in MASKS.items():
        if name == blocks and number < len(found.layers):
            layer = found.layers[number]
            ours = np.asarray(te.AttentionMask(tokens, **layer.mask).dense())
            if np.any((ours != theirs) & ARE_TOKENS):
                return f"layer {number} of {layer} sees other tokens"
    return ""


def attends(block):
    """Whether a block has an attention that may rotate."""
    kinds = {
        type(part).__name__
        for name, part in block.named_modules()
        if name.split(".")[-1] in ("self_attn", "attn", "attention", "self_attention")
    }
    return any(not re.search("Linear|Lightning|Delta|Mamba", kind) for kind in kinds)


def compare(model_type, *, is_odd):
    """A line of the table: what came of it, the worst ulps, words, and what was compared."""
    for record in (ROTATIONS, REACHED, MASKS, HEADS):
        record.clear()
    config = config_of(model_type, is_odd=is_odd)
    model = built(config)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path, whole = pathlib.Path(folder, "config.json"), pathlib.Path(folder, "whole")
        complete = path.read_text()
        whole.mkdir()
        (whole / "config.json").write_text(complete)
        (whole / "model.safetensors").symlink_to(f"{folder}/model.safetensors")
        if not is_odd:
            path.write_text(json.dumps(without_defaults(json.loads(complete), config)))
        inputs = seen_by(model)
        stacks = ("encoder", "decoder") if config.is_encoder_decoder else (None,)
        lines = [of_one(folder, stack, inputs, model) for stack in stacks]
    order = ["wrong", "error", "not measured", "exact", "refused"]
    line = min(lines, key=lambda line: order.index(line[0]))
    if line[0] == "exact":
        line = joined([each for each in lines if each[0] == "exact"])
        if "far" in line[3] and re.search(IS_SCALED, complete):
            line[3]["past"] = line[3]["far"]
    return line


def joined(lines):
    """A line for all stacks of a model: the worst of each thing that was compared in any."""
    worst = {}
    for *_, errors in lines:
        worst |= {kind: max(error, worst.get(kind, error)) for kind, error in errors.items()}
    return "exact", max(line[1] for line in lines), "", worst


# They rotate other pairs in long texts.
LONG = {"phi3", "phi4_multimodal"}
# They have a scaling of their own only, or do not say how many positions they have.
UNSCALED = {"phimoe", "recurrent_gemma"}
IS_SCALED = r'"rope_type": "(yarn|llama3|linear|dynamic|longrope)"'


def same(found, other):
    """Whether two checkpoints are read alike; one may say why it has no output layer."""
    config = found.config
    if config.output is None:
        config = dataclasses.replace(config, output=other.config.output)
    # Hybrids that list their layers say nothing of them without the list.
    are_layers_same = not found.layers or found.layers == other.layers
    return are_layers_same and found.bias == other.bias and config == other.config


def loaded(folder, stack, length):
    """What `load_embedder` returns; a type with one stack is asked for no other."""
    try:
        return te.pretrained.load_embedder(folder, stack=stack, length=int(length))
    except ValueError as error:
        if "stack: wanted None" not in str(error):
            raise
    return te.pretrained.load_embedder(folder, length=int(length))


def of_one(folder, stack, inputs, model):
    """A line for one stack."""
    try:
        found = loaded(folder, stack, LENGTH)
        sides = {"encoder", "decoder"} - {stack} if stack else ()
        if any(re.search(rf"\b{side}\b", name) for side in sides for name in found.names.values()):
            raise ValueError(f"it has no {stack} that is known")
    except ValueError as error:
        return "refused", None, str(error).replace(folder, ""), {}
    except Exception as error:
        return "error", None, f"{error!r:.200}", {}
    try:
        return "exact", *compared(folder, stack, inputs, model, found)
    except NotSweptError as error:
        return "not measured", None, str(error), {}
    except WrongError as error:
        return "wrong", None, str(error), {}


def check(is_right, words):
    if not is_right:
        raise WrongError(words)


def compared(folder, stack, inputs, model, found):
    """The worst ulps, no words, and the error of each thing that was compared."""
    config, table = found.config, np.asarray(found.params[TOKENS]["embeddings"])
    blocks, theirs = of_stack(inputs, stack, model, table)
    # Some models never pass token types on.
    several = [None] if config.num_token_types is None else [TYPES, np.zeros_like(TYPES)]
    apply = functools.partial(te.Embedder(config).apply, found.params, None, IDS)
    outputs = [np.asarray(apply(is_training=False, token_types=each)) for each in several]
    shape = outputs[0].shape
    check(shape == theirs.shape, f"shape {shape} for {theirs.shape}")
    worst = min(ulps(ours[IS_TOKEN], theirs[IS_TOKEN]) for ours in outputs)
    complete = loaded(f"{folder}/whole", stack, LENGTH)
    check(same(found, complete), "other defaults than the library's")
    check(
        worst <= (ULPS if config.embedding_width is None else WIDENED_ULPS),
        f"embeddings off by {worst:.3g} units in the last place",
    )
    turns = rotation_error(found, blocks, ROTATIONS, model, NEAR)
    if np.isnan(turns):
        raise NotSweptError("its rotation")
    check(turns <= SCORE, f"rotation off by {turns:.3g}")
    errors: dict = {"why": reasons_of(config)}
    if any(layer.rotary for layer in found.layers):
        errors["rotation"] = turns
        if any(layer and layer[0] == blocks for layer, *_ in FAR_ROTATIONS):
            long = loaded(folder, stack, FAR[-1] + 1)
            errors["far"] = rotation_error(long, blocks, FAR_ROTATIONS, model, [FAR])
            check(errors["far"] <= FAR_SCORE, f"rotation off by {errors['far']:.3g} at 100,000")
    words = "" if model.config.model_type in OWN_MASKS else mask_error(found, blocks)
    check(not words, words)
    if complete.config.output is not None and (error := head_error(complete)) is not None:
        errors["head"] = error
        check(error <= LOGIT, f"logits of the last hidden state off by {error:.3g}")
    return worst, "", errors


def head_error(found):
    """The worst difference of logits of the library's last hidden state, as a share of the largest;
    None: it has no logits."""
    width = found.params[TOKENS]["embeddings"].shape[-1]
    for states, theirs in HEADS:
        is_ours = theirs.shape == (*IDS.shape, found.config.vocab_size)
        if is_ours and states.shape == (*IDS.shape, width):
            output = te.Embedder(found.config).output(found.params)
            ours, theirs = np.asarray(te.linear_logits(states, output))[IS_TOKEN], theirs[IS_TOKEN]  # noqa: PLW2901
            return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    return None


def reasons_of(config):
    """Why the last bits of embeddings may differ from the library's."""
    parts = {
        "norm": config.layer_norm_eps,
        "sinusoids": isinstance(config.scheme, te.Sinusoidal),
        "linear layer": config.embedding_width,
        "factor": config.scale != 1,
    }
    return [name for name, is_there in parts.items() if is_there]


def both_forms(model_type):
    """A line for each form of a type; for the first alone, if there is nothing to compare."""
    lines = {}
    for form in ("odd", "bare"):
        try:
            line = compare(model_type, is_odd=form == "odd")
        except Exception as error:
            why = "" if isinstance(error, NotSweptError) else f"{type(error).__name__}: "
            line = ("not built", None, f"{why}{error!s:.150}", {})
        lines[form] = line
        if line[0] not in ("exact", "wrong", "error"):
            break
    return lines


def outcome(lines):
    """One word for a type: the worst of its two forms, but a default may be refused."""
    words = [line[0] for line in lines.values()]
    for word in ("wrong", "error"):
        if word in words:
            return word
    return words[0]


def page_of(table, page):
    """The page of the documentation, with the numbers and lists of this sweep."""
    types = collections.defaultdict(list)
    for model_type, lines in sorted(table.items()):
        types[outcome(lines)].append(model_type)
    rows = {name: row_of(name, table[name]) for name in types["exact"]}
    with_output = sum(" output layer," in row for row in rows.values())
    used = [rows.pop(name) for name in MOST_USED.split()]
    reasons = {
        name: reason_of(next(line[2] for line in table[name].values() if line[2]))
        for name in types["refused"]
    }
    said = [f"| `{name}` | {reason} |" for name, reason in reasons.items() if reason]
    names_of = lambda names: ", ".join(f"`{name}`" for name in names) + "."
    written = {
        r"(transformers )[\d.]+(\.\n)": transformers.__version__,
        r"(transformers has )\d+( model types)": len(table),
        r"(\n)\d+( types agree)": len(types["exact"]),
        r"(The package refuses )\d+( types)": len(reasons),
        r"(Another )\d+( types load)": len(types["not measured"]),
        r"(The )\d+( that are used most)": len(used),
        r"(used most\n.*?\| output layer \|\n[-|]+\n).*?(\n\n)": "\n".join(used),
        r"(The others\n.*?\| output layer \|\n[-|]+\n).*?(\n\n)": "\n".join(rows.values()),
        r"(\| reason \|\n[-|]+\n).*?(\n\n)": "\n".join(said),
        r"(is not known\n\n).*?(\n)": names_of(name for name in reasons if not reasons[name]),
        r"(Not measured\n\n).*?(\n)": names_of(types["not measured"]),
        r"(- \*output layer\* \()\d+( types)": with_output,
    }
    for pattern, value in written.items():
        replace = lambda found, value=value: f"{found[1]}{value}{found[2]}"
        page, count = re.subn(pattern, replace, page, flags=re.DOTALL)
        assert count == 1, pattern
    return page


def row_of(name, lines):
    """A type's line of the table: what was compared, and the worst of it in both forms."""
    lines = [line for line in lines.values() if line[0] == "exact"]
    errors = [line[3] for line in lines]

    def worst(*kinds):
        values = [each[kind] for each in errors for kind in kinds if kind in each]
        return f"{max(values):.1g}" if values else ""

    compared = ["output layer"] * ("head" in errors[0])
    if rotation := next((kind for kind in ROTATED if kind in errors[0]), ""):
        compared.append(ROTATED[rotation])
    ulps = max(line[1] for line in lines)
    why = f" ({', '.join(errors[0]['why'])})" if ulps and errors[0]["why"] else ""
    forms = ["saved", *["defaults"] * (len(lines) - 1)]
    cells = [f"`{name}`", ", ".join([*compared, "input"]), ", ".join(forms), f"{ulps:g}{why}"]
    cells += [worst("far") or worst("rotation"), worst("head")]
    return f"| {' | '.join(cells)} |"


def reason_of(message):
    """What a refusal says, without the file's name; nothing for an unknown type."""
    if message.startswith("model_type: wanted "):
        return ""
    message = re.sub(r"^(settings and )?/config.json, for a model \w+: ", "", message)
    message = re.sub(
        r"^wanted only entries .* got (\w+): .*", r"it has \1, which is not read", message
    )
    message = re.sub(r"^/\S+: (wanted (?!the tensors).*, got )?", "", message).replace("|", "/")
    return textwrap.shorten(message, 110, placeholder=" ...")


def main():
    """Prints the counts, and each type that is not refused or built."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    types = args.types or sorted(configuration_auto.CONFIG_MAPPING_NAMES)
    table = {model_type: both_forms(model_type) for model_type in tqdm(types, mininterval=5)}
    if args.page:
        PAGE.write_text(page_of(table, PAGE.read_text()))
    for model_type, lines in table.items():
        if args.types or outcome(lines) not in ("not built", "refused", "exact"):
            print(model_type, json.dumps(lines))
    print(collections.Counter(map(outcome, table.values())))


if __name__ == "__main__":
    main()
