"""File I/O."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "AsyncIOBuilder": "zero_core.as_deepspeed.aio:AsyncIOBuilder",
    "aio_handle": "zero_core.as_deepspeed.aio:aio_handle",
}
__getattr__, __dir__ = names(__name__, _FOUND)
