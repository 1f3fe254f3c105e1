"""The values of the entries of config.json: of settings, of the file, and defaults."""

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
    """What a type reads of a config.json or of settings.

    Args:
        values: The checked values, by the entries' own names.
        unread: The other entries, as they are.
    """

    values: dict[str, Any]
    unread: dict[str, Any]


def entry_values(file: Published) -> dict[str, Any]:
    """Returns the values of all entries of the table; None means nothing.

    Raises:
        ValueError: an entry is wrong, missing, or refused; settings have an entry that is not read.

    Warns:
        UserWarning: config.json has entries that are not known.
    """
    row = file.row
    given = _given(file)
    values = {entry: row.default(entry) for entry in ENTRIES} | given
    # If config.json does not name this type, its defaults may be another model's.
    if file.model_type == row.name:
        may_be_missing = {*ENTRIES}
    else:
        may_be_missing = {name for name, entry in ENTRIES.items() if entry.is_harmless}
    missing = [
        names[0]
        for entry, names in row.names_of_entries().items()
        if values[entry] is REQUIRED
        or (entry not in given and entry not in may_be_missing and values[entry] is not None)
    ]
    if missing:
        names = ", ".join(sorted(missing))
        want = f"{names} of {row.name}, from settings or a config.json of that model_type"
        raise arguments.value_error(file.path, want, f"model_type {file.model_type!r} there")
    attention = attention_entries(
        row, {**file.entries, **file.settings}, has_defaults=file.model_type == row.name
    )
    return values | {"length": file.length, "side": file.side, "attention": attention}


def read(row: ModelType, entries: Options) -> ReadEntries:
    """Returns the checked values of a config.json or of settings, and what is not read."""
    unread = {**entries}
    values = {}
    for entry, names in row.names_of_entries().items():
        candidates = [unread.pop(name) for name in names if name in unread]
        if candidates:
            # The model's own name goes first; null does not hide another name's value.
            values[entry] = next((value for value in candidates if value is not None), None)
    if row.rotary:
        # The checks are of entries at the top level.
        values = rope.without_objects(row, values)
    known = row.names_of_entries()
    unread |= {entry: values.pop(entry) for entry in [*values] if entry not in known}
    for entry, value in values.items():
        if value is not None or entry in ENTRY_DEFAULTS:
            values[entry] = ENTRIES[entry].check(entry, value)
    return ReadEntries(values, unread)


def _given(file: Published) -> dict[str, Any]:
    """Returns the values that are given; settings go before config.json."""
    row = file.row
    in_file = call_with_named_errors(file.place, read, row, file.entries)
    settings = call_with_named_errors("settings", read, row, file.settings)
    unread = _without_nulls(file, in_file.unread, settings.unread)
    _check_unread(file, unread)
    values = settings.values
    for entry in rope.ENTRIES_OF_SCALINGS:
        if values.get(entry):
            values[entry] = rope.merged(in_file.values.get(entry) or {}, values[entry])
    # What settings say inside a scaling goes before what config.json says beside it.
    length = values.get("rope_scaling", {}).get(rope.ORIGINAL)
    if length is not None:
        values.setdefault(rope.ORIGINAL, length)
    return in_file.values | values


def _without_nulls(file: Published, unread: Options, unread_settings: Options) -> dict[str, Any]:
    """Returns the unread entries of config.json without those that settings say are null.

    Raises:
        ValueError: settings have an entry that is not read, and that config.json does not have.
    """
    row = file.row
    left = dict(unread)
    unknown = []
    for name, value in unread_settings.items():
        is_taken_away = value is None and left.pop(name, None) is not None
        is_of_attention = row.attention != "" and name in NAMES_OF_ATTENTION
        if not is_taken_away and not is_of_attention and not row.has_no_effect(name):
            unknown.append(name)
    if unknown:
        reads = ", ".join(names[0] for names in row.names_of_entries().values())
        want = f"entries that a model {row.name} reads ({reads})"
        raise arguments.value_error("settings", want, ", ".join(map(repr, unknown)))
    return left


def _check_unread(file: Published, unread: Options) -> None:
    """Raises a ValueError for entries that are refused, and warns of those that are not known."""
    status = {name: file.row.status(name, value) for name, value in unread.items()}
    refused = [name for name in unread if status[name] is EntryStatus.REFUSED]
    unknown = [name for name in unread if status[name] is EntryStatus.UNKNOWN]
    if refused:
        want = (
            "no entry that concerns the layer and is not read (if they mean nothing here: "
            f"settings={dict.fromkeys(refused)})"
        )
        got = ", ".join(f"{name}: {unread[name]!r}" for name in refused)
        raise arguments.value_error(file.place, want, got)
    if unknown:
        message = (
            f"{file.place}: entries that are not known were not read: {', '.join(unknown)} "
            f"(if they mean nothing here: settings={dict.fromkeys(unknown)})"
        )
        # The line that is shown is the caller's of load_embedder or load_config.
        warnings.warn(arguments.shown(message), stacklevel=6)
