"""Translates a mask into the arguments of fused attention kernels."""
