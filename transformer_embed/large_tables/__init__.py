"""Training of large tables by rows, and tables sharded over a mesh."""
