"""`python -m deepspeed` is the command `deepspeed`."""

import sys

from zero_deepspeed.command import main

sys.exit(main())
