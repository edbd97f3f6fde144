"""Fill in "auto" by the rules of Transformers and Accelerate, for scripts that use neither."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from zero_settings._rules import hidden_size
from zero_settings._source import read
from zero_settings.errors import ConfigError, Problem, show

_AUTO = "auto"


def resolve_auto(
    config: Any,
    *,
    model: Any = None,
    world_size: int = 1,
    micro_batch_size: int | None = None,
    accumulation_steps: int = 1,
    learning_rate: float | None = None,
    betas: Sequence[float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    max_grad_norm: float = 1.0,
    warmup_steps: int | None = None,
    total_steps: int | None = None,
    precision: Literal["fp32", "fp16", "bf16"] = "fp32",
    stage: int = 2,
) -> dict[str, Any]:
    """Return a copy of ``config`` (a dict, or the path of a JSON file) with every "auto" replaced by a value.

    ``model``: the model, its Hugging Face config, or the hidden size h; ``reduce_bucket_size`` is h², the prefetch
    bucket int(0.9 h²), the persistence threshold 10 h (elements). The other arguments are the values of the keys that
    they name; None leaves an "auto" of that key unanswered. ``warmup_steps`` becomes at least 1; a warmup rises from 0
    to ``learning_rate``; ``train_batch_size`` is micro x accumulation x ``world_size``. Offload is switched off.
    ``precision`` and ``stage`` fill `fp16.enabled`, `bf16.enabled` and `zero_optimization.stage`. A value that is not
    "auto" stays, and ``train_batch_size`` follows from the values in the file. Raises `ConfigError` with every "auto"
    for which no argument was given, and for a file that cannot be read.
    """
    filled: dict[str, Any] = copy.deepcopy(read(config))
    answers: dict[str, tuple[Any, str]] = {
        "train_micro_batch_size_per_gpu": (micro_batch_size, "micro_batch_size"),
        "gradient_accumulation_steps": (accumulation_steps, "accumulation_steps"),
        "gradient_clipping": (max_grad_norm, "max_grad_norm"),
        "zero_optimization.stage": (stage, "stage"),
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": (False, ""),
        "optimizer.params.lr": (learning_rate, "learning_rate"),
        "optimizer.params.betas": (None if betas is None else list(betas), "betas"),
        "optimizer.params.eps": (eps, "eps"),
        "optimizer.params.weight_decay": (weight_decay, "weight_decay"),
        "scheduler.params.warmup_min_lr": (0, ""),
        "scheduler.params.warmup_max_lr": (learning_rate, "learning_rate"),
        "scheduler.params.warmup_num_steps": (None if warmup_steps is None else max(1, warmup_steps), "warmup_steps"),
        "scheduler.params.total_num_steps": (total_steps, "total_steps"),
        "fp16.enabled": (precision == "fp16", "precision"),
        "bf16.enabled": (precision == "bf16", "precision"),
        "bfloat16.enabled": (precision == "bf16", "precision"),
        **{f"zero_optimization.{s}.device": ("none", "") for s in ("offload_param", "offload_optimizer")},
        **_bucket_sizes(hidden_size(model)),
    }
    nowhere = {f"zero_optimization.{s}.nvme_path" for s in ("offload_param", "offload_optimizer")}
    problems = []
    for path, section, key in list(_auto_values(filled, "")):
        value, argument = answers.get(path, (None, ""))
        if path in nowhere:
            section[key] = None
        elif value is not None:
            section[key] = value
        elif path != "train_batch_size":
            problems.append(_unfilled(path, argument))
    if filled.get("train_batch_size") == _AUTO:
        micro = filled.get("train_micro_batch_size_per_gpu", micro_batch_size)
        steps = filled.get("gradient_accumulation_steps", accumulation_steps)
        if isinstance(micro, int) and isinstance(steps, int):
            filled["train_batch_size"] = micro * steps * world_size
        else:
            problems.append(_unfilled("train_batch_size", "micro_batch_size"))
    if problems:
        raise ConfigError(*problems)
    return filled


def _bucket_sizes(hidden: int | None) -> dict[str, tuple[Any, str]]:
    """Return (size in elements, name of the argument that decides it) of the prefetch bucket, the persistence threshold
    and the reduce bucket, by the path of their key. Sizes are None if ``hidden``, the hidden size, is None."""
    square = None if hidden is None else hidden * hidden
    found: dict[str, tuple[Any, str]] = {}
    for prefix in ("stage3_", ""):
        prefetch = None if square is None else int(0.9 * square)
        found[f"zero_optimization.{prefix}prefetch_bucket_size"] = (prefetch, "model")
        threshold = None if hidden is None else 10 * hidden
        found[f"zero_optimization.{prefix}param_persistence_threshold"] = (threshold, "model")
    return {**found, "zero_optimization.reduce_bucket_size": (square, "model")}


def _auto_values(section: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (path, object, key) for every value "auto" in ``section``, at any depth; ``object`` is the dict whose
    ``key`` has it.

    ``path``: that of the section, with a dot at the end; empty at the top."""
    for key, value in section.items():
        if value == _AUTO:
            yield path + key, section, key
        elif isinstance(value, dict):
            yield from _auto_values(value, f"{path}{key}.")


def _unfilled(path: str, argument: str) -> Problem:
    """Return the problem of an "auto" at ``path`` that could not be replaced. ``argument``: the argument of
    `resolve_auto` that would fill it; empty if there is none."""
    action = f"pass {argument}=… to resolve_auto, or write the value" if argument else "write the value"
    return Problem(path, "expected a value that can be filled in", show(_AUTO), action=action)
