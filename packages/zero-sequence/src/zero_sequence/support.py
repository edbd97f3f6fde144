"""Which models of Transformers can be spread over sequence shards."""

from __future__ import annotations

from typing import Any

from torch import nn

from .errors import SequenceError

_ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_ONE_ANSWER = ("ForSequenceClassification", "ForMultipleChoice", "ForQuestionAnswering", "ForNextSentencePrediction")


def check_configuration(model: nn.Module, attention: str) -> None:
    """Raise `SequenceError`, which says why, for a model of Transformers that cannot be spread over sequence shards, as
    its tokens affect each other elsewhere than in attention.

    These are models with a recurrent state or a convolution, encoder-decoders, models of images or sound beside text,
    and those whose head needs one token of the full sequence. ``attention``: the name of the model's attention.
    """
    name, config = type(model).__name__, _config(model)
    if getattr(model, "_is_stateful", False):
        raise SequenceError(f"{name} carries a state along the sequence: expected a model of attention only")
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - _ATTENTIONS)
    if kinds:
        raise SequenceError(
            f"{name}: layers of type {', '.join(kinds)} carry a state along the sequence: expected attention only"
        )
    if "flash" in attention and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise SequenceError(f'{name}: chunked attention is not in {attention}: expected attn_implementation="sdpa"')
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise SequenceError(f"{name}: cross-attention is not spread over ranks: expected a decoder or an encoder")
    if config.get_text_config() is not config:
        raise SequenceError(f"{name}: expected a model of text alone, got one whose configuration has further parts")
    if any(name.endswith(ending) for ending in _ONE_ANSWER):
        raise SequenceError(
            f"{name} needs one token of the full sequence, which one rank has: expected an output per token"
        )
    if getattr(config, "num_attention_heads", None) is None:
        raise SequenceError(f"{name}: expected a configuration with num_attention_heads, got {type(config).__name__}")


def _config(model: nn.Module) -> Any:
    """Return the model's Transformers configuration."""
    return model.config
