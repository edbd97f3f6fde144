"""Train a decoder in a plain loop: STEPS steps, with a data loader, a printed loss and a scheduler."""

import sys

import dry_models
import torch
from torch.utils.data import DataLoader, Dataset

import zero_core


class Tokens(Dataset):
    def __init__(self) -> None:
        self.rows = torch.randint(dry_models.VOCABULARY, (64, dry_models.SEQUENCE))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.rows[index], "targets": self.rows[index]}


def main(steps: int, workers: int = 0) -> None:
    torch.manual_seed(0)
    model, data = dry_models.decoder(), Tokens()
    engine, optimizer, _, _ = zero_core.initialize(model=model, config=dry_models.Case(stage=1).config())
    loader = DataLoader(data, batch_size=dry_models.BATCH, shuffle=True, num_workers=workers)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    best, losses = float("inf"), []
    batches = iter(loader)
    for step in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(**next(batches))
        engine.backward(loss)
        engine.step()
        schedule.step()
        losses.append(loss.item())
        if loss < best:
            best = losses[-1]
        print(f"step {step} loss {loss:.3f} {loss.detach().cpu().numpy()} norm {engine.get_global_grad_norm()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
