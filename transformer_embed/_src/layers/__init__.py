"""Haiku modules, and the compiled embedder."""
