from __future__ import annotations

import pytest

from zero_settings._base import Section
from zero_settings.features import NO_EFFECT, REFUSED, leaves, no_effect
from zero_settings.keys import ConfigFile
from zero_settings.precision import precision_policy

ASKED = {
    "compile.passes": ["z3"],
    "datastates_ckpt": {"host_cache_size": 16},
    "managed_gradient_accumulation": False,
    "optimizer.type": "MuAdamW",
    "pipeline.stages": 2,
    "tensor_parallel.autotp_size": 2,
    "tensor_parallel.tp.tp_size": 2,
    "weight_quantization": {"num_bits": 4},
    "zero_optimization.load_from_fp32_weights": False,
    "zero_optimization.zenflow": {"topk_ratio": 0.2},
}


def at(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.path)
def test_a_key_of_a_feature_that_is_not_available_is_refused_by_name(row, refused):
    config = at(row.path, ASKED.get(row.path, True))
    error = refused({"optimizer": {"type": "adam", **config["optimizer"]}} if "optimizer" in config else config)
    assert [problem.path for problem in error.problems] == [row.path]
    assert row.feature in str(error) and "not available in this version" in str(error) and row.instead in str(error)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.path)
def test_the_default_of_every_refusable_key_is_inert(row):
    section, names = ConfigFile, row.path.split(".")
    for name in names[:-1]:
        section = section.section_of(name, {})
    field = section.model_fields[names[-1]]
    assert field.is_required() or not row.when(field.get_default(call_default_factory=True))


def test_parameter_offload_is_without_effect_below_stage_3(loaded):
    for device in ("cpu", "nvme"):
        offload = {"device": device, "nvme_path": "/local_nvme"}
        for stage, silent in ((3, True), (2, False)):
            config = loaded({"zero_optimization": {"stage": stage, "offload_param": offload}})
            notes = {line.path: line.note for line in config.report()}
            assert ("no effect" not in notes["zero_optimization.offload_param.device"]) is silent


@pytest.mark.parametrize("path", NO_EFFECT)
def test_every_key_without_effect_exists_and_says_why(path):
    section = ConfigFile
    *parents, key = path.split(".")
    for name in parents:
        siblings = {"type": "muon" if key == "ns_method" else "onebitadam"} if name == "params" else {}
        section = section.section_of(name, siblings)
    assert issubclass(section, Section) and key in section.model_fields
    assert NO_EFFECT[path]


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"zero_optimization": {"contiguous_gradients": False}}, "zero_optimization.contiguous_gradients"),
        ({"zero_optimization": {"overlap_comm": False}}, "zero_optimization.overlap_comm"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "zero_optimization.round_robin_gradients"),
        ({"zero_optimization": {"offload_optimizer": {"pin_memory": True}}},
         "zero_optimization.offload_optimizer.pin_memory"),
        ({"aio": {"queue_depth": 32}}, "aio.queue_depth"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"zero_allow_untested_optimizer": True}, "zero_allow_untested_optimizer"),
        ({"fp16": {"enabled": False, "loss_scale": 0}}, "fp16.loss_scale"),
        ({"tensorboard": {"enabled": False, "output_path": "logs"}}, "tensorboard.output_path"),
        ({"timers": {"throughput": {"enabled": False, "synchronized": False}}}, "timers.throughput.synchronized"),
    ],
)  # fmt: skip
def test_hints_without_meaning_here_are_accepted_and_listed_as_such(config, path, loaded):
    row = {row.path: row for row in loaded(config).report()}[path]
    assert row.provenance == "user" and row.note.startswith("accepted, no effect: ")


TOOLS = ("comet", "comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "wandb")
MODES = (None, "fp16", "bf16", "torch_autocast", *TOOLS)

HAS_EFFECT = """
audit_every activation_checkpointing.contiguous_memory_optimization activation_checkpointing.cpu_checkpointing
activation_checkpointing.number_checkpoints activation_checkpointing.partition_activations
activation_checkpointing.profile activation_checkpointing.synchronize_checkpoint_boundary
checkpoint.format checkpoint.in_memory.every checkpoint.in_memory.path checkpoint.interval checkpoint.keep_last
checkpoint.mean_time_between_failures checkpoint.overhead checkpoint.path checkpoint.use_node_local_storage
checkpoint.writer.decoupled
bf16.auto_cast bf16.check_grad_overflow bf16.enabled bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
comet.api_key comet.enabled comet.experiment_key comet.experiment_name comet.mode comet.online comet.project
comet.samples_log_interval comet.workspace comms_logger.enabled comms_logger.prof_all comms_logger.prof_ops
comms_logger.verbose csv_monitor.enabled csv_monitor.job_name csv_monitor.output_path dataloader_drop_last dump_state
flops_profiler.detailed flops_profiler.enabled flops_profiler.module_depth flops_profiler.output_file
flops_profiler.profile_step flops_profiler.top_modules memory_breakdown tensorboard.enabled tensorboard.job_name
tensorboard.output_path timers.throughput.enabled wall_clock_breakdown wandb.enabled wandb.group wandb.project
wandb.team communication_data_type data_types.buffer_dtype data_types.grad_accum_dtype
data_types.keep_in_fp32_modules data_types.param_dtype deterministic fp16.auto_cast
fp16.consecutive_hysteresis fp16.enabled fp16.fp16_master_weights_and_grads fp16.hysteresis fp16.initial_scale_power
fp16.loss_scale fp16.loss_scale_window fp16.min_loss_scale gradient_accumulation_steps gradient_allreduce_op
gradient_clipping optimizer
reduce_each_micro_batch scheduler sequence_parallel_size steps_per_print train_batch_size
train_micro_batch_size_per_gpu
torch_autocast.dtype torch_autocast.enabled torch_autocast.lower_precision_safe_modules
offload.activations.device offload.activations.in_flight_bytes offload.activations.min_bytes
offload.activations.nvme_path_weights
offload.activations.nvme_path offload.activations.prefetch offload.create offload.delayed_update offload.report
offload.state_dtype offload.trace offload.trace_steps offload.verify
aio.block_size aio.intra_op_parallelism aio.overlap_events aio.queue_depth aio.single_submit aio.use_gds
zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_optimizer.device
zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_optimizer.pin_memory
zero_optimization.offload_optimizer.nvme_path_weights zero_optimization.offload_param.nvme_path_weights
zero_optimization.offload_optimizer.pipeline_read zero_optimization.offload_optimizer.pipeline_write
zero_optimization.offload_optimizer.overlap zero_optimization.offload_optimizer.overlap_journal
zero_optimization.offload_optimizer.ratio zero_optimization.offload_param.buffer_count
zero_optimization.offload_param.buffer_size zero_optimization.offload_param.device
zero_optimization.offload_param.max_in_cpu zero_optimization.offload_param.nvme_path
zero_optimization.offload_param.pin_memory zero_optimization.sub_group_size
zero_optimization.leaf_module.classes zero_optimization.leaf_module.name_suffixes zero_optimization.leaf_module.names
zero_optimization.reduce_bucket_size zero_optimization.stage zero_optimization.stage3_max_live_parameters
zero_optimization.unit_max_numel zero_optimization.unit_min_numel
zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_prefetch_bucket_size
comm.gradient_codec comm.ranks_per_node comm.stopped_after comm.weight_codec
elastic.batch_size run_record.max_bytes run_record.path
run_record.plan keep_freed_memory
zero_optimization.mics_shard_size zero_optimization.zero_hpz_partition_size zero_optimization.zero_quantized_gradients
zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_weights
""".split()


def test_every_key_has_an_effect_is_refused_or_says_that_it_has_none(loaded):
    refusable = {row.path for row in REFUSED}
    configs = [loaded({mode: {"enabled": True}} if mode else {}) for mode in MODES]
    nvme = {"device": "nvme", "nvme_path": "/local_nvme"}
    configs.append(loaded({"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}))
    overlap = {"device": "cpu", "overlap": "exact"}
    configs.append(loaded({"zero_optimization": {"offload_optimizer": overlap}}))
    quantized = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    configs.append(loaded({"zero_optimization": quantized}))
    configs.append(loaded({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["gather"]}}))
    configs.append(loaded({"offload": {"trace": "trace.json", "activations": nvme}}))
    silent = {path for config in configs for path, _ in leaves(config) if not no_effect(config, path)}
    assert silent - refusable == set(HAS_EFFECT)


def test_keys_that_nobody_wrote_carry_no_note(loaded):
    assert [row.path for row in loaded({}).report() if row.note] == []


@pytest.mark.parametrize(
    ("config", "path", "said"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled", "one precision mode"),
        ({"offload": {"delayed_update": True}}, "offload.delayed_update", 'offload_optimizer.device "cpu" or "nvme"'),
        ({"offload": {"state_dtype": "int8"}}, "offload.state_dtype", 'offload_optimizer.device "cpu" or "nvme"'),
        ({"offload": {"activations": {"device": "nvme"}}}, "offload.activations.nvme_path", "a directory"),
        ({"zero_optimization": {"offload_param": {"nvme_path": ["/a", "/b"], "nvme_path_weights": [1]}}},
         "zero_optimization.offload_param.nvme_path_weights", "2 numbers, one for each directory"),
        ({"offload": {"activations": {"nvme_path_weights": [1, 2]}}},
         "offload.activations.nvme_path_weights", "expected 0 numbers"),
        ({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16.enabled", "one precision mode"),
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "torch_autocast.enabled", "keep one"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
         "fp16.fp16_master_weights_and_grads", "stage 1, 2 or 3"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
         "bf16.bf16_master_weights_and_grads", "stage 1, 2 or 3"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states", "with it"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
         "zero_optimization.offload_optimizer.nvme_path", "a directory"),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}}, "data_types.param_dtype", "bf16"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype", '"bf16": {"enabled": true}'),
        ({"data_types": {"param_dtype": "fp64"}, "torch_autocast": {"enabled": True}},
         "data_types.param_dtype", "float64"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types", "accumulate_dtype"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp16"}, "data_types", "wire_dtype"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}, "fp16", "below min_loss_scale"),
        ({"activation_checkpointing": {"contiguous_memory_optimization": True}},
         "activation_checkpointing.number_checkpoints", "segments that wait for backward"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_refused(config, path, said, refused):
    error = refused(config)
    assert error.path == path and said in str(error)


@pytest.mark.parametrize(
    ("zero", "path", "said"),
    [
        ({"stage": 3, "zero_hpz_partition_size": 4}, "zero_hpz_partition_size",
         "expected a divisor of the number of ranks, 6 (1, 2, 3, 6), got 4"),
        ({"stage": 3, "zero_hpz_partition_size": 3}, "zero_hpz_partition_size",
         "expected a divisor of comm.ranks_per_node, 2, got 3; or backward gathers would leave the node"),
        ({"stage": 3, "zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}, "zero_hpz_partition_size",
         "secondary shards stay on the device"),
        ({"stage": 3, "zero_hpz_partition_size": 2, "mics_shard_size": 2}, "zero_hpz_partition_size",
         "expected 1 with zero_optimization.mics_shard_size"),
        ({"stage": 3, "mics_shard_size": 4}, "mics_shard_size", "expected a divisor of the number of ranks, 6"),
        ({"stage": 3, "mics_shard_size": 0}, "mics_shard_size", "expected a number of ranks, or -1 for all of them"),
        ({"stage": 0, "mics_shard_size": 2}, "mics_shard_size", "expected stage 1, 2 or 3 with it, got stage 0"),
    ],
)  # fmt: skip
def test_groups_of_ranks_that_cannot_be_made_are_refused(zero, path, said, refused):
    error = refused({"zero_optimization": zero, "comm": {"ranks_per_node": 2}}, world_size=6)
    assert [problem.path for problem in error.problems] == [f"zero_optimization.{path}"] and said in str(error)


def test_below_stage_3_keys_about_gathers_are_without_effect(loaded):
    keys = {"zero_hpz_partition_size": 5, "zero_quantized_weights": True, "zero_quantized_nontrainable_weights": True}
    for stage, silent in ((3, True), (2, False)):
        zero = {"stage": stage, **keys}
        notes = {row.path: row.note for row in loaded({"zero_optimization": zero}, world_size=5).report()}
        assert all(("below stage 3" not in notes[f"zero_optimization.{key}"]) is silent for key in keys)


def test_a_codec_for_what_is_not_quantised_is_without_effect(loaded):
    comm = {"weight_codec": "fp8_e4m3", "gradient_codec": "int8"}
    notes = {row.path: row.note for row in loaded({"comm": comm}).report()}
    assert notes["comm.weight_codec"].endswith("zero_optimization.zero_quantized_weights is false")
    assert notes["comm.gradient_codec"].endswith("zero_optimization.zero_quantized_gradients is false")


def test_every_accepted_precision_section_gives_a_policy(loaded):
    for mode in ("fp16", "bf16", "torch_autocast"):
        assert precision_policy(loaded({mode: {"enabled": True}}))
