"""Which tokens attend to which: the rule of a mask, and its forms."""
