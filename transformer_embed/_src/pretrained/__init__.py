"""Trained layers: what files of published models say, how it is loaded, resized and saved."""
