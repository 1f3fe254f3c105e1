"""The value of each entry of config.json: from settings, from the file, or a default.

An entry has one name here, a key of `ENTRIES`, although files may have other names for it.
"""

import warnings
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.pretrained import rope
from transformer_embed._src.pretrained.attention import NAMES_OF_ATTENTION, attention_entries
from transformer_embed._src.pretrained.entries import ENTRIES, ENTRY_DEFAULTS, REQUIRED, Options
from transformer_embed._src.pretrained.files import call_with_named_errors
from transformer_embed._src.pretrained.model_type import EntryStatus, ModelType
from transformer_embed._src.pretrained.published import Published


class ReadEntries(NamedTuple):
    """What a model type reads of a config.json, or of settings.

    Args:
        values: The checked values of the entries that are read, by the names in `ENTRIES`.
        unread: The other entries, as they are, by the names that they have there.
    """

    values: dict[str, Any]
    unread: dict[str, Any]


def entry_values(published: Published) -> dict[str, Any]:
    """Returns the checked value of each entry in `ENTRIES`, by name, and three more values.

    Settings override config.json, and config.json overrides defaults. If an entry is left out and
    has no default, the value is None. The three more values are the "length" of the longest text,
    the "stack" that is read, and "attention", a dict of the entries that are about attention.

    Raises:
        ValueError: an entry is wrong, missing, or refused. Settings have an entry that is not read.

    Warns:
        UserWarning: config.json has entries that are not known.
    """
    model_type = published.model_type
    given = _given_values(published)
    defaults = {entry: model_type.default(entry) for entry in ENTRIES}
    values = defaults | given
    _check_not_missing(published, values, given)
    # If only settings name the model type, config.json may be of another type, which has other
    # defaults for its attention. So the defaults of attention are not used then.
    config_names_type = published.type_in_config == model_type.name
    entries = {**published.entries, **published.settings}
    attention = attention_entries(model_type, entries, has_defaults=config_names_type)
    return {**values, "length": published.length, "stack": published.stack, "attention": attention}


def _check_not_missing(published: Published, values: Options, given: Options) -> None:
    """Raises a ValueError if an entry is left out and its default may be wrong for this file.

    If config.json itself names the model type, the defaults of this type are right. If only
    settings name the type, config.json may be of another type, with other defaults. Then an entry
    may be left out only if it is harmless, that is, if it changes no embeddings, such as "dropout".

    Args:
        published: The files of the model, and what is known of its type.
        values: The value of each entry, from settings, from config.json, or the default.
        given: The values that are from settings or config.json.
    """
    model_type = published.model_type
    config_names_type = published.type_in_config == model_type.name
    missing = []
    # For each entry that the type reads, the names that it may have in a file.
    for entry, names in model_type.names_of_entries().items():
        if entry in given:
            continue
        default = values[entry]
        has_no_default = default is None
        default_is_right = config_names_type or ENTRIES[entry].is_harmless
        may_be_left_out = has_no_default or default_is_right
        if default is REQUIRED or not may_be_left_out:
            missing.append(names[0])
    if missing:
        listed = ", ".join(sorted(missing))
        want = f"{listed} of {model_type.name}, from settings or a config.json of that model_type"
        got = f"model_type {published.type_in_config!r} there"
        raise arguments.value_error(published.path, want, got)


def read_entries(model_type: ModelType, entries: Options) -> ReadEntries:
    """Checks the entries of a config.json, or of settings, that a model type reads.

    The entries that it does not read are returned apart, unchecked.
    """
    # For each entry, the names that it may have in a file, such as "hidden_size" and "n_embd".
    names_of_entries = model_type.names_of_entries()
    unread = {**entries}
    values = {}
    for entry, names in names_of_entries.items():
        values_of_names = [unread.pop(name) for name in names if name in unread]
        if values_of_names:
            # The first value that is not null is used. If all are null, the result is None.
            values[entry] = next((value for value in values_of_names if value is not None), None)
    if model_type.rotary:
        # The checks below are for entries at the top level of config.json. So each object that
        # describes a rotation, such as "rope_parameters", is first split into entries at the top
        # level. An entry inside the object that is not known gets a name such as
        # "rope_parameters: beta".
        values = rope.flatten_rotations(model_type, values)
    # The entries that were not known inside an object are not read.
    for entry in [*values]:
        if entry not in names_of_entries:
            unread[entry] = values.pop(entry)
    for entry, value in values.items():
        has_default = entry in ENTRY_DEFAULTS
        # Without a default, null says the same as leaving the entry out, so null is not checked.
        # With a default, null is checked, and the check refuses it.
        if value is not None or has_default:
            values[entry] = ENTRIES[entry].check(entry, value)
    return ReadEntries(values=values, unread=unread)


def _given_values(published: Published) -> dict[str, Any]:
    """Returns the values that settings or config.json have, without any defaults.

    If both have an entry, the value in settings is returned. Raises an error for some of the
    entries that the model type does not read, and warns of others (see `_check_unread`).
    """
    model_type = published.model_type
    # `read_entries` is called for the entries of config.json, and then for settings. An error names
    # the source of the wrong entry: config.json, or settings.
    in_file = call_with_named_errors(published.where, read_entries, model_type, published.entries)
    in_settings = call_with_named_errors("settings", read_entries, model_type, published.settings)
    unread = _unread_after_settings(published, in_file.unread, in_settings.unread)
    _check_unread(published, unread)
    values_of_settings = in_settings.values
    # The scaling of a rotation, such as "rope_scaling", is an object. Settings may have only some
    # of the entries of this object, and the other entries are taken from config.json.
    for entry in rope.ENTRIES_OF_SCALINGS:
        scaling_in_settings = values_of_settings.get(entry)
        if scaling_in_settings:
            scaling_in_file = in_file.values.get(entry) or {}
            values_of_settings[entry] = rope.merge_scalings(scaling_in_file, scaling_in_settings)
    # The trained length may be inside "rope_scaling", or beside it at the top level. If both have
    # it, the one at the top level is used. So if settings have it inside only, it is copied to the
    # top level, because config.json may have another length there.
    scaling_in_settings = values_of_settings.get("rope_scaling", {})
    trained_length = scaling_in_settings.get(rope.TRAINED_LENGTH)
    has_length_at_top_level = rope.TRAINED_LENGTH in values_of_settings
    if trained_length is not None and not has_length_at_top_level:
        values_of_settings[rope.TRAINED_LENGTH] = trained_length
    return in_file.values | values_of_settings


def _unread_after_settings(
    published: Published, unread: Options, unread_settings: Options
) -> dict[str, Any]:
    """Returns the unread entries of config.json, except entries that are None in settings.

    For example, settings {"alibi": None} remove the entry "alibi" of config.json.

    Args:
        published: The files of the model, and what is known of its type.
        unread: The entries of config.json that the model type does not read.
        unread_settings: The entries of settings that the model type does not read.

    Raises:
        ValueError: an entry of settings has no effect.
    """
    model_type = published.model_type
    left = dict(unread)
    wrong_names = []
    for name, value in unread_settings.items():
        if value is None and left.get(name) is not None:
            del left[name]
            continue
        # `attention_entries` reads entries of attention, if the attention of this type is known.
        is_read_as_attention = model_type.attention != "" and name in NAMES_OF_ATTENTION
        # An entry that is known to change nothing in models of this type is allowed.
        is_known_to_do_nothing = model_type.has_no_effect(name)
        if not is_read_as_attention and not is_known_to_do_nothing:
            wrong_names.append(name)
    if wrong_names:
        # The first of the names that each entry may have, such as "hidden_size".
        names_read = [names[0] for names in model_type.names_of_entries().values()]
        want = f"entries that a model {model_type.name} reads ({', '.join(names_read)})"
        raise arguments.value_error("settings", want, ", ".join(map(repr, wrong_names)))
    return left


def _check_unread(published: Published, unread: Options) -> None:
    """Raises a ValueError for entries that are refused, and warns of those that are not known.

    `unread` has the entries of config.json that the model type does not read. An entry is refused
    if it may change the input or the output layer.
    """
    refused = []
    unknown = []
    for name, value in unread.items():
        status = published.model_type.status(name, value)
        if status is EntryStatus.REFUSED:
            refused.append(name)
        elif status is EntryStatus.UNKNOWN:
            unknown.append(name)
    # Both messages show the settings that remove these entries of config.json. For example, the
    # settings {"alibi": None} remove the entry "alibi".
    if refused:
        want = (
            "only entries that can be read (to ignore the others, if they mean nothing here: "
            f"settings={dict.fromkeys(refused)})"
        )
        got = ", ".join(f"{name}: {unread[name]!r}" for name in refused)
        raise arguments.value_error(published.where, want, got)
    if unknown:
        message = (
            f"{published.where}: entries that are not known were not read: {', '.join(unknown)} "
            f"(if they mean nothing here: settings={dict.fromkeys(unknown)})"
        )
        # The warning shows the line that called load_embedder or load_config.
        warnings.warn(arguments.shown(message), stacklevel=6)
