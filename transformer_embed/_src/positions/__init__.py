"""Positional encodings, rotations and biases, as pure functions."""
