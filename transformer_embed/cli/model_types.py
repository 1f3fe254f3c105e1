"""The row of a model type, printed."""

from transformer_embed import pretrained

# Fields that are printed apart from the others.
APART = ("name", "entries", "unread", "no_effect", "aliases")


def print_model_type(model_type: pretrained.ModelType) -> None:
    """Prints all that is known of a model type."""
    print(model_type.name)
    defaults = pretrained.ModelType()
    for field in model_type._fields:
        value = getattr(model_type, field)
        if field not in APART and value != getattr(defaults, field):
            print(f"  {field}: {_words(value)}")
    print("entries of config.json that are read, with their defaults")
    for entry, names in model_type.names_of_entries().items():
        others = ", ".join(name for name in names if name != entry)
        also = f" (or {others})" if others else ""
        default = model_type.default(entry)
        print(f"  {entry}{also}" + ("" if default is None else f": {default!r}"))
    if model_type.no_effect:
        print(f"entries that change nothing\n  {_words(model_type.no_effect)}")


def _words(value: object) -> str:
    """Returns a value of a field, without Python's quotes."""
    if isinstance(value, tuple):
        return ", ".join(map(_words, value)) or "not known"
    return str(value)
