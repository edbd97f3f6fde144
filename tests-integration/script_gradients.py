"""Scripts with several models or losses, and scripts that touch gradients and the optimizer."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from script_bench import WIDTH, Scripts, Workbench, mlp
from torch import nn

script = Scripts()


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


@script
def steps_between_a_forward_and_its_backward(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    early = t(bench.rows(0)).square().mean()
    t.backward(F.mse_loss(t(bench.rows(1)), bench.rows(50)))
    t.step()
    try:
        t.backward(early)
    except RuntimeError:
        bench.values["refused"] = torch.ones(1)
    t.zero_grad()
    t.backward(F.mse_loss(t(bench.rows(2)), bench.rows(50)))
    t.step()
    bench.keep(t)


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(1), mlp(2)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return self.first(x) if first else self.second(x)


@script
def keeps_the_graph_of_one_part_while_the_other_takes_a_step(bench: Workbench) -> None:
    t = bench.trainer(TwoParts().to(bench.dtype))
    early = t(bench.rows(0), True)
    t.backward(F.mse_loss(t(early.detach(), False), bench.rows(50)))
    t.step()
    t.backward(early.square().mean())
    t.step()
    bench.keep(t)
