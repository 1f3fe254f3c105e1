"""Says which tokens attend to which, by the rule of a mask, in each of its forms."""
