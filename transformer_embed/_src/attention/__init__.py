"""Says which tokens attend to which: by a rule, as an array of bools, and for tiles."""
