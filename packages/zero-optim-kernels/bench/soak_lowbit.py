"""Whether low-bit optimizer state trains as well as float32 state: a byte-level language model, the same data and
seeds for all.

    python soak_lowbit.py [--steps 1000] [--seeds 3] [--states int8 bfloat16] [--width 96] [--layers 3]

The text is the standard library's own source code. Prints the validation loss per seed and, per state precision, the
relative difference of the means from float32 state; the project holds itself to 1 %. Needs torch.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_optim_kernels.torch import CPUAdamW

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


def train(state_dtype: str, seed: int, steps: int, width: int, layers: int) -> float:
    """The validation loss after training."""
    training, validation = corpus()
    torch.manual_seed(seed)
    model = ByteModel(width, layers)
    optimizer = CPUAdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.999), weight_decay=0.01, state_dtype=state_dtype, seed=seed
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(training, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    generator = torch.Generator().manual_seed(12345)
    with torch.no_grad():
        return sum(float(loss_of(model, batch(validation, generator))) for _ in range(100)) / 100


def main() -> None:
    """Train every combination and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--states", nargs="+", default=["int8", "bfloat16"])
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = (arguments.width, arguments.layers)
    size = sum(p.numel() for p in ByteModel(*shape).parameters())
    sys.stdout.write(f"byte-level model of {size} parameters, {arguments.steps} steps\n")
    means = {}
    for state_dtype in ("float32", *arguments.states):
        losses = []
        for seed in range(arguments.seeds):
            losses.append(train(state_dtype, seed, arguments.steps, *shape))
            sys.stdout.write(f"{state_dtype:<10} seed {seed}: validation loss {losses[-1]:.4f}\n")
            sys.stdout.flush()
        means[state_dtype] = sum(losses) / len(losses)
    for state_dtype in arguments.states:
        difference = means[state_dtype] / means["float32"] - 1
        verdict = "within 1 %" if difference <= 0.01 else "WORSE than 1 %"
        sys.stdout.write(f"{state_dtype}: {100 * difference:+.2f} % of float32 state's mean loss, {verdict}\n")


if __name__ == "__main__":
    main()
