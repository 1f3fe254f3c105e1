"""Haiku modules, the position schemes that they take, and the compiled embedder."""
