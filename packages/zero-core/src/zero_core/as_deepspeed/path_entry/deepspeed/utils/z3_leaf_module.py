"""Modules that are gathered as a whole."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "get_z3_leaf_modules": "zero_core.as_deepspeed.leaf_modules:get_z3_leaf_modules",
    "set_z3_leaf_module": "zero_core.as_deepspeed.leaf_modules:set_z3_leaf_module",
    "set_z3_leaf_modules": "zero_core.as_deepspeed.leaf_modules:set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name": "zero_core.as_deepspeed.leaf_modules:set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix": "zero_core.as_deepspeed.leaf_modules:set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules": "zero_core.as_deepspeed.leaf_modules:unset_z3_leaf_modules",
    "z3_leaf_module": "zero_core.as_deepspeed.leaf_modules:z3_leaf_module",
}
_REFUSED = {
    "z3_leaf_parameter": "ask z3_leaf_module of the module that owns the parameter",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
