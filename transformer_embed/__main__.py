"""`python -m transformer_embed`: the command line."""

from transformer_embed.cli.main import run

run()
