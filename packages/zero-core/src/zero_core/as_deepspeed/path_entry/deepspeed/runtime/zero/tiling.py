"""Large linear layers."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "TiledLinear": "zero_partition:TiledLinear",
}
_REFUSED = {
    "TiledLinearReturnBias": "use TiledLinear and add the bias",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
