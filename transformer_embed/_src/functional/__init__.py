"""Pure functions on arrays: no Haiku, no optimizer."""
