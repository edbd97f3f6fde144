"""Keys of checkpoints, activation checkpointing, monitors, profilers and timers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zero_settings._base import (
    ALL_KEYS,
    Flag,
    Int,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    _to_finite,
)


def _capitalised(value: Any) -> Any:
    """Return a string with its first letter in upper case and the others in lower case; anything else as it is. A
    pydantic validator."""
    return value.capitalize() if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    """Return a string in upper case; anything else as it is. A pydantic validator."""
    return value.upper() if isinstance(value, str) else value


def _lower(value: Any) -> Any:
    """Return a string in lower case; anything else as it is. A pydantic validator."""
    return value.lower() if isinstance(value, str) else value


class ActivationCheckpointing(Section):
    """Options of activation checkpointing: where and how segments of `zero_core.checkpointing.checkpoint` store their
    inputs until backward.
    """

    partition_activations: Flag = Field(default=False, description="Each model-parallel rank keeps a part.")
    number_checkpoints: PositiveInt | None = Field(
        default=None, description="Segments that wait for backward at once, for contiguous_memory_optimization."
    )
    contiguous_memory_optimization: Flag = Field(default=False, description="Inputs of one shape share one buffer.")
    synchronize_checkpoint_boundary: Flag = Field(default=False, description="Wait for the accelerator at both ends.")
    profile: Flag = Field(default=False, description="Log the time that segments take, after each step.")
    cpu_checkpointing: Flag = Field(default=False, description="Inputs wait in host memory.")


class CheckpointWriter(Section):
    """Options of writing a checkpoint's files, such as writing in the background (`decoupled`)."""

    type: Annotated[Literal["FAST", "PYTHON", "MOCK"], BeforeValidator(_upper)] = "FAST"
    io_buffer_size: PositiveInt = Field(default=64 * 1024 * 1024, description="Bytes.")
    io_buffer_double: Flag = True
    show_statistics: Flag = False
    data_parallel: Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], BeforeValidator(_upper)] | None = None
    decoupled: Flag = Field(
        default=False, description="Copy the state into host memory and write it while training continues."
    )
    io_multiplier: PositiveInt = 1


class ParallelWrite(Section):
    """Keys that choose the ranks that write a checkpoint, without effect: all ranks always write in parallel."""

    pipeline_stage: Flag = False


class InMemorySection(Section):
    """Copies of the training state in the memory of the nodes, from which `engine.resume` recovers a lost node."""

    every: NaturalInt = Field(default=0, description="Optimizer steps between two copies; 0 is off.")
    path: Text | None = Field(
        default=None,
        description="A folder in each node's memory that no other user can write, such as /dev/shm/NAME; created. "
        "By default one below /dev/shm, named for the folder of `engine.resume`, or of the first save.",
    )


class CheckpointSection(Section):
    """Options of saving and loading checkpoints: when `engine.step` writes one, where, and how many stay."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capitalised)] = "Warn"
    load_universal: Flag = False
    format: Annotated[Literal["native", "deepspeed"], BeforeValidator(_lower)] = Field(
        default="native",
        description='Format of checkpoints that are saved. "deepspeed", with deepspeed.initialize: DeepSpeed resumes '
        "from them, at the same number of ranks. Both formats load whatever is set here.",
    )
    use_node_local_storage: Flag = Field(
        default=False, description="Nodes do not share a file system: each keeps what its ranks need."
    )
    parallel_write: ParallelWrite = ParallelWrite()
    checkpoint_serialization: Flag = True
    interval: Literal["auto"] | PositiveInt | None = Field(
        default=None,
        description='Optimizer steps between two checkpoints that `engine.step` writes; "auto": by their cost.',
    )
    path: Text | None = Field(
        default=None, description="Folder of checkpoints written by interval; by default that of `engine.resume`."
    )
    overhead: Annotated[float, Field(gt=0, lt=1), BeforeValidator(_to_finite)] = Field(
        default=0.035, description='Fraction of the time that saving may take with interval "auto".'
    )
    mean_time_between_failures: PositiveFloat | None = Field(
        default=None, description='Hours, of the whole job: interval "auto" is then at least what Young and Daly give.'
    )
    keep_last: PositiveInt | None = Field(
        default=None, description="Checkpoints that stay in a folder; each save removes the older ones."
    )
    writer: CheckpointWriter = CheckpointWriter()
    in_memory: InMemorySection = InMemorySection()


class Elastic(Section):
    """The rule for batch sizes when the number of ranks changes, as after `zero-launch --elastic` lost a host."""

    batch_size: Literal["keep_global_batch", "scale"] | None = Field(
        default=None,
        description="keep_global_batch: train_batch_size holds, the accumulation follows; scale: the other way round.",
    )


class CommsLogger(Section):
    """Prints a table of collectives and their bytes, every `steps_per_print` steps."""

    auto_keys = ALL_KEYS

    enabled: Flag = Field(default=False, description="Print what was sent, by phase and unit.")
    prof_all: Flag = Field(default=True, description="Print every operation and phase.")
    prof_ops: tuple[Text, ...] = Field(default=(), description="Only these operations or phases, unless prof_all.")
    verbose: Flag = Field(default=False, description="Print every collective when it starts.")
    debug: Flag = False


class FlopsProfiler(Section):
    """Counts the floating-point operations of one micro-batch, in one step, and prints them by module."""

    enabled: Flag = Field(default=False, description="Count by torch.utils.flop_counter.")
    recompute_fwd_factor: NaturalFloat = 0.0
    profile_step: PositiveInt = Field(default=1, description="The step that is counted; the first is 0.")
    module_depth: Int = Field(default=-1, description="Depth down to which the top modules are listed; -1: all.")
    top_modules: PositiveInt = Field(default=1, description="Modules listed at each depth.")
    detailed: Flag = Field(default=True, description="Print every module.")
    output_file: Text | None = Field(default=None, description="Written instead of printed.")


class Tensorboard(Section):
    """Writes metrics as TensorBoard's event files."""

    auto_keys = ALL_KEYS

    enabled: Flag = Field(default=False, description="Needs zero-core[tensorboard].")
    output_path: Text = Field(default="", description="Event files go to output_path/job_name.")
    job_name: Text = Field(default="DeepSpeedJobName", description="The folder's last part.")


class Wandb(Section):
    """Sends metrics to Weights & Biases."""

    auto_keys = ALL_KEYS

    enabled: Flag = Field(default=False, description="Needs zero-core[wandb].")
    group: Text | None = Field(default=None, description="The client's group of runs.")
    team: Text | None = Field(default=None, description="The client's entity.")
    project: Text = Field(default="deepspeed", description="The client's project.")


class CsvMonitorSection(Section):
    """Writes metrics as CSV files, one per name."""

    auto_keys = ALL_KEYS

    enabled: Flag = Field(default=False, description="Append to files on rank 0.")
    output_path: Text = Field(default="", description="One file per name goes to output_path/job_name.")
    job_name: Text = Field(default="DeepSpeedJobName", description="The folder's last part.")


class Comet(Section):
    """Sends metrics to Comet; null leaves a value to the client."""

    auto_keys = ALL_KEYS

    enabled: Flag = Field(default=False, description="Needs zero-core[comet].")
    samples_log_interval: PositiveInt = Field(default=100, description="Samples between two values of one name.")
    project: Text | None = Field(default=None, description="The client's project.")
    workspace: Text | None = Field(default=None, description="The client's workspace.")
    api_key: Text | None = Field(
        default=None, description="Never printed or logged; COMET_API_KEY keeps it out of files."
    )
    experiment_name: Text | None = Field(default=None, description="The experiment's name.")
    experiment_key: Text | None = Field(default=None, description="The experiment that `mode` gets or creates.")
    online: Flag | None = Field(default=None, description="false: log into a local archive.")
    mode: Literal["get", "create", "get_or_create"] | None = Field(
        default=None, description="Continue an experiment, begin one, or either."
    )


class RunRecordSection(Section):
    """Writes the record of a run, for `zero-report`, if `path` is given."""

    auto_keys = ALL_KEYS

    path: Text | None = Field(default=None, description="Folder of the record; `zero-report PATH` makes a page of it.")
    max_bytes: PositiveInt = Field(default=256 << 20, description="Bytes of the record, all ranks together.")
    plan: Text | None = Field(
        default=None,
        description="Output of `zero-plan estimate --json`, or of `model` or `run`, compared with what is measured.",
    )


class ThroughputTimer(Section):
    """Prints samples per second in progress lines."""

    auto_keys = ALL_KEYS

    enabled: Flag = Field(default=True, description="Lines of progress say samples per second.")
    synchronized: Flag = True


class TimersSection(Section):
    """Switches timers on and off; there is one, of the throughput."""

    throughput: ThroughputTimer = ThroughputTimer()
