"""Names that the tests of the command line share."""

TABLE = "transformer_embedding/~/token_embedding/embeddings"
