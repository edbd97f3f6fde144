"""The loss of a causal model of Transformers in tiles, inside the model's own forward, by its public hooks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from .errors import SequenceError
from .loss import shift_labels as shifted
from .tiled_budget import tokens_per_tile
from .tiled_loss import Head, tiled_cross_entropy


class TiledCausalLoss:
    """Makes ``model(..., labels=...)`` compute its loss in tiles until `remove`; the model's class stays as it is.

    ``model``: a causal model of Transformers, one that has ``get_decoder``, ``get_output_embeddings`` and
    ``logits_to_keep``. When it is called with ``labels`` (or ``shift_labels``), its logits are computed for the last
    position alone, and its ``loss_function`` computes the loss from the decoder's last hidden states with
    `tiled_cross_entropy`, where the tile is the largest that fits ``budget_bytes`` (`tokens_per_tile`). ``head``: maps
    hidden states to logits; by default the model's output embeddings. ``label_smoothing`` and ``z_loss`` are those of
    `tiled_cross_entropy`; ``num_items_in_batch`` is what Transformers' Trainer passes to every call.

    The first loss compares the head's logits with the model's own for the last position. Raises `SequenceError` where
    they differ, as with models that scale or soft-cap logits, which need a ``head`` that does so too, and for a model
    that lacks one of the names above.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget_bytes: int = 256 << 20,
        head: Head | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        given: Any = model
        lacking = [n for n in ("get_decoder", "get_output_embeddings", "loss_function") if not hasattr(given, n)]
        if not lacking and "logits_to_keep" not in inspect.signature(given.forward).parameters:
            lacking = ["the argument logits_to_keep"]
        decoder: Any = None if lacking else given.get_decoder()
        if lacking or decoder is given or (head is None and given.get_output_embeddings() is None):
            raise SequenceError(
                f"TiledCausalLoss: expected a causal model of Transformers with a decoder and a head, got "
                f"{type(model).__name__}{', which lacks ' + ', '.join(lacking) if lacking else ''}. Call "
                "tiled_cross_entropy on the hidden states instead."
            )
        self._model = given
        self._head = head
        self._budget_bytes = budget_bytes
        self._label_smoothing = label_smoothing
        self._z_loss = z_loss
        self._wanted = self._compared = False
        self._hidden: torch.Tensor | None = None
        self._loss_before = given.__dict__.get("_loss_function")
        given.loss_function = self._loss
        self._handles = [
            model.register_forward_pre_hook(self._keep_one_position, with_kwargs=True),
            decoder.register_forward_hook(self._take_hidden),
        ]

    def remove(self) -> None:
        """Have the model compute its loss from its full logits again, as before, and remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._hidden = [], None
        if self._loss_before is not None:
            self._model.loss_function = self._loss_before
        else:
            self._model.__dict__.pop("_loss_function", None)

    def _keep_one_position(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the model's call, changed so that it computes the logits of the last position alone,
        if the call has labels; else None, which leaves them. It is the model's forward pre-hook."""
        self._hidden = None
        self._wanted = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
        return (args, {**kwargs, "logits_to_keep": 1}) if self._wanted else None

    def _take_hidden(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Keep the decoder's last hidden states for `_loss`, if the model was called with labels. It is the decoder's
        forward hook."""
        if self._wanted:
            self._hidden = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_others: Any,
    ) -> torch.Tensor:
        """Return the loss of the model's last forward, a scalar. It is the model's ``loss_function``, with
        Transformers' arguments; ``logits`` are those of the last position, with which the first call compares the
        head's. Raises `SequenceError` if they differ, and if that forward was called without labels."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise SequenceError(
                f"{type(self._model).__name__} computes its loss in tiles (TiledCausalLoss), from the hidden states of "
                "its last forward: pass labels or shift_labels to that call by name, and take the loss once."
            )
        head = self._head if self._head is not None else self._model.get_output_embeddings()
        if not self._compared:
            self._check_head(head, hidden, logits)
            self._compared = True
        if shift_labels is None:
            shift_labels = shifted(labels, ignore_index)  # type: ignore[arg-type]
        return tiled_cross_entropy(
            hidden,
            head,
            shift_labels.to(hidden.device),
            tile_tokens=tokens_per_tile(self._budget_bytes, logits.size(-1), logits.dtype),
            ignore_index=ignore_index,
            label_smoothing=self._label_smoothing,
            z_loss=self._z_loss,
            num_items=num_items_in_batch,
        )

    def _check_head(self, head: Head, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Raise `SequenceError` if ``head`` gives other logits for the last position of ``hidden`` (batch, length,
        width) than ``logits`` (batch, 1, classes), the model's own. Do nothing if ``head`` has dropout that is on, as
        two calls then differ."""
        modules = head.modules() if isinstance(head, nn.Module) else ()
        if any(isinstance(module, nn.Dropout) and module.training and module.p for module in modules):
            return  # two calls differ
        with torch.no_grad():
            ours = head(hidden[:, -1:]).to(logits.dtype)
        if ours.shape != logits.shape or not torch.allclose(ours, logits, rtol=1e-6, atol=1e-6, equal_nan=True):
            raise SequenceError(
                f"TiledCausalLoss: the head's logits for the last position are not those of "
                f"{type(self._model).__name__}, which scales or caps them after its head, or changes the hidden states "
                "before. Give head=, a function of the hidden states that does the same."
            )
