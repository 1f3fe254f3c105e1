"""Printing what is known of a model type."""

from transformer_embed import pretrained

# Fields that are not in the printed list of fields: `name` and `no_effect` have headings, and the
# list of entries shows what the other fields say.
PRINTED_SEPARATELY = ("name", "entries", "unread", "no_effect", "aliases")


def print_model_type(model_type: pretrained.ModelType) -> None:
    """Prints the fields that differ from their defaults, and the entries that the type reads."""
    print(model_type.name)
    defaults = pretrained.ModelType()
    for field in model_type._fields:
        value = getattr(model_type, field)
        if field not in PRINTED_SEPARATELY and value != getattr(defaults, field):
            print(f"  {field}: {_as_text(value)}")
    print("entries of config.json that are read, with their defaults")
    for entry, names in model_type.names_of_entries().items():
        other_names = ", ".join(name for name in names if name != entry)
        text = f"  {entry} (or {other_names})" if other_names else f"  {entry}"
        default = model_type.default(entry)
        if default is not None:
            text += f": {default!r}"
        print(text)
    if model_type.no_effect:
        print(f"entries that change nothing\n  {_as_text(model_type.no_effect)}")


def _as_text(value: object) -> str:
    """Returns a field's value as text, without Python's quotes and brackets."""
    if isinstance(value, tuple):
        return ", ".join(map(_as_text, value)) or "not known"
    return str(value)
