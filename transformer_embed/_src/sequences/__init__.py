"""Says where the tokens of a batch are: positions, segments, order, and the slots of a cache."""
