"""Transformers' public interfaces for attention and masks, imported when a model of Transformers is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .errors import SequenceError

Attention = Callable[..., tuple[Any, Any]]
_FAMILY = "ulysses{}_{}"
# Transformers loads a kernel of the name for every attention whose name has "flash" in it, or looks like a hub's.
_KERNEL_NAMES = str.maketrans({"/": "_", ":": "_", "@": "_"})
_INSTALL = "pip install 'zero-sequence[transformers]'"


def pretrained_models(model: nn.Module) -> list[nn.Module]:
    """Return the models of Transformers in ``model``, itself included, outermost first.

    Raises ImportError without Transformers, and `SequenceError` if there is none.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise ImportError(f"sequence parallelism of a model needs Transformers: {_INSTALL}") from error
    found: list[nn.Module] = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not found:
        raise SequenceError(
            f"expected a model of Transformers, or one around it, got {type(model).__name__}. In a model of your own "
            "exchange the heads around its attention: zero_sequence.sequence_to_heads and heads_to_sequence"
        )
    return found


def attention_of(model: nn.Module) -> str:
    """Return the name of the attention that a model of Transformers uses, such as "sdpa"."""
    config: Any = model.config
    return str(config._attn_implementation)


def core_attention(name: str) -> Attention | None:
    """Return the attention registered as ``name``; None for "eager", which every model brings itself.

    Raises `SequenceError` for a name that is not registered.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name == "eager":
        return None
    if name not in ALL_ATTENTION_FUNCTIONS:
        known = ["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())]
        raise SequenceError(f"attention {name!r} is not registered with Transformers: expected one of {known}")
    found: Attention = ALL_ATTENTION_FUNCTIONS[name]
    return found


def core_mask(name: str) -> Callable[..., Any] | None:
    """Return the function registered with Transformers that makes the masks of the attention ``name``; None if there is
    none."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    found: Callable[..., Any] | None = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    return found


def eager_attention(module: nn.Module) -> Attention:
    """Return the function ``eager_attention_forward`` beside the class of ``module``, an attention module.

    It is looked up in the Python module that defines the class, then in those of its bases, in the order of the MRO.
    Raises `SequenceError` if none of them has it.
    """
    for cls in type(module).__mro__:
        found: Attention | None = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise SequenceError(
        f"{type(module).__name__}: expected a function eager_attention_forward beside the class; use "
        'attn_implementation="sdpa"'
    )


def register(core: str, attention: Attention, mask: Callable[..., Any] | None) -> str:
    """Register ``attention``, and ``mask`` if it is not None, with Transformers under a new name that contains
    ``core``, the name of the model's own attention; return the new name. Both stay registered."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    told = core.replace("flash", "fa").translate(_KERNEL_NAMES)
    names: Iterator[str] = (_FAMILY.format(number or "", told) for number in range(len(ALL_ATTENTION_FUNCTIONS) + 1))
    name = next(name for name in names if name not in ALL_ATTENTION_FUNCTIONS)
    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    return name


def register_as(name: str, attention: Attention, mask: Callable[..., Any] | None) -> None:
    """Register ``attention``, and ``mask`` if it is not None, with Transformers under ``name``, replacing those that
    have the name now."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)


def choose_attention(models: list[nn.Module], name: str) -> None:
    """Make ``models``, outermost first, use the attention ``name``.

    Raises `SequenceError` for the first that computes attention without looking it up.
    """
    for model in models:
        if attention_of(model) != name:
            model.set_attn_implementation(name)  # type: ignore[operator]
        if attention_of(model) != name:
            raise SequenceError(
                f"{type(model).__name__} does not look its attention up in Transformers' AttentionInterface, so its "
                "heads cannot be exchanged: expected a model that supports set_attn_implementation"
            )
