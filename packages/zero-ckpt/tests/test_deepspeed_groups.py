"""Files in DeepSpeed's layout whose parameter groups have different kinds of optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from zero_ckpt.conversion import open_source  # noqa: E402

RANKS = 2
SHAPES = [{"a": (3, 3), "b": (4,)}, {"c": (5,)}, {"d": (2, 3), "e": (1,)}]
VALUES = {
    name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * number
    for number, (name, shape) in enumerate((item for group in SHAPES for item in group.items()), 1)
}


def flat(names: dict[str, Any], stage: int, rank: int, sign: float = 1.0) -> Any:
    """Rank `rank`'s flat tensor of one group."""
    values = [sign * VALUES[name].flatten() for name in names]
    if stage < 3:
        values = [torch.cat(values)]
    sizes = [-(-value.numel() // RANKS) for value in values]
    padded = [torch.cat([v, torch.zeros(RANKS * size - v.numel())]) for v, size in zip(values, sizes, strict=True)]
    return torch.cat([value[rank * size :][:size] for value, size in zip(padded, sizes, strict=True)])


def write(folder: Path, stage: int, state_of_group: list[dict[str, float | None]]) -> None:
    """Write a checkpoint; for each group the kinds of its state: the sign of its values, or None."""
    module = {} if stage == 3 else VALUES
    for rank in range(RANKS if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save({"module": module, "param_shapes": SHAPES, "shared_params": {}, "global_steps": 1}, folder / name)
    for rank in range(RANKS):
        state = {
            number: {kind: sign and flat(names, stage, rank, sign) for kind, sign in kinds.items()} | {"step": number}
            for number, (names, kinds) in enumerate(zip(SHAPES, state_of_group, strict=True))
        }
        masters = [flat(names, stage, rank) for names in SHAPES]
        base = {"state": state, "param_groups": [{"lr": 0.1, "params": [number]} for number in range(3)]}
        keys = ("fp32_flat_groups", "optimizer_state_dict") if stage == 3 else ("single_partition_of_fp32_groups",)
        own = dict(zip((*keys, "base_optimizer_state"), (masters, base), strict=False))
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": {"zero_stage": stage, "partition_count": RANKS, **own}}, path)


LACKING: list[list[dict[str, float | None]]] = [
    [{}, {"momentum_buffer": -1.0}, {"momentum_buffer": -1.0}],
    [{"momentum_buffer": -1.0}, {}, {"momentum_buffer": -1.0}],
    [{"momentum_buffer": None}, {"momentum_buffer": -1.0}, {"exp_avg": -1.0}],
    [{"momentum_buffer": -1.0}] * 3,
]


@pytest.mark.parametrize("kinds", LACKING)
@pytest.mark.parametrize("stage", [2, 3])
def test_groups_may_lack_a_kind_of_state_that_others_have(
    tmp_path: Path, stage: int, kinds: list[dict[str, float | None]]
) -> None:
    write(tmp_path, stage, kinds)
    source = open_source(tmp_path)
    expected = {
        (name, kind): torch.tensor(number) if kind == "step" else (sign or 1.0) * VALUES[name]
        for number, (names, own) in enumerate(zip(SHAPES, kinds, strict=True))
        for name in names
        for kind, sign in {"param": 1.0, "step": 1.0, **own}.items()
        if sign is not None
    }
    assert set(source.tensors) == set(expected)
    for key, value in expected.items():
        found = bytearray(value.nbytes)
        source.read_into(*key, 0, found)
        assert torch.equal(torch.frombuffer(found, dtype=value.dtype).reshape(value.shape), value), key
