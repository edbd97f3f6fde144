"""Whether low-bit optimizer state trains as well as float32 state: a byte-level language model, the same data and seeds
for all. The text is the standard library's own source code.

Run it, and see every loss, with `pytest -m soak -s tests/test_training.py`.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from zero_optim_kernels.torch import CPUAdamW  # noqa: E402

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

STEPS, SEEDS = 1000, (0, 1, 2)
WIDTH, LAYERS = 96, 3
CONTEXT = 64
BATCH = 16


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, position, width)."""
        batch, length, width = x.shape
        parts = (
            self.mix(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class ByteModel(nn.Module):
    """Logits of the next byte."""

    def __init__(self, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, position) of bytes."""
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places.weight[: x.shape[1]])))


def corpus() -> tuple[Tensor, Tensor]:
    """Training and validation bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = int(0.9 * data.numel())
    return data[:cut], data[cut:]


def batch(data: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(data.numel() - CONTEXT - 1, (BATCH,), generator=generator)
    return torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()])


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def validation_loss(state_dtype: str, seed: int) -> float:
    """After training with this seed."""
    training, validation = corpus()
    torch.manual_seed(seed)
    model = ByteModel(WIDTH, LAYERS)
    optimizer = CPUAdamW(model.parameters(), lr=2e-3, weight_decay=0.01, state_dtype=state_dtype, seed=seed)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=STEPS, pct_start=0.1, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(training, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    generator = torch.Generator().manual_seed(12345)
    with torch.no_grad():
        return sum(float(loss_of(model, batch(validation, generator))) for _ in range(100)) / 100


def mean_loss(state_dtype: str) -> float:
    """Over the seeds; prints each."""
    losses = [validation_loss(state_dtype, seed) for seed in SEEDS]
    sys.stdout.write(f"\n{state_dtype} state: validation loss {', '.join(f'{loss:.4f}' for loss in losses)}\n")
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def float32_loss() -> Iterator[float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield mean_loss("float32")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
def test_low_bit_state_trains_within_one_percent_of_float32_state(state_dtype: str, float32_loss: float) -> None:
    difference = mean_loss(state_dtype) / float32_loss - 1
    sys.stdout.write(f"{state_dtype} state: {100 * difference:+.2f} % of float32 state's mean\n")
    assert difference <= 0.01
