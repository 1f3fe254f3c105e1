"""Says what belongs to a table besides the array: the order of rows, and what may replace it."""
