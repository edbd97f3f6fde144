"""Training scripts of well-known methods, each written once and run with plain torch and with the engine.

A script is a function of a `Workbench`, which makes trainers, hands out batches and collects the values to compare. The
scripts do what such scripts do: touch weights, gradients and optimizers directly.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

import zero_core

ROWS, WIDTH = 6, 8


class PlainTrainer:
    """A model and its torch.optim optimizer in one process."""

    def __init__(self, bench: Workbench, model: nn.Module, optimizer: Optimizer) -> None:
        self.module, self.optimizer, self.bench = model, optimizer, bench

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def gathered(self, _parameters: Any, modifier_rank: int | None = None) -> Iterator[None]:
        yield

    def full(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.detach().clone()


class EngineTrainer:
    """The same through `zero_core.initialize`."""

    def __init__(self, bench: Workbench, model: nn.Module, optimizer: Optimizer) -> None:
        self.module = model
        config = {
            "train_micro_batch_size_per_gpu": ROWS // bench.world_size,
            "gradient_clipping": 0.0,
            "steps_per_print": 0,
            "zero_optimization": {
                "stage": bench.stage,
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 50,
                "unit_min_numel": bench.unit_min_numel,
                **({"offload_optimizer": {"device": "cpu"}} if bench.tier == "cpu" and bench.stage else {}),
            },
            **(
                {"bf16": {"enabled": True}}
                if bench.dtype == torch.bfloat16
                else {"data_types": {"param_dtype": "fp64"}}
            ),
        }
        self.engine, self.optimizer, _, _ = zero_core.initialize(model=model, optimizer=optimizer, config=config)

    def __call__(self, *args: Any) -> Any:
        return self.engine(*args)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def gathered(self, parameters: Any, modifier_rank: int | None = None) -> Any:
        return self.engine.gathered(parameters, modifier_rank)

    def full(self, parameter: nn.Parameter) -> torch.Tensor:
        if self.engine.partition.find(parameter) is None:
            return parameter.detach().clone()
        return self.engine.full_param(parameter)


class Workbench:
    """What a script gets: a way to make trainers, batches, and a place for what it computed."""

    def __init__(
        self,
        *,
        plain: bool,
        stage: int = 0,
        dtype: torch.dtype = torch.float64,
        tier: str = "device",
        unit_min: int = 1,
    ) -> None:
        self.plain, self.stage, self.dtype, self.tier, self.unit_min_numel = plain, stage, dtype, tier, unit_min
        self.rank = 0 if plain else dist.get_rank()
        self.world_size = 1 if plain else dist.get_world_size()
        self.values: dict[str, torch.Tensor] = {}
        self.trainers: list[Any] = []

    def trainer(self, model: nn.Module, chosen: Any = None, lr: float = 0.05, kind: str = "sgd") -> Any:
        """Wrap ``model``; ``chosen`` are the parameters that the optimizer gets."""
        parameters = list(model.parameters()) if chosen is None else chosen
        if kind == "sgd":
            optimizer: Optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=lr)
        made = (PlainTrainer if self.plain else EngineTrainer)(self, model, optimizer)
        self.trainers.append(made)
        return made

    def rows(self, number: int, *shape: int) -> torch.Tensor:
        """This rank's rows of a batch of normal numbers."""
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(ROWS, *(shape or (WIDTH,)), generator=generator, dtype=torch.float64)
        return whole[self._mine()].to(self.dtype)

    def tokens(self, number: int, vocabulary: int, *shape: int) -> torch.Tensor:
        """This rank's rows of a batch of numbers below ``vocabulary``."""
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, vocabulary, (ROWS, *shape), generator=generator)[self._mine()]

    def keep(self, trainer: Any, prefix: str = "") -> None:
        """Compare all weights of a trainer."""
        for name, parameter in trainer.module.named_parameters():
            self.values[prefix + name] = trainer.full(parameter).double()

    def close(self) -> None:
        """Destroy the engines."""
        if not self.plain:
            for trainer in self.trainers:
                trainer.engine.destroy()

    def _mine(self) -> slice:
        return slice(self.rank * ROWS // self.world_size, (self.rank + 1) * ROWS // self.world_size)


def mlp(seed: int = 0, width: int = WIDTH, out: int = WIDTH, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, out)).to(dtype)


SCRIPTS: dict[str, Callable[[Workbench], None]] = {}


def script(function: Callable[[Workbench], None]) -> Callable[[Workbench], None]:
    """Register a script by its name."""
    SCRIPTS[function.__name__] = function
    return function


# -- two models, two optimizers --------------------------------------------------------------------------------------


@script
def gan_discards_by_the_optimizers_zero_grad(bench: Workbench) -> None:
    d, g = bench.trainer(mlp(0, out=1)), bench.trainer(mlp(1))
    for step in range(4):
        d.optimizer.zero_grad()
        real, noise = bench.rows(step), bench.rows(100 + step)
        d.backward(F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean())
        d.step()
        g.optimizer.zero_grad()
        d.optimizer.zero_grad()
        g.backward(F.softplus(-d(g(noise))).mean())
        g.step()
        d.optimizer.zero_grad()
    bench.keep(d, "d."), bench.keep(g, "g.")


@script
def gan_discards_by_the_models_zero_grad(bench: Workbench) -> None:
    d, g = bench.trainer(mlp(0, out=1)), bench.trainer(mlp(1))
    for step in range(3):
        noise = bench.rows(100 + step)
        g.backward(F.softplus(-d(g(noise))).mean())
        g.step()
        d.module.zero_grad()
        d.backward(F.softplus(-d(bench.rows(step))).mean() + F.softplus(d(g(noise).detach())).mean())
        d.step()
    bench.keep(d, "d."), bench.keep(g, "g.")


@script
def gan_freezes_the_discriminator_by_requires_grad(bench: Workbench) -> None:
    d, g = bench.trainer(mlp(0, out=1)), bench.trainer(mlp(1))
    for step in range(3):
        noise = bench.rows(100 + step)
        d.module.requires_grad_(True)
        d.backward(F.softplus(-d(bench.rows(step))).mean() + F.softplus(d(g(noise).detach())).mean())
        d.step()
        d.module.requires_grad_(False)
        g.backward(F.softplus(-d(g(noise))).mean())
        g.step()
    d.module.requires_grad_(True)
    bench.keep(d, "d."), bench.keep(g, "g.")


@script
def wgan_clamps_weights_after_the_step(bench: Workbench) -> None:
    d = bench.trainer(mlp(0, out=1))
    for step in range(4):
        d.backward(d(bench.rows(step)).mean() - d(bench.rows(50 + step)).mean())
        d.step()
        for p in d.module.parameters():
            p.data.clamp_(-0.05, 0.05)
    bench.keep(d)


@script
def wgan_clamps_weights_inside_gathered(bench: Workbench) -> None:
    d = bench.trainer(mlp(0, out=1))
    for step in range(4):
        d.backward(d(bench.rows(step)).mean() - d(bench.rows(50 + step)).mean())
        d.step()
        with d.gathered(list(d.module.parameters()), modifier_rank=0):
            for p in d.module.parameters():
                p.data.clamp_(-0.05, 0.05)
    bench.keep(d)


@script
def distillation_from_a_frozen_teacher(bench: Workbench) -> None:
    teacher = mlp(7, dtype=bench.dtype)
    student = bench.trainer(mlp(1))
    for step in range(3):
        x = bench.rows(step)
        with torch.no_grad():
            wanted = teacher(x)
        student.backward(F.mse_loss(student(x), wanted))
        student.step()
    bench.keep(student)


# -- weights that follow other weights -------------------------------------------------------------------------------


class TwoEncoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = mlp(3), mlp(3)
        self.k.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            key = self.k(x)
        return F.mse_loss(self.q(x), key + 1)


@script
def moco_replaces_the_key_encoders_data(bench: Workbench) -> None:
    model = TwoEncoders()
    t = bench.trainer(model, list(model.q.parameters()))
    for step in range(4):
        with torch.no_grad():
            for q, k in zip(model.q.parameters(), model.k.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1
        t.backward(t(bench.rows(step)))
        t.step()
    bench.keep(t)


@script
def moco_inside_gathered(bench: Workbench) -> None:
    model = TwoEncoders()
    t = bench.trainer(model, list(model.q.parameters()))
    for step in range(4):
        with torch.no_grad(), t.gathered(list(model.parameters()), modifier_rank=0):
            for q, k in zip(model.q.parameters(), model.k.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1
        t.backward(t(bench.rows(step)))
        t.step()
    bench.keep(t)


class MomentumInForward(TwoEncoders):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1
        return super().forward(x)


@script
def moco_replaces_data_inside_forward(bench: Workbench) -> None:
    model = MomentumInForward()
    t = bench.trainer(model, list(model.q.parameters()))
    for step in range(4):
        t.backward(t(bench.rows(step)))
        t.step()
    bench.keep(t)


class ByolInForward(TwoEncoders):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
                k.mul_(0.9).add_(q, alpha=0.1)
        return super().forward(x)


@script
def byol_updates_the_target_in_place_inside_forward(bench: Workbench) -> None:
    model = ByolInForward()
    t = bench.trainer(model, list(model.q.parameters()))
    for step in range(4):
        t.backward(t(bench.rows(step)))
        t.step()
    bench.keep(t)


@script
def ema_in_a_deep_copy(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    with t.gathered(list(t.module.parameters())):
        ema = copy.deepcopy(t.module)
    for step in range(4):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50 + step)))
        t.step()
        with torch.no_grad(), t.gathered(list(t.module.parameters())):
            for e, p in zip(ema.parameters(), t.module.parameters(), strict=True):
                e.mul_(0.9).add_(p, alpha=0.1)
    bench.values["ema"] = parameters_to_vector(ema.parameters()).detach().double()
    bench.keep(t)


@script
def ema_without_gathered(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    ema = copy.deepcopy(t.module)
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50 + step)))
        t.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), t.module.parameters(), strict=True):
                e.mul_(0.9).add_(p, alpha=0.1)
    bench.values["ema"] = parameters_to_vector(ema.parameters()).detach().double()
    bench.keep(t)


@script
def swa_averaged_model(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    with t.gathered(list(t.module.parameters())):
        average = torch.optim.swa_utils.AveragedModel(t.module)
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50 + step)))
        t.step()
        with t.gathered(list(t.module.parameters())):
            average.update_parameters(t.module)
    bench.values["average"] = parameters_to_vector(average.module.parameters()).detach().double()
    bench.keep(t)


@script
def reptile_interpolates_weights(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for outer in range(2):
        before = [t.full(p).to(bench.dtype) for p in t.module.parameters()]
        for step in range(2):
            t.backward(F.mse_loss(t(bench.rows(10 * outer + step)), bench.rows(50)))
            t.step()
        with torch.no_grad():
            for old, p in zip(before, t.module.parameters(), strict=True):
                p.data = old + 0.5 * (t.full(p).to(bench.dtype) - old)
    t.backward(F.mse_loss(t(bench.rows(99)), bench.rows(50)))
    t.step()
    bench.keep(t)


@script
def evolution_strategy_writes_a_vector(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        with t.gathered(list(t.module.parameters())):
            flat = parameters_to_vector(t.module.parameters()).detach().clone()
        noise = torch.randn(flat.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        vector_to_parameters(flat + 0.01 * noise.to(flat.dtype), t.module.parameters())
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


@script
def early_stopping_restores_the_best_state_dict(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    with t.gathered(list(t.module.parameters())):
        best = copy.deepcopy(t.module.state_dict())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    with t.gathered(list(t.module.parameters()), modifier_rank=0):
        t.module.load_state_dict(best)
    t.backward(F.mse_loss(t(bench.rows(9)), bench.rows(50)))
    t.step()
    bench.keep(t)


@script
def early_stopping_without_gathered(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    best = copy.deepcopy(t.module.state_dict())
    for step in range(2):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    t.module.load_state_dict(best)
    t.backward(F.mse_loss(t(bench.rows(9)), bench.rows(50)))
    t.step()
    bench.keep(t)


@script
def dtype_round_trip_between_steps(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
        t.module.float()
        t.module.to(bench.dtype)
    bench.keep(t)


@script
def no_op_moves_between_steps(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
        t.module.to("cpu").to(bench.dtype)
        t.module.train().eval().train()
    bench.keep(t)


@script
def reinitialises_a_layer_between_steps(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(2):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
        torch.manual_seed(step)
        t.module[2].reset_parameters()
    t.backward(F.mse_loss(t(bench.rows(5)), bench.rows(50)))
    t.step()
    bench.keep(t)


@script
def zeroes_a_bias_by_fill(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(2):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
        nn.init.zeros_(t.module[2].bias)
        t.module[4].bias.data.fill_(0.25)
    t.backward(F.mse_loss(t(bench.rows(5)), bench.rows(50)))
    t.step()
    bench.keep(t)


@script
def prunes_by_magnitude(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(2):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    weight = t.module[2].weight
    mask = weight.abs() > 0.1
    with torch.no_grad():
        weight.data = weight.data * mask
    t.backward(F.mse_loss(t(bench.rows(5)), bench.rows(50)))
    t.step()
    bench.values["kept"] = mask.double().mean().view(1)
    bench.keep(t)


# -- gradients -------------------------------------------------------------------------------------------------------


@script
def dino_cancels_the_last_layers_gradient(bench: Workbench) -> None:
    t = bench.trainer(mlp(), kind="adamw")
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        if step < 2:
            for p in t.module[4].parameters():
                p.grad = None
        t.step()
    bench.keep(t)


@script
def pcgrad_projects_and_assigns(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    parameters = list(t.module.parameters())
    for step in range(3):
        out = t(bench.rows(step))
        first = torch.autograd.grad(out.square().mean(), parameters, retain_graph=True)
        second = torch.autograd.grad((out - bench.rows(50)).abs().mean(), parameters)
        for p, a, b in zip(parameters, first, second, strict=True):
            p.grad = a + 0.5 * b
        t.step()
    bench.keep(t)


@script
def scales_gradients_in_place_before_the_step(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        for p in t.module.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        t.step()
    bench.keep(t)


@script
def clips_by_torchs_norm(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        torch.nn.utils.clip_grad_norm_(t.module.parameters(), 0.01)
        t.step()
    bench.keep(t)


@script
def clips_by_torchs_value(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        torch.nn.utils.clip_grad_value_(t.module.parameters(), 0.001)
        t.step()
    bench.keep(t)


@script
def freezes_one_layers_gradient_by_a_tensor_hook(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    t.module[2].weight.register_hook(lambda gradient: gradient * 0.1)
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


@script
def masks_gradients_in_a_post_accumulate_hook(bench: Workbench) -> None:
    t = bench.trainer(mlp())

    def halve(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)

    t.module[2].weight.register_post_accumulate_grad_hook(halve)
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


@script
def skips_a_bad_batch(bench: Workbench) -> None:
    t = bench.trainer(mlp(), kind="adamw")
    for step in range(5):
        loss = F.mse_loss(t(bench.rows(step)), bench.rows(50))
        t.backward(loss)
        if step % 2:
            t.optimizer.zero_grad()
            continue
        t.step()
    bench.keep(t)


@script
def adds_a_penalty_on_a_weight_to_the_loss(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        loss = F.mse_loss(t(bench.rows(step)), bench.rows(50)) + 0.01 * t.module[2].weight.pow(2).sum()
        t.backward(loss)
        t.step()
    bench.keep(t)


@script
def adds_a_penalty_over_all_parameters(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        loss = F.mse_loss(t(bench.rows(step)), bench.rows(50))
        loss = loss + 0.01 * sum(p.abs().sum() for p in t.module.parameters())
        t.backward(loss)
        t.step()
    bench.keep(t)


@script
def elastic_weight_consolidation(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    with t.gathered(list(t.module.parameters())):
        anchor = {n: p.detach().clone() for n, p in t.module.named_parameters()}
    for step in range(3):
        loss = F.mse_loss(t(bench.rows(step)), bench.rows(50))
        for n, p in t.module.named_parameters():
            loss = loss + 0.1 * (p - anchor[n]).square().sum()
        t.backward(loss)
        t.step()
    bench.keep(t)


@script
def gradient_penalty_of_the_input(bench: Workbench) -> None:
    t = bench.trainer(mlp(out=1))
    for step in range(3):
        x = bench.rows(step).requires_grad_(True)
        out = t(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        t.backward(out.mean() + (slope.norm(dim=1) - 1).square().mean())
        t.step()
    bench.keep(t)


@script
def sharpness_aware_minimisation(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        x, y = bench.rows(step), bench.rows(50)
        t.backward(F.mse_loss(t(x), y))
        with torch.no_grad():
            moved = [0.01 * torch.sign(p.grad) for p in t.module.parameters()]
            for p, e in zip(t.module.parameters(), moved, strict=True):
                p.add_(e)
        t.zero_grad()
        t.backward(F.mse_loss(t(x), y))
        with torch.no_grad():
            for p, e in zip(t.module.parameters(), moved, strict=True):
                p.sub_(e)
        t.step()
    bench.keep(t)


# -- optimizer -------------------------------------------------------------------------------------------------------


@script
def unfreezes_layer_by_layer(bench: Workbench) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    t = bench.trainer(model, [p for p in model.parameters() if p.requires_grad], kind="adamw")
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
            t.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


@script
def loads_a_plain_optimizer_state(bench: Workbench) -> None:
    twin = mlp()
    other = torch.optim.AdamW(twin.parameters(), lr=0.05)
    for step in range(2):
        other.zero_grad()
        generator = torch.Generator().manual_seed(step)
        F.mse_loss(
            twin(torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)), torch.zeros(4, WIDTH)
        ).backward()
        other.step()
    t = bench.trainer(mlp(), kind="adamw")
    t.optimizer.load_state_dict(other.state_dict())
    for step in range(2):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


@script
def learning_rate_finder_goes_back(bench: Workbench) -> None:
    t = bench.trainer(mlp(), kind="adamw")
    with t.gathered(list(t.module.parameters())):
        weights = copy.deepcopy(t.module.state_dict())
    states = copy.deepcopy(t.optimizer.state_dict())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        for group in t.optimizer.param_groups:
            group["lr"] *= 1.5
        t.step()
    with t.gathered(list(t.module.parameters()), modifier_rank=0):
        t.module.load_state_dict(weights)
    t.optimizer.load_state_dict(states)
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


@script
def catches_an_error_in_forward(bench: Workbench) -> None:
    t = bench.trainer(mlp(), kind="adamw")
    for step in range(4):
        try:
            width = WIDTH + 1 if step == 1 else WIDTH
            loss = F.mse_loss(t(bench.rows(step, width)), bench.rows(50))
        except RuntimeError:
            t.optimizer.zero_grad()
            continue
        t.backward(loss)
        t.step()
    bench.keep(t)


# -- modules ---------------------------------------------------------------------------------------------------------


class SkipBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64) / 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:
        return F.linear(x, self.weight), self.bias


class Megatron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SkipBias() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h, bias = layer(x)
            x = x + torch.tanh(h + bias)
        return x


@script
def megatron_returns_its_bias(bench: Workbench) -> None:
    t = bench.trainer(Megatron())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embedding = nn.Embedding(11, WIDTH, max_norm=0.5).double()
        self.out = nn.Linear(WIDTH, 11).double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(tokens))


@script
def embedding_with_a_maximal_norm(bench: Workbench) -> None:
    t = bench.trainer(Bounded())
    for step in range(3):
        tokens = torch.arange(11).repeat(1, 2)  # every rank meets every row
        own = bench.tokens(step, 11, 22)
        t.backward(F.cross_entropy(t(tokens.expand(own.shape[0], -1)).flatten(0, 1), own.flatten()))
        t.step()
    bench.keep(t)


@script
def embedding_with_a_maximal_norm_and_ranks_that_differ(bench: Workbench) -> None:
    t = bench.trainer(Bounded())
    for step in range(3):
        tokens = bench.tokens(step, 11, 2)
        t.backward(F.cross_entropy(t(tokens).flatten(0, 1), bench.tokens(50, 11, 2).flatten()))
        t.step()
    bench.keep(t)


class Clamping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.inner = nn.Linear(WIDTH, WIDTH).double()
        self.temperature = nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature.data.clamp_(max=2.0)
        with torch.no_grad():
            self.inner.weight.clamp_(-0.2, 0.2)
        return self.inner(x) * self.temperature.sum()


@script
def clamps_its_own_weights_in_forward(bench: Workbench) -> None:
    t = bench.trainer(Clamping())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.encode, self.decode = mlp(1), mlp(2)
        self.codes = nn.Parameter(torch.randn(5, WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encode(x)
        nearest = torch.cdist(h, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codes.mul_(0.99).add_(0.01)
        q = self.codes[nearest]
        return self.decode(h + (q - h).detach())


@script
def vq_vae_moves_its_codebook_in_forward(bench: Workbench) -> None:
    t = bench.trainer(Codebook())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.enter, self.leave = (
            nn.Linear(WIDTH, WIDTH, bias=False).double(),
            nn.Linear(WIDTH, WIDTH, bias=False).double(),
        )
        self.leave.weight.data = self.enter.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.enter(x)))


@script
def weights_tied_by_storage(bench: Workbench) -> None:
    model = Tied()
    t = bench.trainer(model)
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


@script
def weights_tied_by_a_transposed_view(bench: Workbench) -> None:
    model = Tied()
    model.leave.weight = nn.Parameter(model.enter.weight.data.t())
    t = bench.trainer(model)
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.one = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH).double())
        self.two = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


@script
def parametrizations(bench: Workbench) -> None:
    t = bench.trainer(Parametrized())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


@script
def functional_call_with_its_own_parameters(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        x = bench.rows(step)
        names = dict(t.module.named_parameters())
        shifted = {name: p * 1.01 for name, p in names.items()}
        loss = F.mse_loss(torch.func.functional_call(t.module, shifted, (x,)), bench.rows(50))
        t.backward(loss + 0.0 * t(x).sum())
        t.step()
    bench.keep(t)


class HyperNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.maker = mlp(1), mlp(2, out=12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.maker(x).mean(0)
        return torch.func.functional_call(self.base, {"2.bias": bias + self.base[2].bias}, (x,))


@script
def hypernetwork(bench: Workbench) -> None:
    t = bench.trainer(HyperNetwork())
    for step in range(1):
        whole = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        t.backward(F.mse_loss(t(whole), torch.zeros(4, WIDTH, dtype=torch.float64)))
        t.step()
    bench.keep(t)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True).double()
        self.out = nn.Linear(WIDTH, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


@script
def lstm_flattens_its_parameters(bench: Workbench) -> None:
    t = bench.trainer(Recurrent())
    for step in range(3):
        t.module.lstm.flatten_parameters()
        t.backward(t(bench.rows(step, 4, WIDTH)).square().mean())
        t.step()
    bench.keep(t)


class Stochastic(nn.Module):
    """Calls one layer through a bound method that was kept, and another through a closure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.a, self.b = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        weight = self.b.weight
        self._kept = self.a.forward
        self._closure = lambda x: F.linear(x, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._closure(torch.tanh(self._kept(x))) + self.b.bias


@script
def forward_kept_as_a_method_and_a_closure(bench: Workbench) -> None:
    t = bench.trainer(Stochastic())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


class Regularised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return self.net(x).square().mean() + 0.01 * penalty


@script
def iterates_over_its_parameters_in_forward(bench: Workbench) -> None:
    t = bench.trainer(Regularised())
    for step in range(3):
        t.backward(t(bench.rows(step)))
        t.step()
    bench.keep(t)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = mlp(1)
        self.compiled = torch.jit.script(mlp(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiled(self.plain(x))


@script
def torchscript_submodule(bench: Workbench) -> None:
    t = bench.trainer(Scripted())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
    bench.keep(t)


@script
def swaps_a_layer_between_steps(bench: Workbench) -> None:
    t = bench.trainer(mlp())
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        t.step()
        if step == 0:
            torch.manual_seed(77)
            t.module[2] = nn.Linear(12, 12).double()
    bench.keep(t)


# -- run -------------------------------------------------------------------------------------------------------------


def run_plain(name: str) -> dict[str, torch.Tensor]:
    """What the script computes with plain torch, on the batch of all ranks."""
    bench = Workbench(plain=True)
    SCRIPTS[name](bench)
    return bench.values


def run_sharded(name: str, stage: int, tier: str, unit_min: int) -> tuple[str, dict[str, torch.Tensor]]:
    """What the script computes with the engine on this rank: (what was refused, its values)."""
    bench = Workbench(plain=False, stage=stage, tier=tier, unit_min=unit_min)
    try:
        SCRIPTS[name](bench)
    except Exception as refusal:  # the caller judges it
        return f"{type(refusal).__name__}: {refusal}", {}
    bench.close()
    return "", bench.values
