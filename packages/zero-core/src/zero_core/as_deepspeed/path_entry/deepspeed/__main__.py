"""`python -m deepspeed` is the command `deepspeed`."""

import sys

from zero_core.as_deepspeed.command import main

sys.exit(main())
