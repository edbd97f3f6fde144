"""DeepSpeed's names for ranks that share sequences: groups, mpu, attention and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from named_cases import BATCH, build, settings, train

from zero_comm import run_ranks
from zero_core.errors import UsageError
from zero_deepspeed import groups
from zero_deepspeed.initialization import initialize
from zero_deepspeed.sequence import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from zero_sequence import SequenceGroups


def failure_of(call: Any, *args: Any, **named: Any) -> str:
    try:
        call(*args, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def sizes_of(engine: Any) -> list[Any]:
    return [
        engine.sequence_parallel_size,
        engine.dp_world_size,
        engine.seq_dp_world_size,
        engine.get_data_parallel_rank(),
        engine.train_batch_size(),
    ]


def told() -> list[Any]:
    return [
        groups.get_sequence_parallel_world_size(),
        groups.get_sequence_parallel_rank(),
        groups.get_data_parallel_world_size(),
        groups.get_data_parallel_rank(),
        groups.get_sequence_data_parallel_world_size(),
        groups.get_sequence_data_parallel_rank(),
        dist.get_process_group_ranks(groups.get_data_parallel_group()),
        dist.get_process_group_ranks(groups.get_sequence_data_parallel_group()),
    ]


def with_the_module() -> dict[str, Any]:
    """`parallel_state_sp` opens the groups and is the mpu."""
    found: dict[str, Any] = {"before": told(), "refused": failure_of(groups.get_sequence_parallel_group)}
    plain = initialize(model=build(), config=settings(1))[0]
    found["plain"] = [*sizes_of(plain), plain.seq_parallel_group is None]
    found["all"] = dist.get_process_group_ranks(plain.seq_data_parallel_group)
    plain.destroy()
    groups.initialize_sequence_parallel(2)
    opened = groups.registered_mpu()
    groups.initialize_sequence_parallel(2)
    found["again"] = groups.registered_mpu() is opened
    found["after"] = [*told(), dist.get_process_group_ranks(groups.get_sequence_parallel_group())]
    engine = initialize(model=build(), config=settings(1), mpu=groups)[0]
    found["engine"] = sizes_of(engine)
    found["group"] = dist.get_process_group_ranks(engine.get_sequence_parallel_group())
    found["shards"] = dist.get_process_group_ranks(engine.seq_data_parallel_group)
    found["losses"] = len(train(engine, 0, 2))
    engine.destroy()
    found["contradicted"] = failure_of(
        initialize, model=build(), config=settings(1, sequence_parallel_size=4), mpu=opened
    )
    return found


def test_the_groups_are_those_of_the_mpu() -> None:
    for rank, found in enumerate(run_ranks(with_the_module, 4)):
        everybody, row = [0, 1, 2, 3], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found["before"] == [1, 0, 4, rank, 4, rank, everybody, everybody]
        assert "UsageError" in found["refused"] and "register_with_transformers" in found["refused"]
        assert found["plain"] == [1, 4, 4, rank, BATCH, True] and found["all"] == everybody
        columns = [rank % 2, rank % 2 + 2]
        assert found["after"] == [2, rank % 2, 2, rank // 2, 4, rank, columns, everybody, row]
        assert found["again"] and found["losses"] == 2
        assert found["engine"] == [2, 2, 4, rank // 2, BATCH // 2]
        assert found["group"] == row and found["shards"] == everybody
        assert "sequence_parallel_size is 4 in the configuration, but 2 by the mpu" in found["contradicted"]


def own_mpu() -> list[Any]:
    """An mpu that the user brings is the one that `deepspeed.utils.groups` answers for."""
    mpu = SequenceGroups.open(2)
    engine = initialize(model=build(), config=settings(3), mpu=mpu)[0]
    answer = [groups.get_sequence_parallel_group() is mpu.get_sequence_parallel_group(), engine.mpu is mpu]
    engine.destroy()
    refused = [
        failure_of(UlyssesSPDataLoaderAdapter, [], 1 - dist.get_rank(), None, 2),
        failure_of(UlyssesSPAttentionHF.register_with_transformers, "name", sequence_parallel_size=3),
    ]
    return [answer, UlyssesSPAttentionHF.register_with_transformers("name") is None, *refused]


def test_an_mpu_of_the_users_own_and_what_does_not_fit_it() -> None:
    for rank, (same, is_none, adapter, size) in enumerate(run_ranks(own_mpu, 2)):
        assert same == [True, True] and is_none
        assert f"UsageError: UlyssesSPDataLoaderAdapter: expected rank {rank} of 2" in adapter
        assert f"got rank {1 - rank} of 2" in adapter
        assert "SequenceError: sequence_parallel_size: expected a divisor of the world size 2" in size


def test_without_an_mpu_batches_are_not_sharded() -> None:
    with pytest.raises(UsageError, match="register_with_transformers first"):
        UlyssesSPDataLoaderAdapter([], 0, None, 2)


def spread_twice() -> list[Any]:
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=2)).double()
    ids = torch.arange(8).view(1, 8)
    expected = model(ids).logits.chunk(2, dim=1)[dist.get_rank()].detach()
    mpu, answers = None, []
    for attention in (None, "eager", "sdpa"):
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model, core_attn_implementation=attention, sequence_parallel_size=2, disable_in_eval=True
        )
        with torch.no_grad():
            shard = model.train()(ids.chunk(2, dim=1)[dist.get_rank()]).logits
            full = model.eval()(ids).logits.chunk(2, dim=1)[dist.get_rank()]
        answers += [float((got - expected).abs().max()) for got in (shard, full)]
    batches = [{"input_ids": ids + dist.get_rank(), "labels": ids}]
    adapter = UlyssesSPDataLoaderAdapter(batches, dist.get_rank(), mpu.get_sequence_parallel_group(), 2)
    return [answers, [batch["input_ids"].tolist() for batch in adapter], len(adapter), adapter.dl is batches]


def test_a_model_that_is_registered_again_is_spread_once() -> None:
    pytest.importorskip("transformers")
    for rank, (answers, batches, length, same) in enumerate(run_ranks(spread_twice, 2)):
        assert max(answers) <= 1e-7  # eager attention rounds to float32
        own = list(range(4 * rank, 4 * rank + 4))
        assert batches == [[own], [[token + 1 for token in own]]]
        assert length == 2 and same


class Grid:
    """An mpu of the world as (data, model): two consecutive ranks compute one layer together."""

    def __init__(self) -> None:
        world = torch.arange(dist.get_world_size()).view(-1, 2)
        self._data, self._model = divmod(dist.get_rank(), 2)
        made = [[dist.new_group(row) for row in rows.tolist()] for rows in (world, world.t())]
        self._model_group, self._data_group = made[0][self._data], made[1][self._model]

    def get_model_parallel_rank(self) -> int:
        return self._model

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return self._model_group

    def get_data_parallel_group(self) -> Any:
        return self._data_group


def with_tensor_parallelism() -> dict[str, Any]:
    before = [groups.model_parallel_world_size(), groups.model_parallel_rank(), failure_of(groups.model_parallel_group)]
    engine = initialize(model=build(), config=settings(1), mpu=Grid())[0]
    found = {
        "before": before,
        "told": told(),
        "layer": [
            groups.model_parallel_world_size(),
            groups.model_parallel_rank(),
            dist.get_process_group_ranks(groups.model_parallel_group()),
        ],
        "refused": failure_of(groups.get_sequence_parallel_group),
        "engine": engine.dp_world_size,
    }
    engine.destroy()
    return found


def test_the_groups_of_an_mpu_with_tensor_parallelism_are_its_own() -> None:
    for rank, found in enumerate(run_ranks(with_tensor_parallelism, 4)):
        column, row = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        size, index, refused = found["before"]
        assert [size, index] == [1, 0] and refused.startswith("UnsupportedError")
        assert found["told"] == [1, 0, 2, rank // 2, 2, rank // 2, column, column]
        assert found["layer"] == [2, rank % 2, row]
        assert found["engine"] == 2
        assert found["refused"].startswith("UsageError: no ranks share a sequence yet")
