"""Choose the tensors of the model, their dtype, and the files they go into.

The output is the file or files of a conversion that hold a model; a source is the checkpoint that is converted. Dtypes
have their safetensors names, such as `BF16`. A tied name is a further name of a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import CheckpointError
from ..types import ITEMSIZE, numel
from .dtypes import FLOATS, output_dtype
from .sources import Source

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of the output: read from (name, kind) of the source in dtype `stored`, written as `dtype`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    stored: str
    dtype: str

    @property
    def numel(self) -> int:
        """The number of elements."""
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes in the output."""
        return self.numel * ITEMSIZE[self.dtype]


def model_tensors(source: Source, dtype: str | None) -> list[ModelTensor]:
    """Return the parameters and buffers to write of a source, in its order.

    `dtype` is that of floating-point tensors in the output; None keeps the dtype of each parameter. A parameter is read
    from its `master` where there is one, unless its own dtype is kept. Raises CheckpointError when there is nothing to
    write.
    """
    found: dict[str, ModelTensor] = {}
    for (name, kind), tensor in source.tensors.items():
        if kind not in ("param", "buffer", "master"):
            continue
        plain = source.tensors.get((name, "param"))
        wanted = output_dtype(tensor.dtype, dtype)
        if dtype is None and kind == "master" and plain is not None:
            continue
        if name not in found or kind == "master":
            found[name] = ModelTensor(name, kind, tuple(tensor.shape), tensor.dtype, wanted)
    if not found:
        raise CheckpointError("the source holds no parameters or buffers")
    for tensor_out in found.values():
        if tensor_out.dtype != tensor_out.stored and tensor_out.stored not in FLOATS:
            raise CheckpointError(f"{tensor_out.name!r}: {tensor_out.stored} cannot become {tensor_out.dtype}")
    return list(found.values())


def model_aliases(source: Source, tensors: list[ModelTensor]) -> dict[str, str]:
    """Return the tied names of the tensors that are written, each with the name under which its tensor is written."""
    names = {tensor.name for tensor in tensors}
    return {alias: name for alias, name in source.aliases.items() if name in names and alias not in names}


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as `5GB` (powers of 1000, as Hugging Face counts) or `512MiB`; an integer is
    returned as it is.

    Raises CheckpointError for other text.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise CheckpointError(f"{text!r} is not a size; expected something like 5GB or 512MiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[match[2].upper()])


def split_files(
    tensors: list[ModelTensor], limit: int | None, stem: str, suffix: str
) -> Mapping[str, list[ModelTensor]]:
    """Distribute tensors over files and return them by file name. Files are filled in order up to `limit` bytes each
    (None: one file); a larger tensor has its own file.

    A single file is called `<stem><suffix>`, one of several `<stem>-00001-of-00003<suffix>`.
    """
    groups: list[list[ModelTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if limit is not None and groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {f"{stem}{suffix}": groups[0]}
    return {f"{stem}-{n:05d}-of-{len(groups):05d}{suffix}": group for n, group in enumerate(groups, start=1)}
