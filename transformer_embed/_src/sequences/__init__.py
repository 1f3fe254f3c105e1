"""Where the tokens of a batch stand: positions, segments, order, and the slots of a cache."""
