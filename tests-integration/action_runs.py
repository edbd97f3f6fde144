"""A case with plain torch and with the engine, used as a script would use them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from action_cases import ROWS, Case, Model, batch, build, groups_of, optimizer_over, parameter_number
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

import zero_core

HALVING = ("in place", "gathered in place", "alias")
KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def freeze_listed(case: Case, model: Model) -> None:
    """Freeze the parameter that the optimizer lists and that joins later."""
    if case.late == "listed":
        model.late.requires_grad_(False)


def name_of(model: Model, parameter: torch.nn.Parameter) -> str:
    return next(name for name, p in model.named_parameters() if p is parameter)


def states_of(case: Case, optimizer: Optimizer, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """An optimizer's states by parameter and key, zeros before the first step; ``names``: by id of its tensors."""
    found = {}
    for tensor in (p for group in optimizer.param_groups for p in group["params"]):
        for key in KEYS[case.optimizer]:
            state = optimizer.state.get(tensor, {}).get(key)
            found[f"{names[id(tensor)]}.{key}"] = torch.zeros_like(tensor) if state is None else state.detach().clone()
    return found


@dataclass
class Plain:
    """One process with torch.optim on the batch of all ranks."""

    case: Case
    model: Model = field(init=False)
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model = build(self.case)
        self.optimizer = optimizer_over(self.case, groups_of(self.case, self.model))
        self.slots: dict[int | str, Any] = {}
        freeze_listed(self.case, self.model)

    def forward(self, number: int) -> torch.Tensor:
        return self.model(*batch(self.case, number))

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.case.accumulation).backward()

    def own_backward(self, loss: torch.Tensor) -> None:
        self.backward(loss)

    def penalised(self, loss: torch.Tensor, number: int) -> torch.Tensor:
        return loss + 0.01 * parameter_number(self.model, number).square().sum()

    def step(self, boundary: bool) -> None:
        if boundary:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def discard(self, how: str, *, set_to_none: bool = True) -> None:
        (self.optimizer if how == "optimizer" else self.model).zero_grad(set_to_none)

    def halve_gradient(self, number: int) -> None:
        gradient = parameter_number(self.model, number).grad
        if gradient is not None:
            gradient.mul_(0.5)

    def clip(self, how: str, bound: float) -> None:
        if how == "value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), bound)
        elif how == "norm":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), bound)
        else:  # the engine's clips what the optimizer updates
            chosen = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(chosen, bound)

    def write(self, how: str, number: int, value: torch.Tensor) -> None:
        parameter = parameter_number(self.model, number)
        with torch.no_grad():
            if how in HALVING:
                parameter.mul_(0.5)
            elif how == "vector":
                vector_to_parameters(parameters_to_vector(self.model.parameters()) * 0.5, self.model.parameters())
            else:
                parameter.copy_(value)

    def save(self, slot: int | str) -> None:
        self.slots[slot] = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, slot: int | str) -> None:
        weights, states = self.slots[slot]
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(copy.deepcopy(states))
        self.model.zero_grad()

    def evaluate(self, number: int, rank: int, world_size: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(*batch(self.case, number, rank, world_size))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def published(self) -> dict[str, torch.Tensor]:
        return self.weights()

    def states(self) -> dict[str, torch.Tensor]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        return states_of(self.case, self.optimizer, names)

    def close(self) -> None:
        """Nothing is open."""


class Sharded:
    """The engine on this rank, used as a script would use it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folder = folder
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = build(case)
        zero: dict[str, Any] = {
            "stage": case.stage,
            "stage3_param_persistence_threshold": case.persistence,
            "stage3_prefetch_bucket_size": 50,
            "unit_min_numel": case.unit_min_numel,
        }
        precision: dict[str, Any] = {"data_types": {"param_dtype": "fp64"}}
        if case.dtype is torch.bfloat16:  # per micro-batch all stages have the same bits
            precision = {"bf16": {"enabled": True}, "reduce_each_micro_batch": True}
        if case.on_a_tier:
            where = {"device": case.tier} | ({"nvme_path": str(folder)} if case.tier == "nvme" else {})
            zero["offload_optimizer"] = where
            if case.tier == "nvme" and case.stage == 3:
                zero["offload_param"] = where
        self.engine, self.optimizer, _, _ = zero_core.initialize(
            model=self.model,
            optimizer=optimizer_over(case, groups_of(case, self.model)),
            config={
                "train_micro_batch_size_per_gpu": ROWS // self.world_size,
                "gradient_accumulation_steps": case.accumulation,
                "gradient_clipping": 0.0,
                "steps_per_print": 0,
                "zero_optimization": zero,
                **precision,
            },
            device=case.device,
        )
        freeze_listed(case, self.model)

    def forward(self, number: int) -> torch.Tensor:
        return self.engine(*batch(self.case, number, self.rank, self.world_size))

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def own_backward(self, loss: torch.Tensor) -> None:
        (loss / self.case.accumulation).backward()

    def penalised(self, loss: torch.Tensor, number: int) -> torch.Tensor:
        return loss + 0.01 * parameter_number(self.model, number).square().sum()

    def step(self, boundary: bool) -> None:
        self.engine.step()

    def discard(self, how: str, *, set_to_none: bool = True) -> None:
        {"engine": self.engine, "optimizer": self.optimizer, "model": self.model}[how].zero_grad(set_to_none)

    def halve_gradient(self, number: int) -> None:
        parameter = parameter_number(self.model, number)
        gradient = self.engine.full_grad(parameter)
        if gradient is not None:
            self.engine.set_full_grad(parameter, gradient * 0.5)

    def clip(self, how: str, bound: float) -> None:
        if how == "engine":
            self.engine.clip_grad_norm_(bound)
        elif how == "value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), bound)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), bound)

    def write(self, how: str, number: int, value: torch.Tensor) -> None:
        parameter = parameter_number(self.model, number)
        value = value.to(parameter.device, parameter.dtype)
        with torch.no_grad():
            if how == "in place":
                parameter.mul_(0.5)
            elif how == "gathered in place":
                with self.engine.gathered(parameter, modifier_rank=0):
                    parameter.mul_(0.5)
            elif how == "gathered data":
                with self.engine.gathered(parameter, modifier_rank=0):
                    parameter.data = value.clone()
            elif how == "vector":
                with self.engine.gathered(list(self.model.parameters())):
                    flat = parameters_to_vector(self.model.parameters()) * 0.5
                vector_to_parameters(flat, self.model.parameters())
            elif how == "data":
                parameter.data = value.clone()
            elif how == "copy":
                parameter.data.copy_(value)
            elif how == "alias":
                alias = parameter.data
                alias.mul_(0.5)
            elif how == "load_state_dict":
                with self.engine.gathered(list(self.model.parameters()), modifier_rank=0):
                    values = self.model.state_dict()
                    values[name_of(self.model, parameter)] = value
                    self.model.load_state_dict(values)
            else:
                self.engine.set_full_param(parameter, value)

    def save(self, slot: int | str) -> None:
        self.engine.save_checkpoint(self.folder, tag=f"slot{slot}")

    def load(self, slot: int | str) -> None:
        self.engine.load_checkpoint(self.folder, tag=f"slot{slot}")

    def evaluate(self, number: int) -> torch.Tensor:
        with torch.no_grad():
            return self.engine(*batch(self.case, number, self.rank, self.world_size))

    def weights(self) -> dict[str, torch.Tensor]:
        found = self.engine.partition.find
        return {
            name: self.engine.full_param(p) if found(p) else p.detach().clone()
            for name, p in self.model.named_parameters()
        }

    def published(self) -> dict[str, torch.Tensor]:
        """Return what forward reads."""
        with self.engine.gathered(list(self.model.parameters())):
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def states(self) -> dict[str, torch.Tensor]:
        listed = {id(p) for group in groups_of(self.case, self.model) for p in group["params"]}
        return {
            f"{name}.{key}": self.engine.full_state(p, key)
            for name, p in self.model.named_parameters()
            if id(p) in listed
            for key in KEYS[self.case.optimizer]
        }

    def close(self) -> None:
        self.engine.destroy()


Run = Plain | Sharded
