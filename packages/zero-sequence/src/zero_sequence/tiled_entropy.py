"""Cross entropy of one tile of logits (tokens, classes), and its gradient, in one buffer beside the logits. ``terms``
are always the terms of the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EntropyTerms:
    """The terms of the loss of a token; see `losses_of`.

    ``smoothing``: between 0 and 1. ``z``: factor of the squared logarithm of the sum of exponentials. ``weight``: of
    each class, 1-D; None: all alike. Labels of ``ignore_index`` count nothing.
    """

    ignore_index: int = -100
    smoothing: float = 0.0
    z: float = 0.0
    weight: torch.Tensor | None = None

    def counts(self, labels: torch.Tensor) -> torch.Tensor:
        """Return how much each of ``labels`` counts in a mean, in their shape: the weight of its class, 0 for ignored
        labels; without weights booleans, True for labels that are not ignored."""
        valid = labels != self.ignore_index
        if self.weight is None:
            return valid
        return torch.where(valid, self.weight[labels.where(valid, 0)], 0)


@dataclass
class _Exponentials:
    """The exponentials of a tile's logits, and the sums over classes that the loss needs.

    ``values``: exp(logits - the row's maximum), (tokens, classes). Per token: their ``sums``, the ``log_sums`` of
    exp(logits), and the terms of the loss that are linear in the logits, ``picked``: the label's logit, and
    ``smoothed``: the classes' weighted sum, None without label smoothing.
    """

    values: torch.Tensor
    sums: torch.Tensor
    log_sums: torch.Tensor
    picked: torch.Tensor
    smoothed: torch.Tensor | None


def loss_dtype(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a loss of ``logits`` is computed: float32, or theirs if that is wider."""
    return torch.promote_types(logits.dtype, torch.float32)


def losses_of(logits: torch.Tensor, labels: torch.Tensor, terms: EntropyTerms) -> torch.Tensor:
    """Return the loss of each token, 0 for ignored ones, in the `loss_dtype`.

    With p = softmax(logits), y the label, C classes of weights w and Z the sum of exp(logits), it is
    -(1 - smoothing) w_y log p_y - (smoothing / C) sum_c w_c log p_c + z log(Z)^2: torch's cross entropy with label
    smoothing, and the z-loss of PaLM (arXiv 2204.02311, section 5). ``logits``: (tokens, classes), not changed.
    """
    valid = labels != terms.ignore_index
    target = labels.where(valid, 0)
    found = _exponentials(logits, target, terms)
    of_label, of_classes, weight_sum = _label_and_class_factors(target, terms, logits)
    loss = of_label * (found.log_sums - found.picked)
    if found.smoothed is not None:
        loss = loss + of_classes * (weight_sum * found.log_sums - found.smoothed)
    if terms.z:
        loss = loss + terms.z * found.log_sums.square()
    return loss.where(valid, 0)


def gradient_of_losses(
    logits: torch.Tensor, labels: torch.Tensor, terms: EntropyTerms, gradient: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of ``logits``, a new tensor (tokens, classes) in the `loss_dtype`, given ``gradient``
    (tokens), that of each token's loss, which `losses_of` returned for the same ``labels`` and ``terms``."""
    valid = labels != terms.ignore_index
    target = labels.where(valid, 0)
    found = _exponentials(logits, target, terms)
    of_label, of_classes, weight_sum = _label_and_class_factors(target, terms, logits)
    gradient = gradient.to(found.values.dtype).where(valid, 0)
    of_log_sum = of_label + of_classes * weight_sum + 2 * terms.z * found.log_sums
    result = found.values.mul_((gradient * of_log_sum / found.sums)[:, None].where(valid[:, None], 0))
    result.scatter_add_(1, target[:, None], -(gradient * of_label)[:, None])
    if terms.smoothing:
        weights = _weights(terms, result)
        if weights is None:
            result.sub_((gradient * of_classes)[:, None])
        else:
            result.addr_(gradient * of_classes, weights, alpha=-1)
    return result


def _exponentials(logits: torch.Tensor, target: torch.Tensor, terms: EntropyTerms) -> _Exponentials:
    """Return the exponentials of the logits and the sums over classes that the loss needs. ``target``: each token's
    class (tokens). The exponentials are the one new buffer of the logits' size."""
    values = logits.detach().to(loss_dtype(logits), copy=True)
    picked = values.gather(1, target[:, None]).squeeze(1)
    smoothed = None
    if terms.smoothing:
        weights = _weights(terms, values)
        smoothed = values.sum(1) if weights is None else values @ weights
    largest = values.amax(1, keepdim=True) if values.size(1) else values.sum(1, keepdim=True)
    values.sub_(largest).exp_()
    sums = values.sum(1)
    return _Exponentials(values, sums, largest.squeeze(1) + sums.log(), picked, smoothed)


def _label_and_class_factors(
    target: torch.Tensor, terms: EntropyTerms, logits: torch.Tensor
) -> tuple[torch.Tensor | float, float, torch.Tensor | int]:
    """Return (factor of each token's own label in the loss (tokens), factor of every class by label smoothing, sum of
    the classes' weights). ``target``: each token's class."""
    kept, classes = 1 - terms.smoothing, logits.size(1)
    of_classes = terms.smoothing / classes if classes else 0.0
    weights = _weights(terms, logits)
    if weights is None:
        return torch.full(target.shape, kept, dtype=loss_dtype(logits), device=logits.device), of_classes, classes
    return kept * weights[target], of_classes, weights.sum()


def _weights(terms: EntropyTerms, like: torch.Tensor) -> torch.Tensor | None:
    """Return the classes' weights in the `loss_dtype` of ``like``, the logits; None if all are 1."""
    return None if terms.weight is None else terms.weight.to(loss_dtype(like))
