"""64-bit checksums of tensors' values, computed on the tensors' device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash

from .host_facts import bytes_of, is_fake

_CHUNK = 1 << 22
_ODD = 2_654_435_761
_BLOCK = 1 << 20
_MULTIPLIER = 0x9E3779B97F4A7C1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Checksums = list[int] | torch.Tensor
"""Checksums of some tensors: numbers, or on an accelerator a 1-D int64 tensor there."""


def checksums(views: Sequence[torch.Tensor]) -> Checksums:
    """Return a 64-bit checksum per contiguous tensor, sensitive to the values and their order; 0 for fake tensors on
    the CPU.

    ``views``: one or more tensors on one device, on which the checksums are computed; the host does not wait for it.
    """
    if views[0].device.type == "cpu":
        return [0 if is_fake(view) else xxhash.xxh3_64_intdigest(bytes_of(view)) for view in views]
    size = min(_CHUNK, max(view.numel() for view in views))
    weights = torch.arange(1, 2 * size, 2, device=views[0].device) * _ODD
    product = torch.empty_like(weights)
    found: list[torch.Tensor] = []
    for view in views:
        total = torch.zeros((), dtype=torch.int64, device=view.device)
        for words in _as_integers(view.detach().reshape(-1)):
            for chunk in torch.split(words, size):
                here = product[: chunk.numel()]
                total = total * _ODD + torch.mul(chunk, weights[: chunk.numel()], out=here).sum()
        found.append(total)
    return torch.stack(found)


def differing(pairs: Sequence[tuple[Checksums, Checksums]]) -> list[list[int]]:
    """Return, for each pair (checksums before, checksums now) of the same tensors, the indices of the tensors whose
    checksums differ.

    Where checksums are on an accelerator, the host waits for it, once for all pairs.
    """
    away = [torch.ne(b, n) for b, n in pairs if isinstance(b, torch.Tensor) and isinstance(n, torch.Tensor)]
    told = iter(torch.cat(away).tolist() if away else [])
    found = []
    for before, now in pairs:
        if isinstance(before, torch.Tensor):
            found.append([number for number in range(before.numel()) if next(told)])
        else:
            found.append([number for number, (old, new) in enumerate(zip(before, now, strict=True)) if old != new])
    return found


def _as_integers(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of the 1-D ``flat`` as int64 tensors: views with several elements in each integer where they
    are aligned to 8 bytes, else copies with one element in each."""
    size = flat.element_size()
    each = 8 // size
    head = min(-int(flat.storage_offset()) % each, flat.numel())
    end = head + (flat.numel() - head) // each * each
    if end > head:
        yield flat[head:end].view(torch.int64)
    for rest in (flat[:head], flat[end:]):
        if rest.numel():
            yield rest.view(_INTEGERS[size]).to(torch.int64)


def digest_of(x: torch.Tensor) -> int:
    """Return a 64-bit digest of the bits of ``x``, a contiguous 1-D tensor: equal for equal bits, else almost surely
    different.

    Every element's bits are multiplied by an odd number that depends on its position; the products wrap around and are
    added up on the tensor's device, for which the host waits.
    """
    bits = x.view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _BLOCK):
        block = bits[start : start + _BLOCK].to(torch.int64)
        position = torch.arange(start, start + block.numel(), dtype=torch.int64, device=x.device)
        total += ((block + 1) * ((position * _MULTIPLIER) | 1)).sum()
    return int(total)
