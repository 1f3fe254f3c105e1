"""What belongs to a table besides its array: the order of its rows, and what may replace it."""
