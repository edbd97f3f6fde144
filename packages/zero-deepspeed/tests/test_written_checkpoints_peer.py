"""DeepSpeed resumes from checkpoints that are written here in its format, and continues as a run that never stopped.

DeepSpeed trains, saves and goes on; this project loads what it saved, and saves that in DeepSpeed's format; DeepSpeed
loads it and continues. What each rank of it holds is compared directly, then and after further steps, and so is the
content of the files.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_foreign_checkpoints_peer import LAST, SAVED, environment, load, run

from zero_ckpt.conversion.deepspeed_layout import pieces_of_group, sub_groups

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(900),
]
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 3}},
}
FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": False, "weight_decay": 0.1}}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
CASES: dict[str, dict[str, Any]] = {
    f"{stage}-{dtype}": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **half}
    for stage in (1, 2, 3)
    for dtype, half in DTYPES.items()
}
CASES |= {
    "2-fp32-round-robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "1-bf16-aligned": {"zero_optimization": {"stage": 1, "parameter_alignment": True}, **DTYPES["bf16"]},
    "3-bf16-small-groups": {"zero_optimization": {"stage": 3, "sub_group_size": 40}, **DTYPES["bf16"]},
    "2-fp32-offload": {"zero_optimization": {"stage": 2, **OFFLOADED}},
    "2-bf16-accumulated": {
        "zero_optimization": {"stage": 2},
        "accumulate": 2,
        "data_types": {"grad_accum_dtype": "fp32"},
        **DTYPES["bf16"],
    },
}
if find_spec("cpuinfo") is not None:
    CASES["2-fp32-fused-offload"] = {**FUSED, "zero_optimization": {"stage": 2, **OFFLOADED}}
    CASES["3-fp32-fused-offload"] = {**FUSED, "zero_optimization": {"stage": 3, **OFFLOADED}}
NUMELS = {"embed.weight": 91, "gain": 1, "mid.weight": 35, "mid.bias": 5, "out.weight": 35}
NUMELS |= {"frozen.weight": 49, "frozen.bias": 7}
GROUPS = ("embed.weight", "gain"), ("mid.weight", "mid.bias", "out.weight")
BUFFER_DTYPE = "[module][scale][0]"
"""DeepSpeed leaves buffers in float32 where this project casts them with the module."""
FORMAT = {"checkpoint": {"format": "deepspeed"}}


def contents(value: Any) -> Any:
    """A value with its tensors as lists and objects as their attributes; counts of steps as numbers."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.double().tolist()]
    if isinstance(value, dict):
        return {key: contents(item) for key, item in value.items() if key != "ds_config"}
    if isinstance(value, (list, tuple)):
        return [contents(item) for item in value]
    if hasattr(value, "__dict__") and not isinstance(value, int):
        return [type(value).__name__, contents(vars(value))]
    return int(value) if isinstance(value, bool | int) else str(value) if isinstance(value, torch.dtype) else value


def difference(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """The places at which contents of a file differ; a step is a number or a tensor, and options may be added."""
    if path.endswith("step]") and not isinstance(ours, dict):
        flat = [value[2] if isinstance(value, list) else value for value in (ours, theirs)]
        return [] if float(flat[0]) == float(flat[1]) else [path]
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = set(theirs) | (set() if "param_groups" in path else set(ours))
        found = [f"{path}[{key}]" for key in keys if key not in ours or key not in theirs]
        return found + [
            p for key in keys & set(ours) & set(theirs) for p in difference(ours[key], theirs[key], f"{path}[{key}]")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [p for n, pair in enumerate(zip(ours, theirs, strict=True)) for p in difference(*pair, f"{path}[{n}]")]
    return [] if ours == theirs or (ours != ours and theirs != theirs) else [f"{path}: {ours!r} instead of {theirs!r}"]


def names_of(name: str, ranks: int) -> list[list[str]]:
    """The parameters in each flat tensor of stage 3."""
    limit = CASES[name]["zero_optimization"].get("sub_group_size", 10**9)
    return [part for group in GROUPS for part in sub_groups(group, [NUMELS[n] for n in group], ranks, limit)]


def clear_padding(masters: list[Any], states: Any, name: str, rank: int, ranks: int) -> None:
    """Set to zero what DeepSpeed's stage 3 leaves undefined: the padding of each parameter's last piece."""
    for number, names in enumerate(names_of(name, ranks) if name.startswith("3") else ()):
        held = pieces_of_group(names, [NUMELS[n] for n in names], rank, ranks)
        padding = torch.ones(held.numel, dtype=torch.bool)
        for piece in held.runs:
            padding[piece.begin : piece.begin + piece.length] = False
        for flat in (masters[number], *(states[number][key] for key in ("exp_avg", "exp_avg_sq"))):
            flat.detach()[padding] = 0


def read(path: Path, ranks: int) -> Any:
    """A file of DeepSpeed."""
    found = torch.load(path, weights_only=False)
    held = found.get("optimizer_state_dict", {})
    if "fp32_flat_groups" in held:
        rank = int(path.name.partition("pp_rank_")[2].partition("_")[0])
        states = held["optimizer_state_dict"]["state"]
        clear_padding(held["fp32_flat_groups"], states, path.parent.parent.name, rank, ranks)
    for name, fragment in (found.get("frozen_param_fragments") or {}).items():
        if fragment.dim() == 1 and path.name.startswith("zero"):
            rank = int(path.name.split("_")[3])
            fragment[max(0, NUMELS[name] - rank * len(fragment)) :] = 0
    return contents(found)


@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_deepspeed_resumes_what_is_written_here(ranks: int, tmp_path: Path) -> None:
    names = list(CASES)
    span = {"first": SAVED, "last": LAST, "save_at": SAVED}
    jobs = [{"name": n, "config": CASES[n], "save": str(tmp_path / "theirs" / n), **span, "raw": True} for n in names]
    (tmp_path / "a").mkdir()
    run(False, ranks, tmp_path / "a", [{**job, "first": 0} for job in jobs])
    ours = [
        {
            "name": n,
            "config": {**CASES[n], **FORMAT},
            "load": str(tmp_path / "theirs" / n),
            "seed": 3,
            "save": str(tmp_path / "ours" / n),
            **span,
        }
        for n in names
    ]
    (tmp_path / "b").mkdir()
    run(True, ranks, tmp_path / "b", ours)
    (tmp_path / "c").mkdir()
    back = [{"name": n, "config": CASES[n], "load": str(tmp_path / "ours" / n), "seed": 5, "raw": True} for n in names]
    run(False, ranks, tmp_path / "c", [{**job, "first": SAVED, "last": LAST} for job in back])
    for name in names:
        check_files(tmp_path / "ours" / name, tmp_path / "theirs" / name, ranks)
        check_states(name, ranks, tmp_path)
        check_recovered_weights(tmp_path / "ours" / name)


def test_deepspeed_resumes_without_frozen_parameters(tmp_path: Path) -> None:
    names, folders = ("1-fp32", "3-fp32"), (tmp_path / "ours", tmp_path / "theirs")
    for folder in folders:
        folder.mkdir()
    left_out = {"save_options": {"exclude_frozen_parameters": True}}
    saved = {"first": 0, "last": LAST, "save_at": SAVED, **left_out}
    jobs = [{"name": n, "config": {**CASES[n], **FORMAT}, "save": str(tmp_path / n), **saved} for n in names]
    run(True, 2, folders[0], jobs)
    loaded = {"first": SAVED, "last": LAST, "raw": True, "options": {"load_module_strict": False}}
    back = [{"name": n, "config": CASES[n], "load": str(tmp_path / n), **loaded} for n in names]
    run(False, 2, folders[1], back)
    for name in names:
        here, there = load(folders[0], name), load(folders[1], name)
        assert there["path"] is not None and there["before"]["facts"] == here["saved"]["facts"]
        masters = [key for key in here["saved"] if key.endswith(" master")]
        assert masters and all(torch.equal(here["saved"][key], there["before"][key]) for key in masters)
        assert there["losses"] == pytest.approx(here["losses"][SAVED:], rel=1e-6)


def check_files(ours: Path, theirs: Path, ranks: int) -> None:
    """The same files, with the same content. DeepSpeed's stage 1 leaves frozen parameters out of their own entries, and
    its mappings under round_robin_gradients are those of parameters in another order than their elements have."""
    files = sorted(path.name for path in (theirs / "global_step3").iterdir())
    assert sorted(path.name for path in (ours / "global_step3").iterdir()) == files
    assert (ours / "latest").read_text().strip() == "global_step3"
    for file in files:
        found = difference(*(read(folder / "global_step3" / file, ranks) for folder in (ours, theirs)))
        left_out = [BUFFER_DTYPE, *(["[frozen_param_"] if ours.name.startswith("1") else [])]
        left_out += ["[optimizer_state_dict][param_slice_mappings]"] if ours.name.endswith("round-robin") else []
        assert [place for place in found if not place.startswith(tuple(left_out))] == [], (ours.name, file)


def check_states(name: str, ranks: int, folder: Path) -> None:
    """DeepSpeed holds on each rank what it held, then and at the end; and so did this project in full."""
    never, here, again = (load(folder / place, name) for place in "abc")
    for rank in range(ranks):
        held, resumed = (load(folder / place, f"{name}.rank{rank}") for place in "ac")
        for one in (*resumed.values(), held["saved"], held["after"]):
            clear_padding(one["masters"], one["states"], name, rank, ranks)
        for now, then in ((resumed["before"], held["saved"]), (resumed["after"], held["after"])):
            assert difference(contents(now), contents(then)) == [], (name, rank)
        assert held["saved"]["states"][0]["exp_avg_sq"].abs().sum() > 0
    assert again["losses"] == never["losses"][SAVED:], name
    assert again["before"]["facts"] == never["saved"]["facts"], name
    assert again["after"]["facts"] == never["after"]["facts"], name
    assert again["client"]["pair"] == (1, "two") and again["client"]["milestones"] == {10: "a"}
    assert torch.equal(again["client"]["best"], torch.tensor([1.5, 2.5]))
    if not name.endswith(("round-robin", "aligned", "small-groups")):
        every = [load(folder / "a", f"{name}.rank{rank}")["saved"] for rank in range(ranks)]
        for key in ("master", "exp_avg", "exp_avg_sq"):
            for parameter, value in in_full(every, key, stage3=name.startswith("3"), shapes=here["before"]).items():
                assert torch.equal(here["before"][f"{parameter} {key}"].float(), value), (name, parameter, key)


def in_full(
    held: list[dict[str, Any]], key: str, *, stage3: bool, shapes: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The masters or moments of every trained parameter, joined from what all ranks hold."""
    found = {}
    for number, names in enumerate(GROUPS):
        flats = [one["masters"][number] if key == "master" else one["states"][number][key] for one in held]
        position, joined = 0, torch.cat(flats)
        for name in names:
            shape, count = shapes[f"{name} param"].shape, shapes[f"{name} param"].numel()
            size = -(-count // len(held)) if stage3 else count
            pieces = [flat[position : position + size] for flat in flats] if stage3 else [joined[position:][:size]]
            found[name] = torch.cat(pieces)[:count].view(shape)
            position += size
    return found


def check_recovered_weights(folder: Path) -> None:
    """DeepSpeed's script makes of it what ours does."""
    found = {}
    for ours in (False, True):
        code = (
            "import sys, torch; from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as f;"
            "torch.save({k: v.clone() for k, v in f(sys.argv[1]).items()}, sys.argv[2])"
        )
        command = [sys.executable, "-c", code, str(folder), str(folder / f"{ours}.pt")]
        done = subprocess.run(command, env=environment(ours), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        found[ours] = torch.load(folder / f"{ours}.pt", weights_only=True)
    assert found[True].keys() == found[False].keys()
    assert [key for key, value in found[True].items() if not torch.equal(value, found[False][key])] == []
