"""`python -m gpu`."""

from __future__ import annotations

from .suite import main

raise SystemExit(main())
