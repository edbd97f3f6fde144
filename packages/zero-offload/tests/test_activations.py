"""Activations that were taken away come back as they were, and gradients are the same to the bit."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_offload import OffloadError, offload_activations
from zero_offload._activation_tiers import FiledActivations, HostActivations, TensorForm
from zero_offload.ends import HostUse, tier_ends
from zero_offload.swap_paths import swap_paths


class Block(nn.Module):
    """Attention-like: one input saved by three projections, transposes, an in-place activation, a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x) for project in self.qkv)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return torch.relu_(self.out(scores @ v) * self.shift) + x


class Model(nn.Module):
    """Four blocks, checkpointed or not."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + [x.grad.clone()]  # type: ignore[union-attr]


def reference(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x.grad = None
    model(x).square().mean().backward()
    return gradients(model, x)


def across(offload: offload_activations) -> offload_activations:
    """Have the host tier treat the CPU as a device of its own."""
    offload._tier = HostActivations(torch.device("cpu"), None)
    offload._moves = True
    return offload


def make(tier: str, model: nn.Module, path: Path, prefetch: int) -> offload_activations:
    if tier == "host":
        return across(offload_activations(model, min_bytes=64, prefetch=prefetch, device="cpu"))
    paths = [path / "a", path / "b"] if tier == "nvme, striped" else path
    return offload_activations(
        model,
        tier="nvme",
        path=paths,
        min_bytes=64,
        prefetch=prefetch,
        in_flight_bytes=40_000,
        verify=True,
        device="cpu",
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("tier", ["host", "nvme", "nvme, striped"])
def test_gradients_are_the_same_to_the_bit_pass_after_pass(
    tmp_path: Path, tier: str, prefetch: int, recompute: bool
) -> None:
    model = Model(recompute)
    x = torch.randn(3, 17, 32, requires_grad=True)
    want = reference(model, x)
    offload = make(tier, model, tmp_path, prefetch)
    kept = []
    for _ in range(3):
        model.zero_grad()
        x.grad = None
        with offload:
            loss = model(x).square().mean()
        loss.backward()
        del loss
        assert all(map(torch.equal, gradients(model, x), want))
        offload.flush()
        kept.append(offload.memory())
    assert kept[0] == kept[1] == kept[2]  # what one pass freed the next one uses
    assert kept[0]["nvme" if tier != "host" else "host"] > 0
    offload.close()


def test_what_several_operations_save_is_moved_once(tmp_path: Path) -> None:
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(5))
    x = torch.randn(100, 64, requires_grad=True)
    with offload_activations(layers, tier="nvme", path=tmp_path, min_bytes=1, device="cpu") as offload:
        total = sum(layer(x).sum() for layer in layers)
    assert isinstance(total, torch.Tensor)
    assert offload.memory()["nvme"] == 100 * 64 * 4
    total.backward()
    assert x.grad is not None
    offload.close()


def test_weights_and_small_tensors_stay_where_they_are(tmp_path: Path) -> None:
    layer = nn.Linear(256, 256)
    x = torch.randn(2, 256, requires_grad=True)
    with offload_activations(layer, tier="nvme", path=tmp_path, min_bytes=4096, device="cpu") as offload:
        loss = layer(x).square().sum()
    assert offload.memory() == {"host": 0, "nvme": 0}
    loss.backward()
    offload.close()


def test_a_function_may_say_what_stays(tmp_path: Path) -> None:
    x = torch.randn(50, 50, requires_grad=True)
    seen: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> bool:
        seen.append(tensor.shape)
        return len(seen) > 1

    with offload_activations(keep, tier="nvme", path=tmp_path, min_bytes=1, device="cpu") as offload:
        loss = (x.exp() * x.sin()).sum()
    loss.backward()
    assert len(seen) > 1
    assert offload.memory()["nvme"] == 50 * 50 * 4
    offload.close()


def written_in_place(x: torch.Tensor) -> torch.Tensor:
    """A loss whose backward needs a tensor that is written after it was saved."""
    y = x.exp()
    z = (y * y).sum()
    with torch.no_grad():
        y.mul_(2)
    return z


@pytest.mark.parametrize("tier", ["host", "nvme", "stays", "small", "on the CPU"])
def test_a_tensor_written_in_place_after_it_was_saved_is_refused_as_in_plain_torch(tmp_path: Path, tier: str) -> None:
    x = torch.ones(10, 10, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written_in_place(x).backward()
    path = tmp_path if tier in ("nvme", "stays", "small") else None
    min_bytes = 10_000 if tier == "small" else 1
    offload = offload_activations(
        lambda _: tier == "stays",
        tier="host" if path is None else "nvme",
        path=path,
        min_bytes=min_bytes,
        device="cpu",
    )
    with across(offload) if tier == "host" else offload:
        loss = written_in_place(x)
    assert (offload.memory()["nvme"] > 0) == (tier == "nvme")
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*shape \[10, 10\] is at version 1"):
        loss.backward()
    offload.close()


@pytest.mark.parametrize("min_bytes", [1, 10_000])
def test_a_saved_result_does_not_outlive_its_graph(tmp_path: Path, min_bytes: int) -> None:
    x = torch.ones(10, 10, requires_grad=True)
    with offload_activations(nn.Identity(), tier="nvme", path=tmp_path, min_bytes=min_bytes, device="cpu") as offload:
        y = x.exp()
    alive = weakref.ref(y)
    del y
    gc.collect()
    assert alive() is None
    offload.close()


def test_values_saved_are_those_of_the_forward_pass_even_if_memory_is_written_later(tmp_path: Path) -> None:
    x = torch.full((100, 100), 2.0, requires_grad=True)
    with offload_activations(nn.Identity(), tier="nvme", path=tmp_path, min_bytes=1, device="cpu") as offload:
        y = x * 3
        z = (y * y).sum()
        y.data.fill_(1e9)  # not counted as a change, here as in plain torch
    z.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((100, 100), 2 * 6.0 * 3))
    offload.close()


def test_a_graph_may_be_used_twice(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(2, 9, 32, requires_grad=True)
    want = reference(model, x)
    model.zero_grad()
    x.grad = None
    with offload_activations(model, tier="nvme", path=tmp_path, min_bytes=1, device="cpu") as offload:
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    model.zero_grad()
    x.grad = None
    loss.backward()
    assert all(map(torch.equal, gradients(model, x), want))
    offload.close()


def test_strides_come_back(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    form = TensorForm.of(image)
    assert form.empty().is_contiguous(memory_format=torch.channels_last)
    part = torch.randn(10, 10)[2:7, ::2]
    assert TensorForm.of(part).nbytes == 5 * 5 * 4
    with offload_activations(nn.Identity(), tier="nvme", path=tmp_path, min_bytes=1, device="cpu") as offload:
        images, parts = image.clone().requires_grad_(), part.clone().requires_grad_()
        loss = images.permute(0, 2, 3, 1).exp().sum() + parts.t().exp().sum()
    loss.backward()
    assert torch.equal(images.grad, image.exp())  # type: ignore[arg-type]
    assert torch.equal(parts.grad, part.exp())  # type: ignore[arg-type]
    offload.close()


def test_a_forward_without_backward_gives_its_space_back(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(2, 9, 32, requires_grad=True)
    with offload_activations(model, tier="nvme", path=tmp_path, min_bytes=1, device="cpu") as offload:
        for _ in range(3):
            model(x)
            gc.collect()
        offload.flush()
        first = offload.memory()["nvme"]
        model(x)
        assert offload.memory()["nvme"] == first
    offload.close()


def test_on_the_cpu_the_host_tier_moves_nothing() -> None:
    model, x = Model(), torch.randn(2, 9, 32, requires_grad=True)
    want = reference(model, x)
    model.zero_grad()
    x.grad = None
    with offload_activations(model, device="cpu", min_bytes=1) as offload:
        loss = model(x).square().mean()
    assert offload.memory() == {"host": 0, "nvme": 0}
    loss.backward()
    assert all(map(torch.equal, gradients(model, x), want))


class CountedMemory:
    """Provides host memory, and counts the bytes that are alive."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def host_memory(self, nbytes: int, use: HostUse) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(memory.untyped_storage(), self._gone, nbytes)
        return memory

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes

    def io_engine(self, given: Any) -> Any:
        return given


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "strided"])
def test_a_large_boundary_is_written_in_pieces_within_the_bytes_in_flight(tmp_path: Path, dense: bool) -> None:
    limit = 5 * 4096
    counted = CountedMemory()
    whole = torch.randn(3, 1, 400, 70)
    x = (whole if dense else whole[..., :65]).transpose(0, 2).detach().requires_grad_()
    assert x.nbytes > 10 * limit
    with tier_ends(counted):
        offload = offload_activations(
            nn.Identity(), tier="nvme", path=tmp_path, min_bytes=1, in_flight_bytes=limit, verify=True, device="cpu"
        )
        with offload:
            loss = (x * x).sum()
    assert 0 < counted.peak <= limit
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach())
    offload.close()


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 1 << 20])
def test_pieces_are_the_elements_in_the_order_of_memory(nbytes: int) -> None:
    whole = torch.arange(2 * 6 * 5 * 4, dtype=torch.float32).view(2, 6, 5, 4)
    views = (whole, whole.permute(2, 0, 3, 1), whole[:, 1:4], whole[:1, ::2, :, 1:].transpose(1, 3), whole[0, 0, 0, 0])
    for tensor in views:
        form = TensorForm.of(tensor)
        pieces = list(form.pieces(tensor, nbytes))
        assert all(piece.numel() * 4 <= max(nbytes, 4) for piece in pieces)
        assert torch.equal(form.over(torch.cat(pieces).view(torch.uint8)), tensor)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 'host' or 'nvme', got 'tape'"):
        offload_activations(nn.Identity(), tier="tape")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path: names the folder"):
        offload_activations(nn.Identity(), tier="nvme")
    with pytest.raises(ValueError, match="prefetch: expected 0 or more"):
        offload_activations(nn.Identity(), prefetch=-1)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_what_is_freed_after_close_is_not_kept(tmp_path: Path, tier: str) -> None:
    counted = CountedMemory()
    cpu = torch.device("cpu")
    form = TensorForm((100, 7), (7, 1), torch.float32, cpu)
    tensor = torch.randn(100, 7)
    with tier_ends(counted):
        if tier == "host":
            kept: HostActivations | FiledActivations = HostActivations(cpu, None)
        else:
            kept = FiledActivations(
                cpu,
                swap_paths(tmp_path),
                in_flight_bytes=1 << 20,
                checksums=True,
                verify=False,
                prefix="a",
                engine=None,
                trace=None,
            )
        free, used = kept.save(tensor, form), kept.save(tensor, form)
        kept.free(free)
        kept.close()
    del free
    assert kept.memory() == {"host": form.nbytes if tier == "host" else 0, "nvme": 0}
    if tier == "host":
        assert counted.live == form.nbytes
        assert torch.equal(kept.finish(kept.start(used, form)), tensor)
    kept.free(used)
    del used
    assert kept.memory() == {"host": 0, "nvme": 0}
    assert tier == "nvme" or counted.live == 0


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_closed_context_is_not_entered_again(tmp_path: Path, tier: str) -> None:
    path = tmp_path if tier == "nvme" else None
    offload = offload_activations(nn.Identity(), tier=tier, path=path, device="cpu")  # type: ignore[arg-type]
    with offload:
        pass
    offload.close()
    offload.close()
    with pytest.raises(OffloadError, match="offload_activations: it is closed"), offload:
        pass


def test_a_tensor_and_its_conjugate_share_memory_and_are_kept_apart(tmp_path: Path) -> None:
    found = []
    for offloaded in (False, True):
        start = torch.randn(20_000, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        z = start * 2
        if offloaded:
            with offload_activations(lambda _tensor: False, tier="nvme", path=tmp_path) as offload:
                product = z * z.conj() * z
            product.real.sum().backward()
            offload.close()
        else:
            (z * z.conj() * z).real.sum().backward()
        found.append(start.grad)
    assert found[0] is not None and found[1] is not None
    assert torch.equal(found[0], found[1])
