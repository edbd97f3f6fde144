"""A Transformers model and a micro-batch for it, from its `config.json` alone, without weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch import nn


def model_and_batch(
    path: str, rows: int, length: int | None = None
) -> tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]:
    """Return a function that builds the model of the `config.json` at ``path``, and a micro-batch with labels for it.

    ``rows``: samples of the micro-batch; ``length``: tokens of each, None for models of images. The model's class is
    the first of the configuration's ``architectures``. Raises `PlanError` if the file describes no model that
    Transformers knows, if ``length`` does not go with the model, or if Transformers is not installed.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise PlanError(f"a model from its configuration needs {error.name}: pip install {error.name}") from error
    given = _read_config(path)
    try:
        config = transformers.AutoConfig.for_model(**given)
    except (TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"{path}: Transformers does not know such a model: {error}") from error
    names = given.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise PlanError(
            f'{path}: expected "architectures" to begin with a class of Transformers {transformers.__version__}, '
            f"got {names}"
        )

    def build() -> nn.Module:
        """Return a new model of the configuration, with initial weights."""
        model: nn.Module = kind(config)
        return model

    return build, _micro_batch(torch, path, config, rows, length)


def _read_config(path: str) -> dict[str, Any]:
    """Return the content of the `config.json` at ``path``. Raises `PlanError` unless it is a JSON object with a
    "model_type".
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise PlanError(f'{path}: expected the config.json of a Transformers model, with a "model_type"')
    return found


def _micro_batch(torch: Any, path: str, config: Any, rows: int, length: int | None) -> dict[str, torch.Tensor]:
    """Return the model's keyword arguments for a micro-batch: images or tokens, and labels.

    ``torch``: the module. ``path``: names the file in errors. ``config``: of Transformers. ``rows``, ``length``:
    samples, and tokens of each. Raises `PlanError` if ``length`` is given for images or missing for tokens.
    """
    size = getattr(config, "image_size", None)
    if size is not None:
        if length is not None:
            raise PlanError(f"{path} describes a model of images: expected a number of samples, not {rows}x{length}")
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.empty(rows, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.long)}
    if length is None:
        raise PlanError(f"{path} describes a model of text: expected SAMPLESxTOKENS, such as {rows}x4096, got {rows}")
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}
