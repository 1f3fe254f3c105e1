"""The rule of a mask in the arguments of fused kernels, each of which has words of its own."""
