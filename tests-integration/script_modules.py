"""Scripts whose modules do unusual things with their parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from script_bench import WIDTH, Scripts, Workbench, mlp
from torch import nn

script = Scripts()


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
    for _ in range(3):  # TorchScript rounds the first passes of a class in a process differently: it profiles them
        Scripted().to(bench.dtype)(bench.rows(0)).square().mean().backward()
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
