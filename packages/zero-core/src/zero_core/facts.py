"""What an engine knows about its run: batch sizes, rates, stage, precision. No call here communicates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from zero_comm import Ledger
from zero_partition import Partition, ShardedOptimizer
from zero_precision import DynamicLossScale

from .config import Config
from .errors import UsageError
from .instruments import MEMORY_KINDS, communication_table, memory_rows, memory_table
from .parking import ParkedStates
from .run_record import report_of

if TYPE_CHECKING:
    from zero_report import Report

    from .engine import Engine


class Facts(nn.Module):
    """The part of `Engine` that only answers."""

    ledger: Ledger
    global_steps: int
    _config: Config
    _partition: Partition
    _sharded: ShardedOptimizer | None
    _batch: tuple[int, int, int]
    _destroyed: bool
    _parked: ParkedStates | None

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer whose groups hold this rank's fragments."""
        return None if self._sharded is None else self._sharded.inner

    @property
    def sharded_optimizer(self) -> ShardedOptimizer | None:
        """The transaction around the optimizer."""
        return self._sharded

    @property
    def partition(self) -> Partition:
        """Which rank owns what."""
        return self._partition

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as the user gave it."""
        return self._config.raw

    @property
    def resolved_config(self) -> Config:
        """The configuration with every value resolved."""
        return self._config

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._partition.device

    # -- batch sizes -------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self._batch[0]

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch and rank."""
        return self._batch[1]

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._batch[2]

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step over all ranks, samples per micro-batch and rank, micro-batches per step."""
        return self._batch

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step by accumulating more or fewer micro-batches, from the next step on.

        Call it between steps, on every rank. Raises `UsageError` when whole micro-batches do not make up the size.
        """
        micro, ranks = self._batch[1], self._config.world_size
        virtual = self._config.virtual_ranks
        if virtual and train_batch_size != micro * virtual:
            raise UsageError(
                f"set_train_batch_size: expected {micro * virtual}, a micro-batch for each of the {virtual} virtual "
                f"ranks of deterministic.across_world_sizes, got {train_batch_size}"
            )
        if train_batch_size < 1 or train_batch_size % (micro * ranks):
            raise UsageError(
                f"set_train_batch_size: expected a multiple of {micro * ranks} ({micro} samples per micro-batch on "
                f"{ranks} ranks), got {train_batch_size}"
            )
        self._batch = (train_batch_size, micro, train_batch_size // (micro * ranks))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per micro-batch and rank, not the micro-batches per step. Loaders made before keep theirs.

        Call it between steps, on every rank.
        """
        if micro_batch_size < 1:
            raise UsageError(f"set_train_micro_batch_size: expected a number of samples, got {micro_batch_size}")
        steps = self._batch[2]
        self._batch = (micro_batch_size * steps * self._config.world_size, micro_batch_size, steps)

    # -- the optimizer -----------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [group["lr"] for group in self._check_trainable("get_lr").param_groups]

    def get_mom(self) -> list[Any]:
        """The ``momentum``, else the ``betas``, of each param group; 0.0 for a group with neither."""
        groups = self._check_trainable("get_mom").param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        """The ``type`` that each param group carries; 0.0 for a group without."""
        return [group.get("type", 0.0) for group in self._check_trainable("get_type").param_groups]

    def optimizer_name(self) -> str | None:
        """The optimizer's type in the configuration; None when it was passed or there is none."""
        return None if self._config.optimizer is None else self._config.optimizer.type

    def scheduler_name(self) -> str | None:
        """The schedule's type in the configuration; None when it was passed or there is none."""
        return None if self._config.scheduler is None else self._config.scheduler.type

    def gradient_clipping(self) -> float:
        """The largest global gradient norm; 0 when gradients are not clipped."""
        return self._config.gradient_clipping

    def loss_scale(self) -> float:
        """The factor that the loss is multiplied with before backward."""
        return 1.0 if self._sharded is None else self._sharded.loss_scale.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts itself."""
        return self._sharded is not None and isinstance(self._sharded.loss_scale, DynamicLossScale)

    # -- stage and precision -----------------------------------------------------------------------------------------

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self._partition.options.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether the configuration asks for whole weights in saved models; they can be had either way."""
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def fp16_enabled(self) -> bool:
        """Whether parameters are float16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bfloat16."""
        return self._config.bf16.enabled

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of parameters and of accumulated gradients."""
        policy = self._partition.options.policy
        return policy.param_dtype, policy.accumulate_dtype

    # -- reports -----------------------------------------------------------------------------------------------------

    def config_report(self) -> str:
        """Every configuration value with its origin, as a table."""
        rows = [(r.path, repr(r.value), r.provenance, r.note) for r in self._config.report()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
        )

    def memory_report(self, by: Literal["kind", "unit", "tier"] = "kind") -> dict[str, int]:
        """Bytes of model state that this rank holds now, by kind, by unit or by tier (device, host, nvme)."""
        if by not in ("kind", "unit", "tier"):
            raise UsageError(f"engine.memory_report(by=…): expected 'kind', 'unit' or 'tier', got {by!r}")
        found = dict.fromkeys(MEMORY_KINDS, 0) if by == "kind" else {}
        for row in memory_rows(self._partition, self._sharded):
            key = str(getattr(row, by))
            found[key] = found.get(key, 0) + row.nbytes
        return found

    def memory_table(self) -> str:
        """MiB of model state that this rank holds now: one line per unit and tier, one column per kind."""
        return memory_table(memory_rows(self._partition, self._sharded))

    def communication_table(self) -> str:
        """Collectives and MiB that this rank sent since the start, by phase and by unit or parameter."""
        return communication_table(self.ledger, steps=self.global_steps)

    def report(self) -> Report:
        """The page of this run so far, which a notebook shows; ``.save(path)`` writes it. Needs ``run_record.path``."""
        return report_of(cast("Engine", self))

    # -- what is printed ---------------------------------------------------------------------------------------------

    def steps_per_print(self) -> float | None:
        """Steps between progress lines; None or infinite: never."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the times of a step's parts are printed."""
        return self._config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Whether the memory after a step's parts is printed."""
        return self._config.memory_breakdown

    def dump_state(self) -> bool:
        """Whether everything about the engine was printed at the start."""
        return self._config.dump_state

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self, call: str) -> None:
        if self._destroyed:
            raise UsageError(f"engine.{call}: this engine was destroyed; the plain model goes on, or initialize again")
        if self._parked is not None:
            raise UsageError(f"engine.{call}: the states are in host memory; call engine.reload_states() first")

    def _check_trainable(self, call: str) -> ShardedOptimizer:
        self._check_open(call)
        if self._sharded is None:
            raise UsageError(
                f"engine.{call}: this engine has no optimizer; pass optimizer=… to initialize or add an 'optimizer' "
                "section to the config"
            )
        return self._sharded
