"""The row of a model type, printed."""

from transformer_embed import pretrained

# Fields that are printed apart from the others.
APART = ("name", "entries", "unread", "no_effect", "aliases")


def print_row(row: pretrained.ModelType) -> None:
    """Prints all that is known of a model type."""
    print(row.name)
    defaults = pretrained.ModelType()
    for field in row._fields:
        value = getattr(row, field)
        if field not in APART and value != getattr(defaults, field):
            print(f"  {field}: {_words(value)}")
    print("entries of config.json that are read, with their defaults")
    for entry, names in row.names_of_entries().items():
        others = ", ".join(name for name in names if name != entry)
        also = f" (or {others})" if others else ""
        default = row.default(entry)
        print(f"  {entry}{also}" + ("" if default is None else f": {default!r}"))
    if row.no_effect:
        print(f"entries that change nothing\n  {_words(row.no_effect)}")


def _words(value: object) -> str:
    """Returns a value of a field, without Python's quotes."""
    if isinstance(value, tuple):
        return ", ".join(map(_words, value)) or "not known"
    return str(value)
