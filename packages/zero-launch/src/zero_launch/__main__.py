from __future__ import annotations

import sys

from zero_launch.cli import main

sys.exit(main())
