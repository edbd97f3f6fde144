"""The names of DeepSpeed, answered by zero-deepspeed; its `names.py` is the table of them."""

from zero_deepspeed import VERSION
from zero_deepspeed.answering import answer

__version__ = VERSION
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = "zero-deepspeed"
__getattr__, __dir__ = answer(__name__)
