"""The names of DeepSpeed's engine that mean the same in a `zero_core.Engine`, which answers them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_core.delegation import Delegated
from zero_core.engine import Engine
from zero_settings import Config


class DelegatedNames(nn.Module):
    """Base of `DeepSpeedEngine`: each name of this table reads, calls or sets what ``zero_engine`` has by that name.

    ``module``: the user's model.
    """

    zero_engine: Engine
    module: nn.Module

    scale = Delegated[Any]("zero_engine")
    is_gradient_accumulation_boundary = Delegated[Any]("zero_engine")
    set_gradient_accumulation_boundary = Delegated[Any]("zero_engine")
    synced = Delegated[Any]("zero_engine")
    zero_grad = Delegated[Any]("zero_engine")
    clip_grad_norm_ = Delegated[Any]("zero_engine")
    compile = Delegated[Any]("zero_engine")
    data_loader = Delegated[Any]("zero_engine")
    deepspeed_io = Delegated[Any]("zero_engine", "data_loader")
    virtual_rank = Delegated[Any]("zero_engine")
    resume = Delegated[Any]("zero_engine")
    offload_states = Delegated[Any]("zero_engine")
    reload_states = Delegated[Any]("zero_engine")
    gathered = Delegated[Any]("zero_engine")
    full_param = Delegated[Any]("zero_engine")
    full_weights = Delegated[Any]("zero_engine")
    iter_full_weights = Delegated[Any]("zero_engine")
    full_grad = Delegated[Any]("zero_engine")
    full_state = Delegated[Any]("zero_engine")
    set_full_param = Delegated[Any]("zero_engine")
    set_full_grad = Delegated[Any]("zero_engine")
    set_full_state = Delegated[Any]("zero_engine")
    consolidated_state_dict = Delegated[Any]("zero_engine")
    _consolidated_16bit_state_dict = Delegated[Any]("zero_engine", "consolidated_state_dict")
    _zero3_consolidated_16bit_state_dict = Delegated[Any]("zero_engine", "consolidated_state_dict")
    train_batch_size = Delegated[Any]("zero_engine")
    train_micro_batch_size_per_gpu = Delegated[Any]("zero_engine")
    gradient_accumulation_steps = Delegated[Any]("zero_engine")
    set_train_batch_size = Delegated[Any]("zero_engine")
    set_train_micro_batch_size = Delegated[Any]("zero_engine.training_state.sizes", "set_micro")
    get_lr = Delegated[Any]("zero_engine")
    loss_scale = Delegated[Any]("zero_engine")
    zero_optimization_stage = Delegated[Any]("zero_engine")
    config_report = Delegated[Any]("zero_engine")
    memory_report = Delegated[Any]("zero_engine")
    memory_table = Delegated[Any]("zero_engine")
    communication_table = Delegated[Any]("zero_engine")
    report = Delegated[Any]("zero_engine")
    lr_scheduler = Delegated[Any]("zero_engine")
    training_dataloader = Delegated[Any]("zero_engine")
    global_steps = Delegated[int]("zero_engine")
    micro_steps = Delegated[int]("zero_engine")
    skipped_steps = Delegated[int]("zero_engine")
    global_samples = Delegated[int]("zero_engine")
    monitor = Delegated[Any]("zero_engine")
    instruments = Delegated[Any]("zero_engine")
    checkpointing = Delegated[Any]("zero_engine")
    observer = Delegated[Any]("zero_engine")
    audit = Delegated[Any]("zero_engine")
    offloading = Delegated[Any]("zero_engine")
    ledger = Delegated[Any]("zero_engine")
    load_report = Delegated[Any]("zero_engine")
    model_part = Delegated[Any]("zero_engine")
    partition = Delegated[Any]("zero_engine")
    device = Delegated[torch.device]("zero_engine")
    resolved_config = Delegated[Config]("zero_engine")
    sharded_optimizer = Delegated[Any]("zero_engine")
    basic_optimizer = Delegated[Any]("zero_engine", "optimizer")
    is_compiled = Delegated[bool]("zero_engine")
    compiled_modules = Delegated[Any]("zero_engine")
    global_rank = Delegated[int]("zero_engine.partition", "data_rank")
    world_size = Delegated[int]("zero_engine.partition", "data_world_size")
    seq_dp_world_size = Delegated[int]("zero_engine.partition", "data_world_size")
    dp_world_size = Delegated[int]("zero_engine.training_state.sizes", "ranks")
    sequence_parallel_size = Delegated[int]("zero_engine.model_part.place", "sequence_size")
