"""Parameters and models through DeepSpeed's names: on two ranks, inside `Init`, copied, gathered and written."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from named_cases import WIDTH, Net, batch, build, settings, start, train
from torch import nn

from zero_comm import run_ranks
from zero_deepspeed.communication import init_distributed
from zero_deepspeed.construction import GatheredParameters, Init, unwrap_model_for_generation
from zero_deepspeed.engine import DeepSpeedEngine
from zero_deepspeed.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
    safe_update_full_grad_vectorized,
)
from zero_deepspeed.initialization import initialize
from zero_deepspeed.leaf_modules import set_z3_leaf_modules, z3_leaf_module
from zero_deepspeed.parameters import ZeroParamStatus
from zero_settings import ConfigError

pytestmark = pytest.mark.usefixtures("alone")


class Pairs:
    """An mpu: ``parts`` consecutive ranks compute one layer together."""

    def __init__(self, parts: int) -> None:
        world = torch.arange(dist.get_world_size()).view(-1, parts)
        self._data, self._model = divmod(dist.get_rank(), parts)
        models, datas = [[dist.new_group(row) for row in rows.tolist()] for rows in (world, world.t())]
        self._groups = {"model": models[self._data], "data": datas[self._model]}

    def get_model_parallel_rank(self) -> int:
        return self._model

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._groups["model"])

    def get_model_parallel_group(self) -> Any:
        return self._groups["model"]

    def get_data_parallel_rank(self) -> int:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._groups["data"])

    def get_data_parallel_group(self) -> Any:
        return self._groups["data"]


def partition_facts(parameter: Any) -> tuple[list[int], int, int, int]:
    """Who holds the parameter's shards, this rank's number and the number of ranks there, elements of a rank's part."""
    group = parameter.ds_process_group
    found = torch.ones(())
    dist.all_reduce(found, group=group)
    assert found.item() == parameter.ds_zero_partition_world_size == dist.get_world_size(group)
    assert dist.get_rank(group) == parameter.ds_zero_partition_rank
    ranks = dist.get_process_group_ranks(group)
    return ranks, parameter.ds_zero_partition_rank, len(ranks), parameter.partition_numel()


def shard_groups() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parts, zero in (
        ("world", 1, {}),
        ("mics", 1, {"mics_shard_size": 2}),
        ("mpu", 2, {}),
        ("alone", 4, {}),
        ("hpz", 1, {"zero_hpz_partition_size": 2}),
    ):
        section = {"stage": 3, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1, **zero}
        mpu = Pairs(parts) if parts > 1 else None
        config = {**settings(3), "train_micro_batch_size_per_gpu": 1, "comm": {"ranks_per_node": 2}}
        with Init(config_dict_or_path={**config, "zero_optimization": section}, mpu=mpu):
            model = build()
        weight = model.blocks[0].weight
        built = partition_facts(weight)
        engine = initialize(model=model, config={**config, "zero_optimization": section}, mpu=mpu)[0]
        found[name] = (built, partition_facts(weight), weight.ds_secondary_tensor)
        engine.backward(engine(batch(0)[:1]))
        assert (weight.ds_zero_param_process_group is None) == (name != "hpz")
        if name == "hpz":
            parts_of = [None] * 2
            near = [[0, 1], [2, 3]][dist.get_rank() // 2]
            dist.all_gather_object(
                parts_of, weight.ds_secondary_tensor, group=engine.partition.groups.secondary.torch_group()
            )
            assert dist.get_process_group_ranks(weight.ds_zero_param_process_group) == near
            found["halves"] = [part.numel() for part in parts_of]
            found["secondary"] = torch.equal(torch.cat(parts_of), safe_get_full_fp32_param(weight).flatten())
        engine.destroy()
    return found


def test_the_partition_group_is_that_of_the_ranks_that_hold_the_shards() -> None:
    for rank, found in enumerate(run_ranks(shard_groups, 4)):
        pair, mate = rank // 2, rank % 2
        assert found["world"] == (([0, 1, 2, 3], rank, 4, 144),) * 2 + (None,)
        assert found["mics"] == (([0, 1, 2, 3], rank, 4, 144), ([2 * pair, 2 * pair + 1], mate, 2, 288), None)
        assert found["mpu"] == (([mate, mate + 2], pair, 2, 288),) * 2 + (None,)
        assert found["alone"] == (([rank], 0, 1, 576),) * 2 + (None,)
        assert found["hpz"] == (([0, 1, 2, 3], rank, 4, 144),) * 2 + (None,)
        assert sum(found["halves"]) == WIDTH * WIDTH and found["secondary"]


def named_parameters(_: int) -> dict[str, Any]:
    unresolved = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}
    with Init(config_dict_or_path=unresolved):
        torch.manual_seed(0)
        model = Net()
    weight = model.blocks[0].weight
    seen: dict[str, Any] = {"built": (weight.ds_numel, tuple(weight.ds_shape), weight.ds_status.name)}
    seen["copied"] = [copy.deepcopy(model).blocks[0].weight]
    with GatheredParameters({*model.parameters(), None}, modifier_rank=None):
        if dist.get_rank() == 1:
            seen["copied"] += [copy.deepcopy(weight)]
        seen["whole"] = weight.detach().clone()
        seen["inside"] = weight.ds_status.name
    with GatheredParameters([model.head.weight, None], modifier_rank=1), torch.no_grad():
        model.head.weight.fill_(dist.get_rank())
    engine = start(3, model)
    seen["owned"] = (weight.ds_status.name, weight.ds_tensor.numel(), weight.partition_numel())
    first = next(model.parameters()).ds_id  # ids count on from model to model in a process
    seen["ids"] = [p.ds_id - first for p in model.parameters()]
    seen["head"] = safe_get_full_fp32_param(model.head.weight)
    engine.backward(engine(batch(0)))
    gradient = safe_get_full_grad(weight)
    safe_update_full_grad_vectorized([weight], lambda g, p: g * 0)
    seen["gradient"] = (gradient.abs().sum().item() > 0, safe_get_full_grad(weight).abs().sum().item())
    local = safe_get_local_grad(weight)
    seen["local"] = (local.numel(), weight.ds_tensor.numel())
    engine.step()
    seen["state"] = safe_get_full_optimizer_state(weight, "exp_avg").abs().sum().item()
    seen["local state"] = safe_get_local_optimizer_state(model.head.weight, "exp_avg").shape
    part = safe_get_local_fp32_param(weight)
    safe_set_local_fp32_param(weight, torch.full_like(part, 2.0))
    seen["set"] = bool((safe_get_full_fp32_param(weight) == 2.0).all())
    safe_set_full_fp32_param(weight, torch.full(weight.ds_shape, 3.0))
    with GatheredParameters(weight):
        seen["set whole"] = bool((weight == 3.0).all())
        pickled = pickle.loads(pickle.dumps(weight))
    weight.all_gather_coalesced([weight]).wait()
    seen["gathered"] = (weight.ds_status.name, weight.sum().isnan().item())
    weight.partition()
    copied = copy.deepcopy(weight)
    seen["copies"] = (
        type(copied).__name__,
        bool((copied == 3.0).all()),
        type(pickled).__name__,
        bool((pickled == 3.0).all()),
    )
    with unwrap_model_for_generation(engine) as plain:
        seen["calls"] = [plain(batch(0)).isnan().item() for _ in range(1 + dist.get_rank())]
        assert not engine.optimizer.parameter_offload.forward_hooks
    assert engine.optimizer.parameter_offload.forward_hooks
    seen["by hand"] = without_hooks(engine)
    seen["after"] = train(engine, 0, 1)
    return seen


def built_in_parts(_: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("note", torch.float32)):
        config = {"zero_optimization": {"stage": 3}, section: {"enabled": True}}
        model = build()
        Init(module=model, config_dict_or_path=config, data_parallel_group=dist.group.WORLD)
        with Init(config_dict_or_path=config):
            torch.manual_seed(0)
            other = Net()
        for made in (model, other):
            weight: Any = made.blocks[0].weight
            status = weight.ds_status.name
            assert {p.dtype for p in made.parameters()} == {dtype} and (
                dist.get_world_size() == 1 or weight.isnan().all()
            )
            with GatheredParameters(list(made.parameters())):
                assert torch.equal(weight, build().blocks[0].weight.to(dtype)) and status == "NOT_AVAILABLE"
        if section != "note":
            engine = start(3, model, **{section: {"enabled": True}})
            seen[section] = engine(batch(0).to(dtype)).dtype
    return seen


def test_models_are_cut_afterwards_too_and_have_the_configurations_dtype() -> None:
    init_distributed()
    for seen in (built_in_parts(0), *run_ranks(built_in_parts, 2, 0)):
        assert seen == {"bf16": torch.bfloat16, "fp16": torch.float16}


def without_hooks(engine: DeepSpeedEngine) -> list[bool]:
    """Generation as frameworks on top of Transformers do it: gather everything, take the hooks away, put them back."""
    offload = engine.optimizer.parameter_offload
    with GatheredParameters(engine.module.parameters()):
        for _, parameter in [*offload.module.named_parameters(), *offload.module.ds_external_parameters()]:
            parameter.ds_active_sub_modules.clear()
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        seen = [engine.module(batch(0)).isnan().item() for _ in range(2 - dist.get_rank())]
        offload._register_deepspeed_module(offload.module)
    return seen


def test_an_init_that_was_refused_is_not_open_afterwards() -> None:
    with pytest.raises(ConfigError), Init(config_dict_or_path=settings(3, bf16={"enabled": "yes please"})):
        build()
    with Init(config_dict_or_path=settings(3)):
        model = build()
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    assert not any(hasattr(parameter, "ds_id") for parameter in build().parameters())


def test_parameters_answer_to_deepspeeds_names_on_two_ranks() -> None:
    first, second = run_ranks(named_parameters, 2, 0)
    torch.manual_seed(0)
    expected = Net()
    for seen in (first, second):
        assert seen["built"] == (WIDTH * WIDTH, (WIDTH, WIDTH), "NOT_AVAILABLE") and seen["inside"] == "AVAILABLE"
        assert torch.equal(seen["whole"], expected.blocks[0].weight)
        status, _, share = seen["owned"]
        assert (status, share) == ("NOT_AVAILABLE", WIDTH * WIDTH // 2)
        assert (seen["head"] == 1.0).all()
        assert seen["gradient"] == (True, 0.0) and seen["state"] == 0.0
        assert seen["local"][0] == seen["local"][1]
        assert seen["set"] and seen["set whole"] and seen["gathered"] == ("AVAILABLE", False)
        assert seen["copies"] == ("Parameter", True, "Parameter", True)
        assert all(torch.equal(copied, seen["whole"]) for copied in seen["copied"])
        assert not any(seen["calls"]) and not any(seen["by hand"])
    assert first["ids"] == second["ids"]
    assert first["owned"][1] + second["owned"][1] == WIDTH * WIDTH


def test_one_rank_says_not_available_outside_of_a_gather() -> None:
    engine = start(3)
    weight: Any = engine.module.head.weight
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with GatheredParameters([weight]):
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
    assert weight.ds_summary()["ds_shape"] == (1, WIDTH)


def test_leaf_modules_are_marked_and_found() -> None:
    model = build()
    assert set_z3_leaf_modules(model, [nn.ModuleList]) == [model.blocks]
    assert z3_leaf_module(model.blocks) and model.blocks._z3_leaf is True and not z3_leaf_module(model)
    with pytest.raises(ValueError, match="no module"):
        set_z3_leaf_modules(model, ["Conv2d"])
    assert train(start(3, model), 0, 1)


def written_beside_updates(overlap: str) -> list[torch.Tensor]:
    """Weights of a run in which fragments are written between backward and step, and right after a step."""
    offload = {"offload_optimizer": {"device": "cpu", "overlap": overlap}, "offload_param": {"device": "cpu"}}
    engine = initialize(model=build(), config=settings(3, zero_optimization={"stage": 3, **offload}))[0]
    weight = engine.module.blocks[0].weight
    for number in range(4):
        engine.backward(engine(batch(number)))
        safe_set_local_fp32_param(weight, safe_get_local_fp32_param(weight) * 0.5)
        engine.step()
        assert torch.equal(weight.ds_tensor, safe_get_local_fp32_param(weight))
        safe_set_local_fp32_param(weight, weight.ds_tensor + 1)
    return [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]


def test_fragments_that_are_written_beside_updates_count_as_without_overlap() -> None:
    for ours, plain in zip(
        run_ranks(written_beside_updates, 2, "exact"), run_ranks(written_beside_updates, 2, "off"), strict=True
    ):
        assert all(map(torch.equal, ours, plain))
