"""Token lookup, dropout, the output layer and its losses, as pure functions."""
