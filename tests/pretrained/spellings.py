"""Prints the entries that the transformers library reads under a name or in a form that
te.pretrained does not, or reads otherwise.

Run: python tests/pretrained/spellings.py
Needs: torch (a CPU build), transformers, and this package's dependencies.

Each entry of each known type is set under each of its names to a value other than the default.
Rotations are written in each form that files have, those of kinds of layers excepted.

Known: GPT-NeoX Japanese, whose class does not read the newer names of the base and the share; sizes
under a name that is not read (tensors say them).
"""

import contextlib
import copy
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import transformers
from transformers.models.auto import configuration_auto

from transformer_embed._src.pretrained import architectures, description, rope

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


def names(kind, config_class):
    """Each entry that is read, with its names: ours and those of the library's attribute map."""
    for entry, aliases in kind.names().items():
        found = set(aliases)
        for pair in config_class.attribute_map.items():
            found |= set(pair) if found.intersection(pair) else set()
        yield entry, found


def unread(model_type, config_class):
    """The names under which the library reads what we do not."""
    kind, base = architectures.by_model_type(model_type), config_class()
    for entry, found in names(kind, config_class):
        known = [vars(base).get(name) for name in found]
        value = other_than(next((each for each in known if each is not None), None))
        for name in sorted(found) if not entry.startswith("rope_") else ():
            # The library checks kinds, and sizes against each other.
            with contextlib.suppress(Exception):
                config = config_class.from_dict({"model_type": model_type, name: value})
                declared = [each for each in found if each in type(config).__dataclass_fields__]
                is_read = any(getattr(config, each) == value for each in declared)
                ours, _ = description.read(kind, {name: value})
                if is_read and ours.get(entry) != value:
                    yield f"{entry} as {name}"


def rotations(model_type, config_class):
    """The forms of a rotation that are read otherwise."""
    kind = architectures.by_model_type(model_type)
    is_declared = "rope_parameters" in config_class.__dataclass_fields__
    for form in FORMS if kind.rotary and is_declared and rope.LOCAL not in kind.entries else ():
        with contextlib.suppress(Exception):
            # The library writes into its own.
            config = config_class.from_dict({"model_type": model_type, **copy.deepcopy(form)})
            theirs = config.get_text_config().rope_parameters
            theirs = theirs.get(rope.FULL, theirs)
            found, left = description.read(kind, form)
            value = {entry: found.get(entry, kind.default(entry)) for entry in kind.names()}
            scaling = value["rope_scaling"] or {}
            ours = {
                "rope_theta": value["rope_theta"],
                "rope_type": scaling.get("rope_type", "default"),
                "factor": scaling.get("factor"),
                "beta_fast": scaling.get("beta_fast"),
            }
            if "partial_rotary_factor" in value:
                ours["partial_rotary_factor"] = value["partial_rotary_factor"]
            for name, mine in ours.items():
                other = theirs.get(name, 1.0 if name.startswith("partial") else None)
                is_refused = any(kind.concerns(entry, item) for entry, item in left.items())
                if mine != other and not is_refused:
                    yield f"{form}: {name} is {mine}, the library's {other}"


def main():
    """A line for each difference."""
    transformers.utils.logging.set_verbosity(50)
    known = {name for types in architectures.FAMILIES for name in types.split()}
    for model_type in sorted(known.intersection(configuration_auto.CONFIG_MAPPING_NAMES)):
        config_class = configuration_auto.CONFIG_MAPPING[model_type]
        for find in (unread, rotations):
            for difference in find(model_type, config_class):
                print(f"{model_type}: {difference}")


if __name__ == "__main__":
    main()
