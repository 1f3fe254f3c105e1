"""Writes class_entries.py and attention_defaults.py, from transformers' own configuration classes.

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

from transformer_embed._src.pretrained import attention, entries, known_entries, registry

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
    known = registry.MODEL_TYPES.keys() & configuration_auto.CONFIG_MAPPING_NAMES.keys()
    names = set(transformers.GenerationConfig().to_dict())
    for model_type in sorted(known):
        found = class_entries(model_type)
        # MPT and DBRX say some entries there.
        names |= found.keys() | found.get("attn_config", {}).keys()
    names -= {*entries.ENTRIES, *entries.ENTRY_OF_NAME, *known_entries.LOUD.split()}
    lines = textwrap.wrap(" ".join(sorted(names)), 92)
    quoted = [f'    "{line} "' for line in lines[:-1]] + [f'    "{lines[-1]}"']
    return TEXT.format(version=transformers.__version__, names="\n".join(quoted))


# Types that transformers reads as others.
RENAMED_TYPES = {"exaone4_5_text": "exaone4"}
DEFAULTS_FILE = FILE.with_name("attention_defaults.py")
DEFAULTS_TEXT = '''\
"""The defaults of the entries of attention, by the types whose attention is described.

tests/pretrained/make_class_entries.py writes this file from the configuration classes of
transformers {version}.
"""
# ruff: noqa: E501

ATTENTION_DEFAULTS = """\\
{lines}
"""
'''


def made_defaults():
    """Returns the text of the file of defaults."""
    lines = []
    for model_type, row in sorted(registry.MODEL_TYPES.items()):
        class_type = RENAMED_TYPES.get(model_type, model_type)
        if not row.attention or class_type not in configuration_auto.CONFIG_MAPPING_NAMES:
            continue
        # The fields of the class, because an object of the class has computed values instead.
        config_class = type(configuration_auto.CONFIG_MAPPING[class_type]().get_text_config())
        pairs = []
        for name, names in attention.NAMES_OF_ENTRIES.items():
            values = [getattr(config_class, alias, None) for alias in names]
            value = next((value for value in values if isinstance(value, int | float)), None)
            if value:
                pairs.append(f"{name}={json.dumps(value)}")
        lines.append(" ".join([model_type, *pairs]))
    return DEFAULTS_TEXT.format(version=transformers.__version__, lines="\n".join(lines))


if __name__ == "__main__":
    FILE.write_text(made())
    DEFAULTS_FILE.write_text(made_defaults())
