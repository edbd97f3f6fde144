"""Keys of checkpoints, activation checkpointing, monitors, profilers and timers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zero_core.config._base import ALL_KEYS, Flag, Int, NaturalFloat, PositiveInt, Section, Text


def _capitalised(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


class ActivationCheckpointing(Section):
    """Activation recomputation through `zero_core.checkpointing`."""

    partition_activations: Flag = False
    number_checkpoints: PositiveInt | None = None
    contiguous_memory_optimization: Flag = False
    synchronize_checkpoint_boundary: Flag = False
    profile: Flag = False
    cpu_checkpointing: Flag = False


class CheckpointWriter(Section):
    type: Annotated[Literal["FAST", "PYTHON", "MOCK"], BeforeValidator(_upper)] = "FAST"
    io_buffer_size: PositiveInt = Field(default=64 * 1024 * 1024, description="Bytes.")
    io_buffer_double: Flag = True
    show_statistics: Flag = False
    data_parallel: Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], BeforeValidator(_upper)] | None = None
    decoupled: Flag = False
    io_multiplier: PositiveInt = 1


class ParallelWrite(Section):
    pipeline_stage: Flag = False


class Checkpoint(Section):
    """How checkpoints are written and read."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capitalised)] = "Warn"
    load_universal: Flag = False
    use_node_local_storage: Flag = False
    parallel_write: ParallelWrite = ParallelWrite()
    checkpoint_serialization: Flag = True
    writer: CheckpointWriter | None = None


class CommsLogger(Section):
    auto_keys = ALL_KEYS

    enabled: Flag = False
    prof_all: Flag = True
    prof_ops: tuple[Text, ...] = ()
    verbose: Flag = False
    debug: Flag = False


class FlopsProfiler(Section):
    enabled: Flag = False
    recompute_fwd_factor: NaturalFloat = 0.0
    profile_step: PositiveInt = 1
    module_depth: Int = -1
    top_modules: PositiveInt = 1
    detailed: Flag = True
    output_file: Text | None = None


class Tensorboard(Section):
    auto_keys = ALL_KEYS

    enabled: Flag = False
    output_path: Text = ""
    job_name: Text = "DeepSpeedJobName"


class Wandb(Section):
    auto_keys = ALL_KEYS

    enabled: Flag = False
    group: Text | None = None
    team: Text | None = None
    project: Text = "deepspeed"


class CsvMonitor(Section):
    auto_keys = ALL_KEYS

    enabled: Flag = False
    output_path: Text = ""
    job_name: Text = "DeepSpeedJobName"


class Comet(Section):
    auto_keys = ALL_KEYS

    enabled: Flag = False
    samples_log_interval: PositiveInt = 100
    project: Text | None = None
    workspace: Text | None = None
    api_key: Text | None = None
    experiment_name: Text | None = None
    experiment_key: Text | None = None
    online: Flag | None = None
    mode: Literal["get", "create", "get_or_create"] | None = None


class ThroughputTimer(Section):
    auto_keys = ALL_KEYS

    enabled: Flag = True
    synchronized: Flag = True


class Timers(Section):
    throughput: ThroughputTimer = ThroughputTimer()
