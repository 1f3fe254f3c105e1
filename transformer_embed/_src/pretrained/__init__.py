"""Both ends of published models: what their files say, and how it is loaded and saved."""
