"""`python -m transformer_embed`."""

import sys

from transformer_embed.cli.main import main

sys.exit(main())
