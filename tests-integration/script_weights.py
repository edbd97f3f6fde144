"""Scripts that write weights, or have weights follow other weights."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from script_bench import WIDTH, Scripts, Workbench, mlp
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

script = Scripts()


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


@script
def grows_an_embedding_through_data(bench: Workbench) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).to(bench.dtype)
    t = bench.trainer(model)
    t.optimizer.param_groups[0]["momentum"] = 0.0
    with t.gathered([model[0].weight]):
        model[0].weight.data = torch.cat([model[0].weight.data, torch.zeros(2, WIDTH, dtype=bench.dtype)])
    for step in range(2):
        t.backward(t(bench.tokens(step, 10, 4)).square().mean())
        t.step()
    bench.keep(t)
