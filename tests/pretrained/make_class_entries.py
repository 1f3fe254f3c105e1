"""Writes class_entries.py: the entries of config.json that transformers' own classes have.

Run: python tests/pretrained/make_class_entries.py
Needs: transformers (its configuration classes alone, so no torch).

An entry that the class of a known model type has, and that no type reads, concerns other parts of
the model: attention, feed-forward layers, routers, generation. An entry that another class has may
concern anything.
"""

import json
import pathlib
import textwrap

import transformers
from transformers.models.auto import configuration_auto

from transformer_embed._src.pretrained import entries, known_entries, registry

FILE = pathlib.Path(entries.__file__).with_name("class_entries.py")
TEXT = '''\
"""Entries of config.json that concern neither the input nor the output layer of any known model.

tests/pretrained/make_class_entries.py writes this file from the configuration classes of
transformers {version}.
"""

CLASS_ENTRIES = (
{names}
)
'''


def class_entries(model_type):
    """Returns what a model type's configuration says by default, as config.json has it."""
    config = configuration_auto.CONFIG_MAPPING[model_type]()
    return json.loads(config.to_json_string(use_diff=False))


def made():
    """Returns the text of the file."""
    known = registry.ROWS.keys() & configuration_auto.CONFIG_MAPPING_NAMES.keys()
    names = set(transformers.GenerationConfig().to_dict())
    for model_type in sorted(known):
        found = class_entries(model_type)
        # MPT and DBRX say some entries there.
        names |= found.keys() | found.get("attn_config", {}).keys()
    names -= {*entries.ENTRIES, *entries.ENTRY_OF_ALIAS, *known_entries.LOUD.split()}
    lines = textwrap.wrap(" ".join(sorted(names)), 92)
    quoted = [f'    "{line} "' for line in lines[:-1]] + [f'    "{lines[-1]}"']
    return TEXT.format(version=transformers.__version__, names="\n".join(quoted))


if __name__ == "__main__":
    FILE.write_text(made())
