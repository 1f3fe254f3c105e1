"""Training of a large table by the rows that a batch reads."""
