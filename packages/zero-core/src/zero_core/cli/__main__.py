"""`python -m zero_core.cli`, where scripts are not on the path."""

from __future__ import annotations

import sys

from .entry import main

sys.exit(main())
