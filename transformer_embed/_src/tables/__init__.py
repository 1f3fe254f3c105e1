"""Tables that are trained by the rows of a batch or sharded over a mesh."""
