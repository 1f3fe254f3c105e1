"""The public names, enumerated from `__all__`."""

import types

import transformer_embed as te

PARTS = sorted(name for name in te.__all__ if isinstance(getattr(te, name), types.ModuleType))
TOP = sorted(set(te.__all__) - set(PARTS))
EVERY = [*TOP, *(f"{part}.{name}" for part in PARTS for name in getattr(te, part).__all__)]
