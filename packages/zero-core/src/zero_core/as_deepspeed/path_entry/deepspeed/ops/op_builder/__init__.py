"""What is built: nothing."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "AsyncIOBuilder": "zero_core.as_deepspeed.aio:AsyncIOBuilder",
}
__getattr__, __dir__ = names(__name__, _FOUND)
