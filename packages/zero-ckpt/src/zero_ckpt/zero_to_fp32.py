"""Functions with DeepSpeed's names and meaning, for scripts that call them. They read every format known here.

Also a program: `python -m zero_ckpt.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .conversion.model import model_aliases, model_tensors, parse_size
from .conversion.sources import Source, open_source
from .scripts import SCRIPT_NAME

if TYPE_CHECKING:
    import torch


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """The whole fp32 state dict, in CPU memory, of the checkpoint `tag` (by default the one `latest` names).

    Tied names share one tensor. With `exclude_frozen_parameters`, parameters without optimizer state are left out.
    """
    from .conversion.pytorch_sink import read_model_tensor

    source = _open(checkpoint_dir, tag)
    tensors = [
        tensor
        for tensor in model_tensors(source, "F32")
        if not exclude_frozen_parameters or tensor.kind == "buffer" or _is_trained(source, tensor.name)
    ]
    state: dict[str, torch.Tensor] = {
        tensor.name: read_model_tensor(source, tensor, lambda nbytes: None) for tensor in tensors
    }
    state.update({alias: state[name] for alias, name in model_aliases(source, tensors).items()})
    return state


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 state dict into `output_dir`: `pytorch_model.bin`, or `model.safetensors`, cut at a size."""
    from .conversion.pytorch_sink import write_pytorch
    from .conversion.safetensors_sink import write_safetensors

    source = _open(checkpoint_dir, tag)
    tensors = [
        tensor
        for tensor in model_tensors(source, "F32")
        if not exclude_frozen_parameters or tensor.kind == "buffer" or _is_trained(source, tensor.name)
    ]
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    target = Path(output_dir)
    if safe_serialization:
        write_safetensors(source, tensors, target, limit=limit, workers=4, progress=lambda nbytes: None)
    else:
        write_pytorch(source, tensors, target, limit=limit, progress=lambda nbytes: None)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Move `model` to the CPU, load the fp32 state dict into it (names that do not fit are left), and return it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _open(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> Source:
    spec = os.fspath(checkpoint_dir)
    return open_source(spec if tag is None else f"{spec}@{tag}")


def _is_trained(source: Source, name: str) -> bool:
    model_kinds = ("param", "buffer", "master", "state")
    return any(owner == name and kind not in model_kinds for owner, kind in source.tensors)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns the exit status."""
    parser = argparse.ArgumentParser(prog=SCRIPT_NAME, description="Make one fp32 state dict of a checkpoint.")
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; errors are complete without it")
    options = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        options.checkpoint_dir,
        options.output_dir,
        max_shard_size=options.max_shard_size,
        safe_serialization=options.safe_serialization,
        tag=options.tag,
        exclude_frozen_parameters=options.exclude_frozen_parameters,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
