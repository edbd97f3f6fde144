"""Every key that a configuration file may hold, with its type and default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from zero_settings._base import (
    Flag,
    FloatOrInf,
    FreeForm,
    NaturalFloat,
    PositiveInt,
    Section,
    Text,
    lowered,
    plain_kind,
)
from zero_settings._optim_keys import OptimizerSection, SchedulerSection
from zero_settings._parallel_keys import (
    Autotuning,
    Compile,
    DataEfficiency,
    Deterministic,
    ExpertParallel,
    HybridEngine,
    Pipeline,
    TensorParallel,
    WeightQuantization,
)
from zero_settings._precision_keys import Bf16, DataTypes, DtypeName, Fp16, TorchAutocast
from zero_settings._tool_keys import (
    ActivationCheckpointing,
    CheckpointSection,
    Comet,
    CommsLogger,
    CsvMonitorSection,
    Elastic,
    FlopsProfiler,
    RunRecordSection,
    Tensorboard,
    TimersSection,
    Wandb,
)
from zero_settings._zero_keys import Aio, Comm, Offload, ZeroOptimization


class ConfigFile(Section):
    """The keys of a DeepSpeed configuration, and our own: `audit_every`, `comm`, `deterministic`, `elastic`,
    `keep_freed_memory`, `offload`, `reduce_each_micro_batch`, `run_record`, `unit_*`."""

    aliases: ClassVar[dict[str, str]] = {"bfloat16": "bf16"}
    auto_keys: ClassVar[frozenset[str]] = frozenset(
        {
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "communication_data_type",
        }
    )

    train_batch_size: PositiveInt | None = Field(
        default=None, description="micro x accumulation x data-parallel ranks."
    )
    train_micro_batch_size_per_gpu: PositiveInt | None = Field(
        default=None, description="Samples of a rank in one forward and backward."
    )
    gradient_accumulation_steps: PositiveInt | None = Field(default=None, description="Micro-batches in one step.")
    managed_gradient_accumulation: Flag = True
    reduce_each_micro_batch: Flag = Field(
        default=False, description="Stages 0 and 1 reduce like 2 and 3: bitwise equality."
    )
    sequence_parallel_size: PositiveInt = Field(
        default=1, description="Consecutive ranks that share a sequence (Ulysses), as the mpu says."
    )

    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    gradient_clipping: NaturalFloat = Field(default=0.0, description="Largest global gradient norm; 0 switches it off.")
    zero_optimization: ZeroOptimization = ZeroOptimization()
    zero_allow_untested_optimizer: Flag = False
    zero_force_ds_cpu_optimizer: Flag = True

    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    torch_autocast: TorchAutocast = TorchAutocast()
    data_types: DataTypes = DataTypes()
    communication_data_type: DtypeName | None = Field(default=None, description="The parameter dtype unless given.")
    seq_parallel_communication_data_type: DtypeName = "fp32"

    prescale_gradients: Flag = False
    gradient_predivide_factor: NaturalFloat = 1.0
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lowered)] = Field(
        default="mean", description='Whether the ranks\' gradients are averaged or, with "sum", only summed.'
    )
    deterministic: Flag | Deterministic = Field(
        default=False, description="true: sum gradients in rank order on every backend."
    )
    audit_every: PositiveInt | None = Field(
        default=None, description="Steps between two audits of what ranks hold; null: never."
    )
    disable_allgather: Flag = False

    steps_per_print: FloatOrInf | None = Field(
        default=None, description="Steps between progress lines; null: one every 10 s; 0 or inf: the run says nothing."
    )
    dump_state: Flag = Field(default=False, description="Print every value and the units' memory at the start.")
    wall_clock_breakdown: Flag = Field(default=False, description="Print the times of forward, backward and step.")
    memory_breakdown: Flag = Field(default=False, description="Print the memory held after each of them.")
    log_level: Text | None = None
    keep_freed_memory: Flag | None = Field(
        default=None,
        description="The C library keeps freed memory for the next step, or returns it to the system; null: keeps it "
        "where the CPU computes and nothing is offloaded.",
    )
    disable_python_gc: Flag = False
    dataloader_drop_last: Flag = Field(default=False, description="Leave out an epoch's incomplete last batches.")
    vocabulary_size: PositiveInt | None = None
    use_data_before_expert_parallelism: Flag = False

    aio: Aio = Aio()
    comm: Comm = Comm()
    offload: Offload = Offload()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: Elastic = Elastic()
    comms_logger: CommsLogger = CommsLogger()
    flops_profiler: FlopsProfiler = FlopsProfiler()
    tensorboard: Tensorboard = Tensorboard()
    wandb: Wandb = Wandb()
    csv_monitor: CsvMonitorSection = CsvMonitorSection()
    comet: Comet = Comet()
    run_record: RunRecordSection = RunRecordSection()
    timers: TimersSection = TimersSection()

    compile: Compile = Compile()
    pipeline: Pipeline = Pipeline()
    hybrid_engine: HybridEngine = HybridEngine()
    tensor_parallel: TensorParallel = TensorParallel()
    expert_parallel: ExpertParallel = ExpertParallel()
    data_efficiency: DataEfficiency = DataEfficiency()
    autotuning: Autotuning = Autotuning()
    datastates_ckpt: Literal[False] | FreeForm | None = None
    weight_quantization: WeightQuantization | None = None


def value_kinds(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, type]]]:
    """Yield (path, object, kinds) for ``data``, a configuration as written, and each section in it, outermost first;
    ``path`` is empty or dotted, ``object`` the section's dict.

    ``kinds``: the type that a key's value has to have, bool, int, float, or tuple for a list of strings, whatever value
    it has now. Unknown keys, and keys whose values may have other types besides null, are left out."""
    yield from _value_kinds("", data, ConfigFile)


def _value_kinds(path: str, data: dict[str, Any], section: type[Section]) -> Iterator[Any]:
    """Yield (path, object, kinds) for ``data``, an object of the configuration at ``path`` that is read as ``section``,
    and for each section in it. ``kinds``: the plain types of the values of the object's keys (see `value_kinds`)."""
    fields = {key: section.model_fields.get(section.aliases.get(key, key)) for key in data}
    kinds = {key: kind for key, field in fields.items() if field and (kind := plain_kind(field.annotation))}
    yield path, data, kinds
    for key, value in data.items():
        inner = section.section_of(section.aliases.get(key, key), data)
        if inner is not None and isinstance(value, dict):
            yield from _value_kinds(f"{path}.{key}" if path else key, value, inner)


def known_keys(section: str, *, aliases: bool = True) -> list[str]:
    """Return the keys that may be written in ``section``, such as ``"fp16"``, a key at the top of the file; ``""``: the
    keys at the top.

    ``aliases``: include other names of the keys. Raises KeyError if the file has no such section at its top."""
    kind = ConfigFile.section_of(section, {}) if section else ConfigFile
    if kind is None:
        raise KeyError(section)
    return kind.written_keys() if aliases else list(kind.model_fields)
