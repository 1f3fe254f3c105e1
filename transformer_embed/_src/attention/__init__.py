"""Which tokens attend to which: token positions, masks and the arguments of kernels."""
