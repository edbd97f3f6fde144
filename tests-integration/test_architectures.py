"""Architectures of Transformers and adapters of PEFT follow the one-process run at every stage.

`python tests-integration/test_architectures.py [--write] [NAME ...]` prints their table, of all or of those named; with
``--write`` docs/numerics.md shows it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
import torch.distributed as dist
from training import bits, deviation

from zero_comm import run_ranks

STEPS, STAGES, WORLD_SIZES = 4, (0, 1, 2, 3), (2, 3)
ROUTED = ("Switch", "NLLB-MoE")  # each rank chooses the experts that it runs: docs/numerics.md, between stages
OFTEN = ("Mixtral", "AdaLoRA")
NAMES = [*architectures.ARCHITECTURES, *architectures.ADAPTERS]
PAGE = Path(__file__).resolve().parents[1] / "docs" / "numerics.md"
HEADER = "| model | parameters | 2 ranks | 3 ranks | stages 0 to 3 |\n|---|---|---|---|---|"
BLOCK = re.compile(r"(?P<begin><!-- generated: architectures -->\n)(?P<table>.*?\n)(?P<end><!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One line of the table: what a model's weights are off by after some steps, by world size; the same bits at every
    stage where ``stages_equal``, but for stage 3 of a model in `ROUTED`, which is ``apart`` from stage 0."""

    name: str
    parameters: int
    deviations: dict[int, float]
    stages_equal: bool
    apart: float


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)


def trained(name: str, stage: int) -> dict[str, torch.Tensor]:
    """Rank 0's full weights after training on all ranks."""
    import zero_core

    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = architectures.SAMPLES // world_size
    model = architectures.build(name)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size,
        "data_types": {"param_dtype": "fp64"},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 500,
            "unit_min_numel": 1,
        },
    }
    engine = zero_core.initialize(model=model, optimizer=adamw(model), config=config)[0]
    for step in range(STEPS):
        rows = slice(rank * size, (rank + 1) * size)
        engine.backward(architectures.loss_of(engine(**architectures.batch(name, step, rows))))
        engine.step()
    found = engine.partition.find
    weights = {n: engine.full_param(p) if found(p) else p.detach().clone() for n, p in model.named_parameters()}
    engine.destroy()
    return weights if rank == 0 else {}


def all_stages(name: str, stages: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    return [trained(name, stage) for stage in stages]


def plain(name: str) -> dict[str, torch.Tensor]:
    """One process, torch.optim, the whole batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks
    model = architectures.build(name)
    optimizer = adamw(model)
    for step in range(STEPS):
        architectures.loss_of(model(**architectures.batch(name, step, slice(None)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def row(name: str, stages: tuple[int, ...] = STAGES, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Row:
    """Train one model in one process and on ranks."""
    expected = plain(name)
    deviations, equal, apart = {}, True, 0.0
    for world_size in world_sizes:
        answers = run_ranks(all_stages, world_size, name, stages, timeout=600)[0]
        deviations[world_size] = max(deviation(weights, expected) for weights in answers)
        if name in ROUTED and world_size > 2 and stages[-1] == 3:
            apart = max(apart, deviation(answers.pop(), answers[0]))
        equal = equal and all(bits(weights) == bits(answers[0]) for weights in answers)
    return Row(name, sum(p.numel() for p in expected.values()), deviations, equal, apart)


def check(found: Row) -> None:
    """Stages have the same bits, but for one rounding where they may; the deviation is the oracle's, or float32's where
    the model computes in it."""
    assert found.stages_equal and found.apart <= 5e-16, found
    bound = 1e-4 if architectures.is_narrow(found.name) else 1e-12
    assert max(found.deviations.values()) <= bound, found


@pytest.mark.parametrize("name", OFTEN)
def test_some_models_follow_the_one_process_run(name: str) -> None:
    check(row(name, stages=(0, 3), world_sizes=(2,)))


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_every_model_follows_the_one_process_run_at_every_stage(name: str) -> None:
    check(row(name))


def line(found: Row) -> str:
    """A row as the page shows it."""
    off = " | ".join(f"{found.deviations[ranks]:.1e}" for ranks in WORLD_SIZES)
    equal = "same bits" if not found.apart else f"stage 3 at 3 ranks: {found.apart:.1e}"
    equal = equal if found.stages_equal else "DIFFER"
    return f"| {found.name} | {found.parameters:,} | {off} | {equal} |"


def shown() -> dict[str, str]:
    """The lines of the page's table by model."""
    block = BLOCK.search(PAGE.read_text())
    assert block is not None, f"{PAGE} has no table of architectures"
    lines = block["table"].splitlines()[2:]
    return {text.split("|")[1].strip(): text for text in lines}


def write(lines: dict[str, str]) -> None:
    """Have the page show ``lines`` in the order of `NAMES`."""
    table = "\n".join([HEADER, *(lines[name] for name in NAMES if name in lines)])
    PAGE.write_text(BLOCK.sub(lambda block: f"{block['begin']}{table}\n{block['end']}", PAGE.read_text()))


def test_the_page_shows_every_model() -> None:
    lines = shown()
    assert list(lines) == NAMES
    apart = {name for name, text in lines.items() if not text.endswith("| same bits |")}
    assert apart <= set(ROUTED) and all("| stage 3 at 3 ranks: " in lines[name] for name in apart)


def main() -> None:
    """Print the table, row by row, and write each into the page as it is found."""
    print(HEADER)
    writes = "--write" in sys.argv
    for name in [word for word in sys.argv[1:] if word != "--write"] or NAMES:
        text = line(row(name))
        print(text, flush=True)
        if writes:
            write({**shown(), name: text})


if __name__ == "__main__":
    main()
