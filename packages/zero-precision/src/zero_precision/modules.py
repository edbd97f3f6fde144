"""Select the parameters that stay in float32 and those to gather in the autocast dtype; cast inputs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zero_precision.names import PrecisionError
from zero_precision.policy import KeepPattern, PrecisionPolicy

T = TypeVar("T")

AUTOCAST_MODULES: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Classes of modules whose own parameters torch autocast casts at every use; subclasses do not count."""


def keep_fp32(module: nn.Module, patterns: Iterable[KeepPattern], *, strict: bool = True) -> frozenset[str]:
    """Return the names of the floating parameters and buffers of ``module`` that ``patterns`` select to stay in
    float32.

    A string matches complete dotted parts anywhere in a name, and `*` any characters: `norm` selects
    `layers.0.norm.weight` but not `layernorm.weight`, which `*norm` selects. A module class selects everything inside
    its instances. If one name of a tied tensor is selected, all its names are. With `strict` a pattern that selects
    nothing raises `PrecisionError`, which suggests a similar name."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    names = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    kept: set[str] = set()
    for pattern in patterns:
        found = _select(module, names, pattern)
        if strict and not found:
            raise PrecisionError(_nothing_selected_message(names, pattern))
        kept |= found
    identities = {id(names[name]) for name in kept}
    return frozenset(name for name, tensor in names.items() if id(tensor) in identities)


def kept_in_fp32(module: nn.Module, policy: PrecisionPolicy) -> frozenset[str]:
    """Return the names of all parameters and buffers of `module` that stay in float32 under `policy`.

    `policy.keep_fp32` selects them and, with `policy.keep_declared_fp32`, the model's own declarations too. Empty when
    `policy.param_dtype` is float32 or float64. Raises `PrecisionError` for a pattern that selects nothing.
    """
    if policy.param_dtype.itemsize >= torch.float32.itemsize:
        return frozenset()
    declared = declared_keep_fp32(module, policy.param_dtype) if policy.keep_declared_fp32 else ()
    return keep_fp32(module, (*policy.keep_fp32, *declared))


def declared_keep_fp32(module: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the patterns for `keep_fp32` that Hugging Face models declare for themselves, sorted.

    `_keep_in_fp32_modules_strict` applies to bfloat16 and float16, `_keep_in_fp32_modules` to float16 only; for any
    other `dtype` the result is empty. A submodule's declarations apply inside it; those that select nothing are left
    out.
    """
    attributes = {
        torch.float16: ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"),
        torch.bfloat16: ("_keep_in_fp32_modules_strict",),
    }.get(dtype, ())
    found: set[str] = set()
    for prefix, child in module.named_modules():
        for attribute in attributes:
            for name in getattr(child, attribute, None) or ():
                found.update((f"{prefix}.{name}", f"{prefix}.*.{name}") if prefix else (name,))
    return tuple(sorted(pattern for pattern in found if keep_fp32(module, [pattern], strict=False)))


def autocast_dtypes(
    module: nn.Module, dtype: torch.dtype, *, eligible: Sequence[type[nn.Module]] | None = None
) -> dict[str, torch.dtype]:
    """Return for every floating parameter name the dtype to gather it in while torch autocast runs in `dtype`.

    Autocast casts the weights of matrix products at each use and autograd keeps those copies, so a sharded weight that
    is gathered in its own dtype would be in memory twice. The dtype is `dtype` for parameters owned directly by modules
    whose class is exactly one of `eligible` (None: linear layers and convolutions, `AUTOCAST_MODULES`). It is the
    parameter's own if another module shares it, and for float64, which autocast never casts. Values equal autocast's,
    as either cast rounds once. Raises `PrecisionError` for a `dtype` other than bfloat16 and float16."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise PrecisionError(f"autocast: expected bfloat16 or float16, got {dtype}")
    classes = frozenset(AUTOCAST_MODULES if eligible is None else eligible)
    refused: set[int] = set()
    accepted: set[int] = set()
    for child in module.modules():
        owned = {id(parameter) for parameter in child.parameters(recurse=False)}
        (accepted if type(child) in classes else refused).update(owned)
    return {
        name: dtype if id(p) in accepted - refused and p.dtype != torch.float64 else p.dtype
        for name, p in module.named_parameters(remove_duplicate=False)
        if p.is_floating_point()
    }


def cast_floating(tree: T, dtype: torch.dtype) -> T:
    """Return `tree` with every floating tensor in it cast to `dtype`; gradients flow through the cast.

    Tensors are found inside tuples, lists, dicts, named tuples and classes registered with torch's pytree. Integer,
    boolean and complex tensors and all other objects stay as they are.
    """

    def cast(leaf: Any) -> Any:
        """Return a floating tensor cast to `dtype`, anything else as it is."""
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, tree)  # type: ignore[no-any-return]


def _select(module: nn.Module, names: Iterable[str], pattern: KeepPattern) -> set[str]:
    """Return those of ``names`` that ``pattern`` selects in ``module``, by the rules of `keep_fp32`."""
    if isinstance(pattern, str):
        expression = re.compile(rf"(^|\.){'.*'.join(map(re.escape, pattern.split('*')))}($|\.)")
        return {name for name in names if expression.search(name)}
    prefixes = [prefix for prefix, child in module.named_modules(remove_duplicate=False) if isinstance(child, pattern)]
    return {name for name in names if any(not prefix or name.startswith(f"{prefix}.") for prefix in prefixes)}


def _nothing_selected_message(names: Iterable[str], pattern: KeepPattern) -> str:
    """Return the message of the error for a ``pattern`` that selects none of ``names``; it suggests the part of a name
    that is most like the pattern."""
    if not isinstance(pattern, str):
        return f"keep_fp32: the model has no module of class {pattern.__name__} with floating parameters"
    parts = sorted({part for name in names for part in name.split(".")})
    nearest = difflib.get_close_matches(pattern, parts, n=1, cutoff=0.4)
    hint = f"; the nearest part of a name is {nearest[0]!r}" if nearest else ""
    return f"keep_fp32: {pattern!r} selects no parameter or buffer of the model{hint} (`*` stands for any characters)"
