"""The torch optimizers: torch's trajectories, torch's state dicts, torch's habits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import distributed  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402

from zero_optim_kernels.torch import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULamb, CPULion  # noqa: E402

PAIRS = [
    (CPUAdam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (CPUAdam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (CPUAdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "maximize": True}),
    (CPUAdagrad, torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.1}),
    (CPUAdagrad, torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.3}),
    (CPUSGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    (CPUSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (CPUSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
]
EVERY_PAIR = pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS, ids=lambda v: getattr(v, "__name__", None))
EVERY_CLASS = pytest.mark.parametrize("ours", [CPUAdam, CPUAdamW, CPUAdagrad, CPUSGD, CPULion, CPULamb])


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((13, 7), (1,), (300, 5), (), (0, 3), (257,))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(groups: list[list[torch.nn.Parameter]], step: int, skip: tuple[int, ...] = ()) -> None:
    """The gradient of a quadratic bowl plus noise, from the last group's values, the same for all groups."""
    generator = torch.Generator().manual_seed(1000 + step)
    for index, members in enumerate(zip(*groups, strict=True)):
        noise = torch.randn(members[0].shape, generator=generator).to(members[0].dtype)
        gradient = noise + 0.3 * members[-1].detach()
        for member in members:
            member.grad = None if index in skip else gradient.clone()


def distance(a: list[torch.nn.Parameter], b: list[torch.nn.Parameter]) -> float:
    """The largest relative distance of a whole parameter list."""
    flat = [torch.cat([p.detach().double().ravel() for p in params]) for params in (a, b)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@EVERY_PAIR
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_two_hundred_steps_follow_torch(ours: Any, theirs: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    mine, wanted = parameters(dtype), parameters(dtype)
    a, b = ours(mine, **options), theirs(wanted, **options)
    bound = 1e-6 if dtype == torch.float32 else 1e-13
    for step in range(200):
        set_gradients([mine, wanted], step, skip=(2,) if step % 7 == 3 else (0, 5) if step < 4 else ())
        a.step()
        b.step()
        assert distance(mine, wanted) <= bound, step


@EVERY_PAIR
def test_state_dicts_go_both_ways(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    mine, wanted = parameters(), parameters()
    a, b = ours(mine, **options), theirs(wanted, **options)
    for step in range(3):
        set_gradients([mine, wanted], step)
        a.step()
        b.step()
    assert set(a.state_dict()["param_groups"][0]) == set(b.state_dict()["param_groups"][0])
    saved_by_us, saved_by_torch = a.state_dict(), b.state_dict()
    a, b = ours(mine, lr=9.0), theirs(wanted, lr=9.0)
    a.load_state_dict(saved_by_torch)
    b.load_state_dict(saved_by_us)
    for step in range(3, 13):
        set_gradients([mine, wanted], step)
        a.step()
        b.step()
    assert distance(mine, wanted) <= 1e-6


def test_saved_step_numbers_are_tensors_of_their_own() -> None:
    params = parameters()
    optimizer = CPUAdamW(params)
    set_gradients([params], 0)
    optimizer.step()
    saved = optimizer.state_dict()["state"]
    assert all(float(state["step"]) == 1.0 for state in saved.values())
    assert len({state["step"].data_ptr() for state in saved.values()}) == len(saved)


@EVERY_CLASS
def test_parameters_without_a_gradient_are_left_alone(ours: Any) -> None:
    params = parameters()
    optimizer = ours(params, lr=0.1)
    before = [p.detach().clone() for p in params]
    set_gradients([params], 0, skip=(0, 3))
    optimizer.step()
    for index, (param, old) in enumerate(zip(params, before, strict=True)):
        assert torch.equal(param, old) == (index in (0, 3) or param.numel() == 0)
    if ours is not CPUAdagrad:
        assert params[0] not in optimizer.state


def test_schedulers_closures_and_groups_work_as_in_torch() -> None:
    mine, wanted = parameters(), parameters()
    runs = []
    for params, cls in ((mine, CPUAdamW), (wanted, torch.optim.AdamW)):
        groups = [{"params": params[:2], "lr": 1e-1}, {"params": params[2:], "weight_decay": 0.5, "betas": (0.5, 0.9)}]
        optimizer = cls(groups, lr=1e-2)
        runs.append((params, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)))
    for _ in range(6):
        for params, optimizer, scheduler in runs:

            def closure(params: Any = params, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = sum((p**2).sum() for p in params)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            assert float(loss) > 0
            scheduler.step()
    assert distance(mine, wanted) <= 1e-6


def test_names_and_tensor_learning_rates_are_taken() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = CPUAdamW(model.named_parameters(), lr=torch.tensor(0.5))
    model(torch.ones(1, 3)).sum().backward()
    before = model.bias.detach().clone()
    optimizer.step()
    assert torch.allclose(model.bias, before * (1 - 0.5 * 0.01) - 0.5)


def test_moved_parameters_and_replaced_state_are_noticed() -> None:
    mine, wanted = parameters(), parameters()
    a, b = CPUAdamW(mine, lr=1e-2), torch.optim.AdamW(wanted, lr=1e-2)
    for step in range(6):
        set_gradients([mine, wanted], step)
        if step == 2:
            mine[0].data = mine[0].data.clone()
        if step == 3:
            a.state[mine[2]]["exp_avg"] = a.state[mine[2]]["exp_avg"].clone()
            a.state[mine[5]] = {key: value.clone() for key, value in a.state[mine[5]].items()}
        if step == 4:
            for optimizer, params in ((a, mine), (b, wanted)):
                optimizer.state[params[0]]["exp_avg"].zero_()
        a.step()
        b.step()
    assert distance(mine, wanted) <= 1e-6


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copies_of_an_optimizer_go_on_by_themselves(duplicate: Any) -> None:
    params = parameters()
    optimizer = CPUAdamW(params, lr=1e-2, state_dtype="int8", seed=3)
    set_gradients([params], 0)
    optimizer.step()
    twin = duplicate(optimizer)
    copies = twin.param_groups[0]["params"]
    set_gradients([params, copies], 1)
    optimizer.step()
    twin.step()
    for a, b in zip(params, copies, strict=True):
        assert torch.equal(a, b) and (a is not b)


@EVERY_CLASS
@pytest.mark.parametrize("saved_as", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("loaded_as", ["float32", "bfloat16", "int8"])
def test_state_of_any_precision_loads_into_any_other(ours: Any, saved_as: str, loaded_as: str) -> None:
    options = {"momentum": 0.9} if ours is CPUSGD else {}
    params = parameters()
    source = ours(params, lr=1e-2, state_dtype=saved_as, **options)
    for step in range(3):
        set_gradients([params], step)
        source.step()
    saved = copy.deepcopy(source.state_dict())
    target = ours(params, lr=1e-2, state_dtype=loaded_as, **options)
    target.load_state_dict(saved)
    values = []
    for optimizer in (source, target):
        plain = ours(params, lr=1e-2, **options)
        plain.load_state_dict(optimizer.state_dict())
        values.append(plain.state[params[2]])
    for name, value in values[0].items():
        assert torch.allclose(value, values[1][name], rtol=0.13, atol=0.02 * float(value.abs().max())), name
        assert loaded_as != saved_as or torch.equal(value, values[1][name])
    set_gradients([params], 9)
    target.step()


def test_bf16_parameters_keep_float32_state_through_a_save() -> None:
    params = parameters(torch.bfloat16)
    optimizer = CPUAdamW(params, lr=1e-2, bf16_weights="exact")
    for step in range(3):
        set_gradients([params], step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = CPUAdamW(params, lr=1e-2, bf16_weights="exact")
    other.load_state_dict(saved)
    for param in params:
        for name, value in optimizer.state[param].items():
            assert torch.equal(other.state[param][name], value) and other.state[param][name].dtype == value.dtype


@EVERY_CLASS
def test_exact_bf16_weights_follow_the_float32_run(ours: Any) -> None:
    coded = parameters(torch.bfloat16)
    single = [torch.nn.Parameter(p.detach().float()) for p in coded]
    a, b = ours(coded, lr=1e-3, bf16_weights="exact"), ours(single, lr=1e-3)
    for step in range(30):
        set_gradients([single], step)
        for p, q in zip(coded, single, strict=True):
            p.grad = q.grad.bfloat16()
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(coded, single, strict=True):
        assert torch.all((p.float() - q).abs() <= q.abs() * 2**-8 + 1e-30)
        low = a.state[p]["param_low"].to(torch.int64)
        joined = ((p.view(torch.int16).to(torch.int64) << 16) + low).to(torch.int32).view(torch.float32)
        assert torch.equal(joined, q)


def test_stochastic_bf16_weights_do_not_lose_small_updates() -> None:
    weight = torch.nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = CPUSGD([weight], lr=1e-4)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert abs(float(weight.detach().float().mean()) - 0.99) < 2e-4


def lion_of_the_paper(x: np.ndarray, m: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """arXiv 2302.06675, algorithm 2, line by line, with lr 1e-3, betas (0.9, 0.99) and decay 0.1."""
    update = np.sign(0.9 * m + 0.1 * g)
    return x - 1e-3 * (update + 0.1 * x), 0.99 * m + 0.01 * g


def lamb_of_the_paper(
    x: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, t: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """arXiv 1904.00962, algorithm 2, line by line, with lr 1e-2, betas (0.9, 0.999), eps 1e-6 and decay 0.1."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
    direction = r + 0.1 * x
    norms = np.linalg.norm(x), np.linalg.norm(direction)
    ratio = norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0
    return x - 1e-2 * ratio * direction, m, v


def test_lion_and_lamb_are_their_papers() -> None:
    lamb, lion = parameters(), parameters()
    a, b = CPULamb(lamb, lr=1e-2, weight_decay=0.1), CPULion(lion, lr=1e-3, weight_decay=0.1)
    start = [p.detach().double().numpy() for p in parameters()]
    for_lamb = [(x, np.zeros_like(x), np.zeros_like(x)) for x in start]
    for_lion = [(x, np.zeros_like(x)) for x in start]
    for step in range(1, 51):
        set_gradients([lamb, lion], step)
        grads = [p.grad.double().numpy().copy() for p in lamb]
        a.step()
        b.step()
        for_lamb = [lamb_of_the_paper(*state, g, step) for state, g in zip(for_lamb, grads, strict=True)]
        for_lion = [lion_of_the_paper(*state, g) for state, g in zip(for_lion, grads, strict=True)]
    for params, wanted in ((lamb, for_lamb), (lion, for_lion)):
        for p, (x, *_) in zip(params, wanted, strict=True):
            np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-5, atol=1e-6)


@EVERY_PAIR
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_go_where_they_go_in_torch(ours: Any, theirs: Any, options: dict[str, Any], bad: float) -> None:
    mine, wanted = parameters(), parameters()
    a, b = ours(mine, **options), theirs(wanted, **options)
    for step in range(4):
        set_gradients([mine, wanted], step)
        for params in (mine, wanted):
            if step == 1:
                params[2].grad[7] = bad
            if step == 2:
                params[5].data[[0, 16, 256]] = bad
        a.step()
        b.step()
        pairs = [(p.detach(), q.detach()) for p, q in zip(mine, wanted, strict=True)]
        for p, q in zip(mine, wanted, strict=True):
            names = [name for name, value in b.state[q].items() if name != "step" and value is not None]
            pairs += [(a.state[p][name], b.state[q][name]) for name in names]
        for ours_, theirs_ in pairs:
            torch.testing.assert_close(ours_, theirs_, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_what_wraps_torch_optimizers_takes_these(tmp_path: Path) -> None:
    mine, wanted = parameters(), parameters()
    runs = []
    for params, cls in ((mine, CPUAdamW), (wanted, torch.optim.AdamW)):
        optimizer = cls(params, lr=1e-2)
        optimizer.register_step_post_hook(lambda optimizer, *_: setattr(optimizer, "hooked", True))
        runs.append((params, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**10)))
    for bad in (False, True, False):
        for params, optimizer, scaler in runs:
            loss = sum((p**2).sum() for p in params) * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert distance(mine, wanted) <= 1e-6 and runs[0][1].hooked
    assert runs[0][2].get_scale() == runs[1][2].get_scale() == 2.0**9
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        zero = ZeroRedundancyOptimizer(mine, optimizer_class=CPUAdamW, lr=1e-2, state_dtype="int8")
        set_gradients([mine], 0)
        zero.step()
        zero.consolidate_state_dict()
        assert {str(v.dtype) for v in zero.state_dict()["state"][0].values()} == {"torch.float32", "torch.uint8"}
    finally:
        distributed.destroy_process_group()


def test_lamb_in_batches_is_lamb_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import zero_optim_kernels.torch.lamb as module

    once, batched = parameters(), parameters()
    for params, room in ((once, 1 << 24), (batched, 1)):
        monkeypatch.setattr(module, "_SCRATCH", room)
        optimizer = CPULamb(params, lr=1e-2, state_dtype="bfloat16")
        for step in range(3):
            set_gradients([params], step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(once, batched, strict=True))


def test_results_do_not_depend_on_a_thread_that_flushes_subnormal_numbers() -> None:
    outcomes = []
    for flush in (False, True):
        params = [torch.nn.Parameter(torch.full((100_000,), 3e-39))]
        params[0].grad = torch.full((100_000,), 2e-39)
        torch.set_flush_denormal(flush)
        CPUSGD(params, lr=0.5).step()
        torch.set_flush_denormal(False)
        outcomes.append(params[0].detach())
    assert torch.equal(*outcomes) and float(outcomes[0][0]) > 0


def loaded(optimizer: Any) -> Any:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


def pickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


AFTER_A_STEP = {"nothing": lambda optimizer: optimizer, "load": loaded, "copy": copy.deepcopy, "pickle": pickled}


@pytest.mark.parametrize("kind", [CPUAdagrad, CPUAdam, CPUAdamW, CPULion, CPUSGD])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.bfloat16, "fp32"), (torch.float32, "bf16"), (torch.bfloat16, "int8")]
)
@pytest.mark.parametrize("then", AFTER_A_STEP)
def test_elements_with_positions_are_rounded_alike_however_parameters_are_sharded(
    kind: type[Any], dtype: torch.dtype, state_dtype: str, then: str
) -> None:
    torch.manual_seed(0)
    sizes, places = [700, 300, 1000], [2048, 2048 + 768, 1 << 41]  # two neighbours and one apart
    values = [torch.randn(size, dtype=dtype) for size in sizes]
    gradients = [[torch.randn(size, dtype=dtype) for size in sizes] for _ in range(3)]

    def trained(shards: list[tuple[int, int, int]], between: Callable[[Any], Any]) -> list[torch.Tensor]:
        """Train shards (parameter, first element, first one behind), in the order given."""
        held = [torch.nn.Parameter(values[number][start:end].clone()) for number, start, end in shards]
        optimizer = kind(held, lr=1e-2, state_dtype=state_dtype)
        optimizer.positions = {p: places[number] + start for p, (number, start, _) in zip(held, shards, strict=True)}
        for step in gradients:
            held = optimizer.param_groups[0]["params"]
            for p, (number, start, end) in zip(held, shards, strict=True):
                p.grad = step[number][start:end].clone()
            optimizer.step()
            optimizer = between(optimizer)
        found = [torch.empty_like(value) for value in values]
        for p, (number, start, end) in zip(held, shards, strict=True):
            found[number][start:end] = p.detach()
        return found

    whole = trained([(0, 0, 700), (1, 0, 300), (2, 0, 1000)], AFTER_A_STEP["nothing"])
    sharded = [(2, 512, 1000), (1, 256, 300), (0, 0, 256), (2, 0, 512), (0, 256, 700), (1, 0, 256)]
    assert all(map(torch.equal, whole, trained(sharded, AFTER_A_STEP[then])))
