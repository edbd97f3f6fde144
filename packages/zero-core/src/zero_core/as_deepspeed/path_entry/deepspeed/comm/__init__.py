"""torch.distributed by DeepSpeed's names."""

from deepspeed.comm.comm import _FOUND, _REFUSED
from zero_core.as_deepspeed.naming import names

__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
