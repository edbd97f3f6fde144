"""Keys of `zero_optimization`, its offload sections, and `aio`."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from zero_settings._base import (
    ALL_KEYS,
    Flag,
    Fraction,
    Int,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    null_is_default,
)

SMALLEST_GROUP, LARGEST_GROUP = 1 << 12, 1 << 23  # elements of an offloaded update at a time


def _stage(value: Any) -> Any:
    """Return a ZeRO stage as an int.

    A pydantic validator: raises PydanticCustomError for anything but 0, 1, 2 and 3.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value not in (0, 1, 2, 3):
        raise PydanticCustomError("stage", "a ZeRO stage: 0, 1, 2 or 3")
    return int(value)


def _folders(value: Any) -> Any:
    """Return one directory, or a list of directories, as a tuple of paths.

    A pydantic validator: raises PydanticCustomError for anything else, an empty list, a path that begins with `~` and a
    path given twice. The directories need not exist."""
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if not found or not all(isinstance(folder, str) and folder for folder in found):
        raise PydanticCustomError("folders", "a directory, or a list of directories")
    if any(folder.startswith("~") or "\0" in folder for folder in found):
        raise PydanticCustomError("folders", "a directory written out: no shell is there to replace `~`")
    if len({os.path.normpath(folder) for folder in found}) < len(found):
        raise PydanticCustomError("folders", "each directory once: files in one are not faster for being named twice")
    return found


Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)]
Device = Literal["none", "cpu", "nvme"]
Paths = Annotated[
    tuple[str, ...],
    BeforeValidator(_folders),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]
Weights = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
_WEIGHTS = "How the bytes are shared between several directories, a number for each; null: by their measured speed."


class FolderList(NamedTuple):
    """The folders that a tier keeps its files in, their weights (None: as measured), and the path of the key that lists
    them."""

    folders: tuple[str, ...]
    weights: tuple[float, ...] | None
    key: str


class OffloadParam(Section):
    """Offload of parameter shards (stage 3): their tier, and buffers of host memory for it."""

    auto_keys = ALL_KEYS

    device: Device = Field(default="none", description="Where shards wait; none: where the model computes.")
    nvme_path: Paths | None = Field(default=None, description="A directory, or several to stripe over.")
    nvme_path_weights: Weights | None = Field(default=None, description=_WEIGHTS)
    buffer_count: PositiveInt = Field(default=5, description="Shards of files that are in host memory at once.")
    buffer_size: NaturalInt = Field(default=0, description="Elements per buffer; 0: those of the largest shard.")
    max_in_cpu: NaturalInt = Field(default=0, description="Elements that stay in host memory, besides the buffers.")
    pin_memory: Flag = Field(default=True, description="Page-locked host memory, with an accelerator.")

    @property
    def paths(self) -> FolderList:
        """Return the folders of parameter files, with their weights and key; no folders without `nvme_path`."""
        return FolderList(self.nvme_path or (), self.nvme_path_weights, "zero_optimization.offload_param.nvme_path")


class OffloadOptimizer(Section):
    """Offload of optimizer shards, masters and states (stages 1 to 3): their tier, and options of the update there."""

    auto_keys = ALL_KEYS

    device: Device = Field(
        default="none", description="Where masters and states are, and are updated; none: the device."
    )
    nvme_path: Paths | None = Field(default=None, description="A directory, or several to stripe over.")
    nvme_path_weights: Weights | None = Field(default=None, description=_WEIGHTS)
    buffer_count: PositiveInt = Field(default=4, description="Groups of files that are in host memory at once.")
    pin_memory: Flag = Field(default=True, description="Page-locked host memory, with an accelerator.")
    pipeline_read: Flag = Field(default=True, description="Read ahead of the update.")
    pipeline_write: Flag = Field(default=True, description="Write behind the update.")
    fast_init: Flag = False
    ratio: Fraction = Field(
        default=1.0,
        description="That share of the states is in host memory, or in files; the rest is on the device, where torch's "
        'optimizer updates it (Twin-Flow), or with "nvme" in host memory.',
    )
    overlap: Literal["off", "exact"] = Field(
        default="off",
        description='"exact": update beside backward and the next forward, with the same bits; for `device` "cpu".',
    )
    overlap_journal: NaturalInt | None = Field(
        default=None, description="Host memory, in bytes, for what is updated beside backward; null: for all of it."
    )
    super_offload: Flag = False
    cpuadam_cores_perc: Fraction = 0.8

    @property
    def paths(self) -> FolderList:
        """Return the folders of optimizer files, with their weights and key; no folders without `nvme_path`."""
        return FolderList(self.nvme_path or (), self.nvme_path_weights, "zero_optimization.offload_optimizer.nvme_path")


class Zenflow(Section):
    """Keys of ZenFlow, importance-aware asynchronous offload, which is not available: refused wherever the section is
    written.
    """

    topk_ratio: Fraction = 0.1
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: Literal["auto"] | PositiveInt = "auto"
    update_interval: Literal["auto"] | PositiveInt = "auto"
    overlap_step: Flag = False
    offload: Flag = False
    auto_ratio: Fraction = 0.99
    full_warm_up_rounds: NaturalInt = 0
    pt_reserved_cores_perc: Fraction = 0.5
    steps_per_epoch: PositiveInt | None = None


class LeafModule(Section):
    """Modules whose parameters are gathered together, as one unit with all that is inside."""

    auto_keys = ALL_KEYS

    classes: tuple[Text, ...] = Field(default=(), description="By class, its name alone or with its module.")
    names: tuple[Text, ...] = Field(default=(), description="By full name in the model.")
    name_suffixes: tuple[Text, ...] = Field(default=(), description="By the end of the full name.")


class ZeroOptimization(Section):
    """The ZeRO stage, the tiers of shards, and bounds of what is gathered or in flight. Sizes are in elements."""

    auto_keys = ALL_KEYS
    aliases: ClassVar[dict[str, str]] = {
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
    }

    stage: Stage = Field(
        default=0, description="Optimizer state is sharded from 1, gradients from 2, parameters from 3."
    )
    unit_max_numel: PositiveInt | None = Field(
        default=None,
        description="Module subtrees above so many elements are opened into smaller units. null opens those above "
        "64,000,000, and layers (elements of a list of modules, without a list of layers of their own) above "
        "1,000,000,000.",
    )
    unit_min_numel: NaturalInt = Field(
        default=250_000, description="Neighbouring leftovers are merged into one unit up to so many elements."
    )
    contiguous_gradients: Flag = True
    reduce_scatter: Flag = True
    reduce_bucket_size: PositiveInt = Field(
        default=500_000_000, description="Elements of gradients in flight; one unit's are, whatever its size."
    )
    use_multi_rank_bucket_allreduce: Flag = True
    allgather_partitions: Flag = True
    allgather_bucket_size: NaturalInt = 500_000_000
    overlap_comm: Flag | None = Field(default=None, description="true at stage 3 unless given.")
    compute_grad_norm: Flag = True
    load_from_fp32_weights: Flag = True
    elastic_checkpoint: Flag = False
    offload_param: Annotated[OffloadParam, BeforeValidator(null_is_default)] = OffloadParam()
    offload_optimizer: Annotated[OffloadOptimizer, BeforeValidator(null_is_default)] = OffloadOptimizer()
    zenflow: Zenflow | None = None
    sub_group_size: NaturalInt = Field(
        default=LARGEST_GROUP, description="Elements of an offloaded update at a time: 4,096 to 8,388,608."
    )
    stage3_prefetch_bucket_size: NaturalInt = Field(
        default=50_000_000,
        description="Elements gathered ahead of use; the next unit is, whatever its size, unless this is 0.",
    )
    stage3_param_persistence_threshold: NaturalInt = Field(
        default=100_000, description="Parameters of fewer elements stay gathered."
    )
    stage3_model_persistence_threshold: NaturalInt = sys.maxsize
    stage3_max_live_parameters: NaturalInt = Field(
        default=1_000_000_000, description="Elements gathered at once; the unit in use is, whatever its size."
    )
    stage3_max_reuse_distance: NaturalInt = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: Flag = False
    stage3_module_granularity_threshold: Int = 0
    stage3_use_all_reduce_for_fetch_params: Flag = False
    stage3_allgather_sequential: Flag = False
    ignore_unused_parameters: Flag = True
    legacy_stage1: Flag = False
    round_robin_gradients: Flag = False
    parameter_alignment: Flag = False
    mics_shard_size: Int = Field(
        default=-1, description="Ranks that one replica of the model is sharded over; -1: all ranks."
    )
    mics_hierarchical_params_gather: Flag = False
    zero_hpz_partition_size: PositiveInt = Field(
        default=1, description="Ranks of a node that keep a copy of the weights for backward; 1: none (stage 3)."
    )
    zero_quantized_weights: Flag = Field(default=False, description="Passes gather weights in comm.weight_codec.")
    zero_quantized_nontrainable_weights: Flag = Field(default=False, description="The same for frozen weights alone.")
    zero_quantized_gradients: Flag = Field(
        default=False, description="Gradients travel in comm.gradient_codec, inside nodes first, then across."
    )
    memory_efficient_linear: Flag = True
    pipeline_loading_checkpoint: Flag = False
    override_module_apply: Flag = True
    log_trace_cache_warnings: Flag = False
    enable_sanity_checks: Flag = False
    save_muon_momentum_buffer_in_memory: Flag = False
    leaf_module: LeafModule = LeafModule()

    @property
    def group_size(self) -> int:
        """Return the number of elements that an offloaded update handles at a time: `sub_group_size` within bounds."""
        return max(SMALLEST_GROUP, min(self.sub_group_size, LARGEST_GROUP))


class Comm(Section):
    """Ranks per node, time limits, and the codecs of quantized messages."""

    stopped_after: PositiveFloat = Field(
        default=60.0,
        description="Seconds without a sign of life after which a rank that others wait for counts as gone.",
    )
    ranks_per_node: PositiveInt | None = Field(
        default=None, description="So many consecutive ranks count as one node; by default as they were started."
    )
    weight_codec: Literal["int8", "fp8_e4m3"] = Field(default="int8", description="Of zero_quantized_weights.")
    gradient_codec: Literal["int4", "int8", "fp8_e4m3"] = Field(
        default="int4", description="Of zero_quantized_gradients."
    )


class Aio(Section):
    """Asynchronous file I/O of the NVMe tier.

    Without this section, the first three keys have the values that `zero-nvme-aio tune` found for the drive, else 1
    MiB, 32 and 2. With it, those that are null are 1 MiB, 8 and 1.
    """

    aliases: ClassVar[dict[str, str]] = {"thread_count": "intra_op_parallelism"}

    block_size: PositiveInt | None = Field(
        default=None, description="Bytes; null, as in the next two: as tuned for the drive."
    )
    queue_depth: PositiveInt | None = Field(
        default=None, description="Requests of a thread that the kernel has at once."
    )
    intra_op_parallelism: PositiveInt | None = Field(default=None, description="Threads that share one transfer.")
    single_submit: Flag = Field(default=False, description="Hand blocks to the kernel one by one.")
    overlap_events: Flag = Field(default=True, description="false: await each batch before the next is handed over.")
    use_gds: Flag = Field(default=False, description="Not for tiers: zero_nvme_aio.gds serves device memory.")


class OffloadActivations(Section):
    """Offload of tensors that autograd saves in forward for backward: their tier, and options of the transfers."""

    device: Device = Field(default="none", description="Where they wait; none: where they are made.")
    nvme_path: Paths | None = Field(default=None, description="A directory, or several to stripe over.")
    nvme_path_weights: Weights | None = Field(default=None, description=_WEIGHTS)
    min_bytes: PositiveInt = Field(default=65536, description="Smaller tensors stay where they are.")
    prefetch: NaturalInt = Field(default=2, description="Tensors that backward asks for ahead of use.")
    in_flight_bytes: PositiveInt = Field(default=268435456, description="Host memory on its way to files.")

    @property
    def paths(self) -> FolderList:
        """Return the folders of activation files, with their weights and key; no folders without `nvme_path`."""
        return FolderList(self.nvme_path or (), self.nvme_path_weights, "offload.activations.nvme_path")


class Offload(Section):
    """Options of the tiers beyond `zero_optimization.offload_optimizer` and `offload_param`."""

    create: Flag = Field(default=False, description="Make folders of `nvme_path` that do not exist.")
    delayed_update: Flag = Field(
        default=False, description="Run the update beside the next forward and backward; weights arrive one step late."
    )
    state_dtype: Literal["fp32", "bf16", "int8"] | None = Field(
        default=None, description="Dtype of moments on a tier; int8: one byte per element and a scale per 256 elements."
    )
    verify: Flag = Field(default=False, description="Compare checksums on every read from files.")
    report: Flag = Field(default=False, description="Print bytes, bandwidth and overlap of every hop.")
    trace: Text | None = Field(
        default=None, description="A trace file for Perfetto; each rank puts its number before the suffix."
    )
    trace_steps: PositiveInt = Field(default=10, description="Steps that the trace covers.")
    activations: OffloadActivations = OffloadActivations()
