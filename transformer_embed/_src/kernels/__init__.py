"""Translates the rule of a mask into the arguments of fused kernels."""
