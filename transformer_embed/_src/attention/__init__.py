"""Which tokens attend to which: masks and the arguments of kernels."""
