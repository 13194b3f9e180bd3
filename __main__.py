"""`python -m tokenbus`: the `tokenbus` command."""

import sys

from .core.cli import main

sys.exit(main())
