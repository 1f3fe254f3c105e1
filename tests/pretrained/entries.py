"""Prints the entries of config.json that te.pretrained reads otherwise than transformers does.

Run: python tests/pretrained/entries.py [TYPE ...]
Needs: torch (a CPU build), transformers, and this package's dependencies. It takes ten minutes.

For each known type, `load_config` reads a config.json and what the library's class makes of it,
which must agree: the defaults with each entry left out in turn, with each entry under each of its
names, and with rotations in each form that files have. What is refused is not wrong, and no layers
say nothing.

Known: GPT-NeoX and GPT-NeoX Japanese, whose classes do not read newer names of the base and the
share.
"""

import collections
import contextlib
import copy
import sys

import transformers
from transformers.models.auto import configuration_auto

import transformer_embed as te
from transformer_embed._src.pretrained import architectures, rope
from transformer_embed._src.pretrained.architecture import STACKS

YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 30.0}
# Forms of a rotation with base 777 and a scaling; the last has half of the channels too.
FORMS = [
    {"rope_theta": 777.0, "rope_scaling": {"type": "yarn", **YARN}},
    {"rope_theta": 777.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "rope_type": "yarn", **YARN}},
    {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 777.0, "rope_type": "yarn", **YARN}},
    {"rope_theta": 777.0, "rope_parameters": {"type": "linear", "factor": 2.0}},
    {
        "rope_theta": 777.0,
        "rope_scaling": {"type": "linear", "factor": 3.0},
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 3.0, **YARN},
    },
    {"rope_theta": 777.0, "partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
]


def other_than(value):
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    return 2 * value + 8 if isinstance(value, int) else 0.25


def paths(entries):
    """The places of all entries, those inside of rotations too."""
    for name, value in entries.items():
        yield (name,)
        if isinstance(value, dict) and name in ("rope_parameters", *rope.LAYERS):
            yield from ((name, *path) for path in paths(value))


def without(entries, path):
    """A copy without the entry at a place."""
    left = inside = copy.deepcopy(entries)
    for name in path[:-1]:
        inside = inside[name]
    del inside[path[-1]]
    return left


def is_read(config_class, entries, names, value):
    """Whether a field of the class has a value under one of these names."""
    with contextlib.suppress(Exception):
        config = config_class.from_dict(copy.deepcopy(entries))
        declared = names.intersection(config_class.__dataclass_fields__)
        return any(getattr(config, name) == value for name in declared)
    return False


def variants(kind, config_class):
    """Names and entries of config.json of a type."""
    default = config_class().to_dict()
    # Sizes that are not each other's quotients, as those of the default may be.
    bases = [default]
    with contextlib.suppress(Exception):
        wide = default | {"hidden_size": 3 * default["hidden_size"]}
        bases.append(config_class.from_dict(wide).to_dict())
    for base in bases:
        yield "as it is", base
        for path in paths(base):
            if path != ("model_type",):
                yield f"without {': '.join(path)}", without(base, path)
    for aliases in kind.names().values():
        found = {*aliases}
        for pair in config_class.attribute_map.items():
            found |= {*pair} if found.intersection(pair) else set()
        value = next((default[name] for name in found if default.get(name) is not None), None)
        rest = {key: each for key, each in default.items() if key not in found}
        for name in sorted(found) if isinstance(value, bool | int | float) else ():
            said = rest | {name: other_than(value)}
            # Names that the library does not read are those of other files.
            if is_read(config_class, said, found, other_than(value)):
                yield f"{name} {other_than(value)}", said
    if kind.rotary and default.get("rope_parameters") and rope.LOCAL not in kind.entries:
        names = {"rope_scaling", "rope_parameters"}
        for entry in ("rope_theta", "partial_rotary_factor"):
            names |= {*kind.names().get(entry, ())}
        rest = {key: each for key, each in default.items() if key not in names}
        for form in FORMS:
            yield str(form), rest | form


def differences(model_type, config_class, counts):
    """What differs, in words."""
    kind = architectures.by_model_type(model_type)
    for words, entries in variants(kind, config_class):
        # The library writes into its own, and checks sizes against each other.
        with contextlib.suppress(Exception):
            whole = config_class.from_dict(copy.deepcopy(entries)).to_dict()
            for stack in STACKS if kind.has_stacks else (None,):
                found = [
                    loaded(each | {"model_type": model_type}, stack) for each in (entries, whole)
                ]
                outcome = "refused" if None in found else "the same"
                different = [] if None in found else [*apart(*found)]
                counts["other" if different else outcome] += 1
                yield from (f"{words}: {each}" for each in different)


def loaded(entries, stack):
    """What `load_config` returns; None if it refuses."""
    with contextlib.suppress(ValueError):
        return te.pretrained.load_config(entries, stack=stack, length=9)
    return None


def apart(found, other):
    """The fields that differ, and the first layer."""
    for name, mine in vars(found.config).items():
        if mine != getattr(other.config, name):
            yield f"{name} {mine}, the library's {getattr(other.config, name)}"
    if found.bias != other.bias:
        yield f"bias {found.bias}, the library's {other.bias}"
    if found.layers and len(found.layers) != len(other.layers):
        yield f"{len(found.layers)} layers, the library's {len(other.layers)}"
    pairs = [pair for pair in zip(found.layers, other.layers, strict=False) if pair[0] != pair[1]]
    for mine, theirs in pairs[:1]:
        yield f"{mine}, the library's {theirs}"


def main():
    """A line for each difference, and the counts."""
    transformers.utils.logging.set_verbosity(50)
    known = {name for types in architectures.FAMILIES for name in types.split()}
    types = sys.argv[1:] or sorted(known.intersection(configuration_auto.CONFIG_MAPPING_NAMES))
    counts = collections.Counter(types=len(types))
    for model_type in types:
        config_class = configuration_auto.CONFIG_MAPPING[model_type]
        for difference in differences(model_type, config_class, counts):
            print(f"{model_type}: {difference}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
