"""Functions with DeepSpeed's names and meaning, for scripts that call them. They read every format known here.

Also a program: `python -m zero_ckpt.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .conversion.model import ModelTensor, model_aliases, model_tensors, parse_size
from .conversion.sources import Source, open_source
from .durable import make_directories
from .errors import CheckpointError
from .locking import is_at, unlock_and_close, wait_for_lock
from .relative import absolute
from .scripts import SCRIPT_NAME
from .types import is_optimizer_kind

if TYPE_CHECKING:
    import torch

_FILES = (".bin", ".pt", ".pth", ".safetensors")
_OUTPUT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the full fp32 state dict, in CPU memory, of the checkpoint `tag` (by default the one `latest` names).

    Names map to tensors; tied names share one tensor. With `exclude_frozen_parameters`, parameters that are not trained
    are left out. With `lazy_mode` the values are `LazyTensor`s, and nothing is read until their `contiguous()` is
    called. Raises CheckpointError as `open_source` does, and when it is not known which parameters are trained.
    """
    source = _open(checkpoint_dir, tag)
    tensors = _tensors_to_write(source, exclude_frozen_parameters)
    state: dict[str, Any] = {tensor.name: LazyTensor(source, tensor) for tensor in tensors}
    if not lazy_mode:
        state = {name: value.contiguous() for name, value in state.items()}
    state.update({alias: state[name] for alias, name in model_aliases(source, tensors).items()})
    return state


class LazyTensor:
    """A tensor of a checkpoint that is read when `contiguous` is called. ``source``: an open checkpoint, which has to
    stay open until then. ``tensor``: what to read of it.
    """

    def __init__(self, source: Source, tensor: ModelTensor) -> None:
        self._source, self._tensor = source, tensor

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""
        import torch

        return torch.Size(self._tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values that `contiguous` returns."""
        from .torch import torch_dtype

        return torch_dtype(self._tensor.dtype)

    def contiguous(self) -> torch.Tensor:
        """Return the values, read into new CPU memory at every call. Raises CheckpointError when they cannot be
        read."""
        from .conversion.pytorch_sink import read_model_tensor

        value: torch.Tensor = read_model_tensor(self._source, self._tensor, lambda nbytes: None)
        return value


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: str | torch.dtype = "float32",
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the state dict of a checkpoint into `output_dir`: as `pytorch_model.bin`, or `model.safetensors` with
    `safe_serialization`.

    It becomes files of up to `max_shard_size` each (bytes, or text such as `5GB`; None: one file) with an index.
    Floating-point tensors become `dtype`: float32, float16 or bfloat16. `tag` is by default the one that `latest`
    names; `exclude_frozen_parameters` leaves out parameters that are not trained. Raises CheckpointError for another
    dtype, and as `open_source` does. Existing files are overwritten, as DeepSpeed's function does. Of processes that
    make the same call at once, as all ranks of a script do, one writes, and the others wait for it.
    """
    from .conversion.pytorch_sink import write_pytorch
    from .conversion.safetensors_sink import write_safetensors

    name = str(dtype).removeprefix("torch.")
    if name not in _OUTPUT_DTYPES:
        raise CheckpointError(f"dtype is {dtype!r}, expected one of {', '.join(_OUTPUT_DTYPES)}")
    source = _open(checkpoint_dir, tag)
    tensors = _tensors_to_write(source, exclude_frozen_parameters, _OUTPUT_DTYPES[name])
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    target = absolute(Path(output_dir))
    write = write_safetensors if safe_serialization else write_pytorch
    asked = repr((source.fingerprint, name, limit, safe_serialization, [tensor.name for tensor in tensors]))
    with _turn_to_write(target, asked) as mine:
        if mine:
            write(source, tensors, target, limit=limit, workers=4, progress=_ignore, overwrite=True)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the state dict of a checkpoint into `output_dir` in float32. The arguments are those of
    `convert_zero_checkpoint_to_state_dict`, which is called."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, "float32", max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Move `model` to the CPU, load the fp32 state dict of a checkpoint into it (with `strict=False`), and return the
    model.

    `tag` is by default the one that `latest` names. Raises CheckpointError when the checkpoint cannot be read.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


@contextmanager
def _turn_to_write(target: Path, asked: str) -> Iterator[bool]:
    """Wait until no other process writes `target`, and yield whether this process has to write it. It need not if the
    process that it waited for was given the same `asked`, text that says what to write, and has succeeded.

    Where the file system has no locks, nobody waits.
    """
    folder = target.parent if target.suffix in _FILES else target
    make_directories(folder)
    path, key = folder / f".{target.name}.turn", hashlib.sha256(asked.encode()).digest()
    fd, written = _lock_turn(path, key)
    try:
        if not written:
            os.ftruncate(fd, 0)  # of a process that was killed
        yield not written
        if not written:
            os.pwrite(fd, key, 0)
            path.unlink(missing_ok=True)
    finally:
        unlock_and_close(fd)


def _lock_turn(path: Path, key: bytes) -> tuple[int, bool]:
    """Lock the file `path`, waiting while another process holds it, and return (its descriptor, whether the process
    that was waited for has done the work). That process writes `key` into the file, if its work had the same key, and
    removes it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            wait_for_lock(fd, path)
            if is_at(fd, path):
                return fd, False
            if os.pread(fd, len(key), 0) == key:
                return fd, True
        except BaseException:
            unlock_and_close(fd)
            raise
        unlock_and_close(fd)  # removed by one that was asked for something else


def _ignore(nbytes: int) -> None:
    """Do nothing: a `progress` function, called with bytes written, that shows none."""


def _open(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> Source:
    """Open checkpoint `tag` in `checkpoint_dir`; without a tag, the one that `latest` names. Raises CheckpointError as
    `open_source` does."""
    spec = os.fspath(checkpoint_dir)
    return open_source(spec if tag is None else f"{spec}@{tag}")


def _tensors_to_write(source: Source, exclude_frozen: bool, dtype: str = "F32") -> list[ModelTensor]:
    """Return the model's tensors to write, without frozen parameters if `exclude_frozen`.

    `dtype` is that of floating-point tensors in the output, by its safetensors name. Where the checkpoint does not
    record which parameters are frozen, those without a master or optimizer state count as frozen. Raises
    CheckpointError when frozen ones are to be left out and the checkpoint holds neither.
    """
    found = model_tensors(source, dtype)
    if not exclude_frozen:
        return found
    if source.frozen is not None:
        return [item for item in found if item.name not in source.frozen]
    trained = {name for name, kind in source.tensors if kind == "master" or is_optimizer_kind(kind)}
    if not trained:
        raise CheckpointError("the checkpoint holds no optimizer state, which tells frozen parameters from the others")
    return [item for item in found if item.kind == "buffer" or item.name in trained]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return the exit status: 0, or 1 with a message for a CheckpointError.

    `arguments` are by default those of the process.
    """
    parser = argparse.ArgumentParser(prog=SCRIPT_NAME, description="Make one fp32 state dict of a checkpoint.")
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; errors are complete without it")
    options = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            options.checkpoint_dir,
            options.output_dir,
            max_shard_size=options.max_shard_size,
            safe_serialization=options.safe_serialization,
            tag=options.tag,
            exclude_frozen_parameters=options.exclude_frozen_parameters,
        )
    except CheckpointError as error:
        print(f"{SCRIPT_NAME}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
