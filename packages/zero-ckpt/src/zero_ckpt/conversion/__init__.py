"""Convert between checkpoint formats, streaming, without torch where the formats need none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from ..types import ITEMSIZE, numel
from .checks import require_torch
from .dtypes import NAMES
from .model import ModelTensor, model_tensors, parse_size
from .sources import Source, open_source

TARGETS = ("safetensors", "pytorch", "deepspeed-universal", "zero-ckpt")

__all__ = ["TARGETS", "Source", "convert", "open_source", "output_nbytes"]


def convert(
    source: str | os.PathLike[str] | Source,
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    dtype: str = "fp32",
    max_shard_size: str | int | None = None,
    workers: int = 4,
    progress: Callable[[int], None] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Convert a checkpoint, and return the files (or the directory) that were written.

    `source` is anything `open_source` knows. `to` is one of `TARGETS`, by default `pytorch` when `target` ends in
    `.bin`, `.pt` or `.pth` and `safetensors` otherwise: a file when `target` ends in `.safetensors`, else a directory
    as Hugging Face lays models out, cut at `max_shard_size` (bytes, or text such as `5GB`; None: not at all). `dtype`
    (`fp32`, `bf16`, `fp16` or `keep`) applies to floating-point tensors of a model; `deepspeed-universal` and
    `zero-ckpt` keep everything as it is, optimizer state included.

    A few pieces of 8 MiB are in memory at a time, `workers` of them at work. An interrupted conversion continues where
    it was when it is started again (to `zero-ckpt`, which is saved as any checkpoint is, it starts again). `progress`
    is called with bytes written since its last call, from several threads. What exists already and was not made by this
    very conversion is refused, unless `overwrite`. Raises CheckpointError, and OSError for what the system refuses.
    """
    if workers < 1:
        raise CheckpointError(f"workers is {workers}, expected at least 1")
    opened = open_source(source) if isinstance(source, (str, os.PathLike)) else source
    path, kind, report = Path(target), _target_format(target, to), progress or _ignore
    try:
        if kind == "deepspeed-universal":
            require_torch("writing a universal checkpoint of DeepSpeed")
            from .universal_sink import write_universal

            return [write_universal(opened, path, workers=workers, progress=report, overwrite=overwrite)]
        if kind == "zero-ckpt":
            from .checkpoint_sink import write_checkpoint

            return [write_checkpoint(opened, path, progress=report, overwrite=overwrite)]
        tensors = _model_tensors(opened, dtype)
        limit = None if max_shard_size is None else parse_size(max_shard_size)
        write = _model_writer(kind)
        return write(opened, tensors, path, limit=limit, workers=workers, progress=report, overwrite=overwrite)
    except OSError as error:
        if error.filename is not None:
            raise
        raise CheckpointError(f"converting to {path}: {error.strerror or error}") from error


def _model_writer(kind: str) -> Callable[..., list[Path]]:
    """Return the function that writes a model in the format `kind`, `pytorch` or `safetensors`."""
    if kind == "pytorch":
        from .pytorch_sink import write_pytorch

        return write_pytorch
    from .safetensors_sink import write_safetensors

    return write_safetensors


def output_nbytes(source: Source, target: str | os.PathLike[str], *, to: str | None = None, dtype: str = "fp32") -> int:
    """Return about how many bytes `convert` writes with the same arguments, which is the total of its progress. Raises
    CheckpointError for an unknown `to` or `dtype`."""
    if _target_format(target, to) in ("safetensors", "pytorch"):
        return sum(tensor.nbytes for tensor in _model_tensors(source, dtype))
    return sum(numel(tuple(tensor.shape)) * ITEMSIZE[tensor.dtype] for tensor in source.tensors.values())


def _target_format(target: str | os.PathLike[str], to: str | None) -> str:
    """Return the format to convert to, one of `TARGETS`: `to`, or, if that is None, the one that the suffix of `target`
    means. Raises CheckpointError for an unknown one."""
    kind = to or ("pytorch" if Path(target).suffix in (".bin", ".pt", ".pth") else "safetensors")
    if kind not in TARGETS:
        raise CheckpointError(f"{kind!r} is no target; expected one of {', '.join(TARGETS)}")
    return kind


def _model_tensors(source: Source, dtype: str) -> list[ModelTensor]:
    """Return the source's parameters and buffers, to be written in `dtype`. Raises CheckpointError for an unknown dtype
    or a source without any."""
    if dtype != "keep" and dtype not in NAMES:
        raise CheckpointError(f"{dtype!r} is no output dtype; expected keep, {', '.join(NAMES)}")
    return model_tensors(source, None if dtype == "keep" else NAMES[dtype])


def _ignore(nbytes: int) -> None:
    """Do nothing: a `progress` function, called with bytes written, that shows none."""
