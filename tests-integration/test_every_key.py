"""Every key that `docs/configuration.md` lists under "Keys with an effect" has one that can be seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import effects
import pytest
import torch

from zero_comm import run_ranks

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "FOLDER"  # stands for the run's own folder
ZERO, NVME = "zero_optimization", {"device": "nvme", "nvme_path": FOLDER}
EVERYTHING_MOVES = {"stage3_param_persistence_threshold": 0, "unit_min_numel": 1, "stage3_prefetch_bucket_size": 1}
FP16, BF16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}, {"bf16": {"enabled": True}}
OVERFLOWS = [1.0, 1e38, 1.0, 1e38, 1e38, 1.0, 1.0]


NOTHING: Mapping[str, Any] = {}


class Change(NamedTuple):
    """A value that ``key`` is changed to, beside ``base``; ``case``: the run (`effects.effects`); ``sees``: facts of
    which some have to differ."""

    key: str
    value: Any
    base: Mapping[str, Any] = NOTHING
    case: Mapping[str, Any] = NOTHING
    ranks: int = 2
    sees: tuple[str, ...] = ()


class Shown(NamedTuple):
    """A test that fails when ``key`` has no effect: its file, and its name."""

    key: str
    file: str
    test: str


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both, sections key by key."""
    found = dict(base)
    for key, value in more.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return found


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """A configuration with a section `zero_optimization`."""
    return {ZERO: {"stage": stage, **EVERYTHING_MOVES, **more}}


def at(key: str, value: Any) -> dict[str, Any]:
    """A configuration with nothing but ``key``."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


STREAMED = zero(3, offload_param=NVME, offload_optimizer={"device": "cpu"})
STATES_IN_FILES = zero(1, offload_optimizer=NVME)
ACTIVATIONS = {"offload": {"activations": {**NVME, "min_bytes": 16}}}
RECOMPUTED = {"recomputed": True}
LISTED = {"comms_logger": {"enabled": True, "verbose": True}}
GATHERS_ALONE = {"comms_logger": {"prof_ops": ["gather"]}}
PROFILED = {"flops_profiler": {"enabled": True}}
MASTERLESS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
DRAWN = {"deterministic": {"across_world_sizes": 2}}

CHANGES = [
    Change("train_batch_size", 16, sees=("sizes",)),
    Change("train_micro_batch_size_per_gpu", 2, sees=("sizes",)),
    Change("gradient_accumulation_steps", 2, sees=("sizes", "history")),
    Change("reduce_each_micro_batch", True, merged(zero(1), {"gradient_accumulation_steps": 2}), sees=("sent",)),
    Change("gradient_clipping", 1e-3, sees=("weights",)),
    Change(f"{ZERO}.stage", 2, zero(1), sees=("memory", "sent")),
    Change(f"{ZERO}.unit_max_numel", 3000, zero(3), sees=("units",)),
    Change(f"{ZERO}.unit_min_numel", 5000, zero(3), sees=("units",)),
    Change(f"{ZERO}.offload_param.device", "cpu", zero(3), sees=("memory",)),
    Change(f"{ZERO}.offload_param.buffer_count", 2, STREAMED, sees=("memory",)),
    Change(f"{ZERO}.offload_param.buffer_size", 3000, STREAMED, sees=("memory", "error")),
    Change(f"{ZERO}.offload_optimizer.device", "cpu", zero(1), sees=("memory",)),
    Change(f"{ZERO}.offload_optimizer.buffer_count", 2, STATES_IN_FILES, sees=("memory",)),
    Change(f"{ZERO}.offload_optimizer.ratio", 0.5, STATES_IN_FILES, sees=("memory",)),
    Change(f"{ZERO}.sub_group_size", 300, STATES_IN_FILES, sees=("memory",)),
    Change(f"{ZERO}.stage3_prefetch_bucket_size", 10**6, merged(zero(3), LISTED), sees=("lines",)),
    Change(f"{ZERO}.stage3_param_persistence_threshold", 100, zero(3), sees=("units", "sent")),
    Change(
        f"{ZERO}.stage3_max_live_parameters",
        3000,
        merged(zero(3, stage3_prefetch_bucket_size=10**6), LISTED),
        sees=("lines",),
    ),
    Change(f"{ZERO}.mics_shard_size", 1, zero(3), sees=("memory", "sent")),
    Change(f"{ZERO}.zero_hpz_partition_size", 1, zero(3, zero_hpz_partition_size=2), sees=("memory", "sent")),
    Change(f"{ZERO}.zero_quantized_weights", True, zero(3), sees=("sent", "weights")),
    Change(f"{ZERO}.zero_quantized_nontrainable_weights", True, zero(3), sees=("sent", "weights")),
    Change(f"{ZERO}.zero_quantized_gradients", True, zero(3), sees=("sent", "weights")),
    Change(f"{ZERO}.leaf_module.classes", ["effects.Block"], zero(3, unit_max_numel=3000), sees=("units",)),
    Change(f"{ZERO}.leaf_module.names", ["blocks.0"], zero(3, unit_max_numel=3000), sees=("units",)),
    Change(f"{ZERO}.leaf_module.name_suffixes", ["0"], zero(3, unit_max_numel=3000), sees=("units",)),
    Change("fp16.enabled", True, sees=("dtypes",)),
    Change("fp16.auto_cast", True, FP16, {"input": torch.float32}, sees=("error",)),
    Change("bf16.auto_cast", True, BF16, {"input": torch.float32}, sees=("error",)),
    Change("gradient_allreduce_op", "sum", sees=("weights",)),
    Change("fp16.loss_scale", 64.0, FP16, {"input": torch.float16}, sees=("history",)),
    Change("fp16.initial_scale_power", 4, FP16, {"input": torch.float16}, sees=("history",)),
    Change("fp16.loss_scale_window", 1, FP16, {"input": torch.float16}, sees=("history",)),
    Change("fp16.hysteresis", 1, FP16, {"input": torch.float16, "steps": 7, "scale": OVERFLOWS}, sees=("history",)),
    Change(
        "fp16.consecutive_hysteresis",
        True,
        FP16,
        {"input": torch.float16, "steps": 7, "scale": OVERFLOWS},
        sees=("history",),
    ),
    Change(
        "fp16.min_loss_scale",
        128,
        merged(FP16, {"fp16": {"hysteresis": 1}}),
        {"input": torch.float16, "steps": 7, "scale": OVERFLOWS},
        sees=("history",),
    ),
    Change(
        "fp16.fp16_master_weights_and_grads", True, merged(zero(1), FP16), {"input": torch.float16}, sees=("memory",)
    ),
    Change("bf16.enabled", True, sees=("dtypes",)),
    Change(
        "bf16.check_grad_overflow",
        True,
        BF16,
        {"input": torch.bfloat16, "scale": [1.0, float("inf"), 1.0]},
        sees=("error",),
    ),
    Change(
        "bf16.bf16_master_weights_and_grads", True, merged(zero(1), BF16), {"input": torch.bfloat16}, sees=("memory",)
    ),
    Change("torch_autocast.enabled", True, sees=("weights",)),
    Change("torch_autocast.dtype", "float16", {"torch_autocast": {"enabled": True}}, sees=("weights",)),
    Change("data_types.grad_accum_dtype", "bf16", merged(zero(1), BF16), {"input": torch.bfloat16}, sees=("weights",)),
    Change("data_types.param_dtype", "fp64", sees=("dtypes", "error")),
    Change("data_types.buffer_dtype", "bf16", sees=("dtypes",)),
    Change("data_types.keep_in_fp32_modules", ["norm"], BF16, {"input": torch.bfloat16}, sees=("dtypes",)),
    Change("communication_data_type", "bf16", zero(2), sees=("sent", "weights")),
    Change("deterministic.across_world_sizes", 4, DRAWN, sees=("sizes",)),
    Change("audit_every", 1, zero(1), sees=("sent",)),
    Change("steps_per_print", 1, sees=("lines",)),
    Change("wall_clock_breakdown", True, sees=("lines", "printed")),
    Change("memory_breakdown", True, sees=("lines", "printed")),
    Change("dataloader_drop_last", True, {}, {"loader": 13}, sees=("batches",)),
    Change("comm.ranks_per_node", 1, zero(3, zero_quantized_gradients=True), sees=("sent",)),
    Change("comm.weight_codec", "int4", zero(3, zero_quantized_weights=True), sees=("sent", "weights")),
    Change("comm.gradient_codec", "int8", zero(3, zero_quantized_gradients=True), sees=("sent", "weights")),
    Change("offload.delayed_update", True, zero(1, offload_optimizer={"device": "cpu"}), sees=("weights",)),
    Change(
        f"{ZERO}.offload_optimizer.overlap", "exact", zero(1, offload_optimizer={"device": "cpu"}), sees=("memory",)
    ),
    Change(
        f"{ZERO}.offload_optimizer.overlap_journal",
        0,
        zero(1, offload_optimizer={"device": "cpu", "overlap": "exact"}),
        sees=("memory",),
    ),
    Change("offload.state_dtype", "int8", zero(1, offload_optimizer={"device": "cpu"}), sees=("memory",)),
    Change("offload.trace", f"{FOLDER}/trace.json", STATES_IN_FILES, sees=("left",)),
    Change("offload.activations.device", "none", ACTIVATIONS, RECOMPUTED, sees=("swapped", "left")),
    Change("offload.activations.min_bytes", 10**6, ACTIVATIONS, RECOMPUTED, sees=("swapped",)),
    Change("activation_checkpointing.profile", True, {}, RECOMPUTED, sees=("lines",)),
    Change("flops_profiler.enabled", True, sees=("lines", "printed")),
    Change("flops_profiler.profile_step", 2, PROFILED, sees=("lines",)),
    Change("flops_profiler.module_depth", 1, PROFILED, sees=("lines", "printed")),
    Change("flops_profiler.top_modules", 3, PROFILED, sees=("lines", "printed")),
    Change("flops_profiler.detailed", False, PROFILED, sees=("lines", "printed")),
    Change("flops_profiler.output_file", f"{FOLDER}/flops.txt", PROFILED, sees=("left",)),
    Change("comms_logger.enabled", True, zero(3), sees=("lines", "printed")),
    Change("comms_logger.prof_all", False, merged(merged(zero(3), LISTED), GATHERS_ALONE), sees=("lines", "printed")),
    Change(
        "comms_logger.prof_ops",
        ["gather"],
        merged(zero(3), {"comms_logger": {"enabled": True, "prof_all": False}}),
        sees=("lines", "printed"),
    ),
    Change("comms_logger.verbose", True, merged(zero(3), {"comms_logger": {"enabled": True}}), sees=("lines",)),
    Change("csv_monitor.enabled", True, {"csv_monitor": {"output_path": FOLDER}}, sees=("left",)),
    Change("csv_monitor.job_name", "other", {"csv_monitor": {"enabled": True, "output_path": FOLDER}}, sees=("left",)),
    Change("run_record.path", f"{FOLDER}/record", sees=("left",)),
    Change("checkpoint.interval", 1, {"checkpoint": {"path": f"{FOLDER}/saved"}}, sees=("left",)),
    Change("checkpoint.keep_last", 1, {"checkpoint": {"path": f"{FOLDER}/saved", "interval": 1}}, sees=("left",)),
    Change(
        "bf16.bf16_optimizer_states",
        True,
        merged(zero(1, offload_optimizer={"device": "cpu"}), MASTERLESS),
        {"input": torch.bfloat16},
        sees=("memory",),
    ),
    Change(
        "torch_autocast.lower_precision_safe_modules",
        ["torch.nn.modules.normalization.LayerNorm"],
        merged(zero(3), {"torch_autocast": {"enabled": True}}),
        sees=("sent",),
    ),
    Change("deterministic.seed", 2, merged(DRAWN, {"deterministic": {"seed": 1}}), {"dropout": 0.5}, sees=("weights",)),
    *(
        Change(f"aio.{key}", value, STATES_IN_FILES, sees=("io",))
        for key, value in {"block_size": 1 << 16, "queue_depth": 4, "intra_op_parallelism": 3}.items()
    ),
    Change("timers.throughput.enabled", False, {"steps_per_print": 1}, sees=("lines",)),
]


ENGINE, OFFLOAD, AIO = "packages/zero-core/tests/engine", "packages/zero-offload/tests", "packages/zero-nvme-aio/tests"
INSTRUMENTS, MONITORS = f"{ENGINE}/test_engine_instruments.py", f"{ENGINE}/test_engine_monitors.py"
CHECKPOINTING = "packages/zero-core/tests/checkpointing/test_checkpointing.py"
INTERVAL, KEYS = f"{ENGINE}/test_engine_interval.py", "tests-integration/test_offload_keys.py"
PATHS = "tests-integration/test_several_paths.py"
SUBMITTED = ("single_submit", "overlap_events")
SHOWN = [
    Shown("dump_state", INSTRUMENTS, "test_dump_state_prints_every_value_and_the_units"),
    Shown(
        f"{ZERO}.offload_param.max_in_cpu",
        KEYS,
        "test_shards_fill_the_host_memory_given_and_buffers_have_the_size_given",
    ),
    Shown(
        "keep_freed_memory",
        "tests-integration/test_page_faults.py",
        "test_a_step_in_steady_state_has_hardly_a_page_fault",
    ),
    Shown("offload.report", KEYS, "test_what_moves_is_reported_and_traced"),
    Shown("offload.trace_steps", KEYS, "test_what_moves_is_reported_and_traced"),
    Shown(f"{ZERO}.offload_param.nvme_path", KEYS, "striped"),
    Shown(f"{ZERO}.offload_optimizer.nvme_path", KEYS, "striped"),
    Shown("offload.activations.nvme_path", KEYS, "test_activations_on_nvme_change_no_bit"),
    Shown(f"{ZERO}.offload_param.nvme_path_weights", PATHS, "test_several_paths_give_the_bits_of_one"),
    Shown(f"{ZERO}.offload_optimizer.nvme_path_weights", PATHS, "test_several_paths_give_the_bits_of_one"),
    Shown("offload.activations.nvme_path_weights", PATHS, "test_activations_are_shared_by_the_weights"),
    Shown(
        "run_record.max_bytes",
        "packages/zero-report/tests/test_record.py",
        "test_a_rank_stays_within_its_share_of_the_bound",
    ),
    Shown("run_record.plan", f"{ENGINE}/test_engine_record.py", "test_a_plan_is_beside_what_is_measured"),
    Shown("tensorboard.enabled", MONITORS, "test_tensorboard_reads_back_what_was_written"),
    Shown("tensorboard.output_path", MONITORS, "test_tensorboard_reads_back_what_was_written"),
    Shown("tensorboard.job_name", MONITORS, "test_tensorboard_reads_back_what_was_written"),
    *(
        Shown(f"wandb.{key}", MONITORS, "test_wandb_stores_the_run_offline")
        for key in ("enabled", "project", "group", "team")
    ),
    *(
        Shown(f"comet.{key}", MONITORS, "test_comet_stores_the_experiment_offline")
        for key in (
            *("enabled", "samples_log_interval", "project", "workspace", "api_key"),
            *("experiment_name", "experiment_key", "online", "mode"),
        )
    ),
    Shown("csv_monitor.output_path", MONITORS, "test_csv_files_hold_rank_0s_losses_and_the_rates_by_samples_seen"),
    Shown("checkpoint.path", INTERVAL, "test_a_fixed_interval_saves_by_itself_and_the_newest_resumes"),
]
SHOWN += [
    *(
        Shown(
            f"activation_checkpointing.{key}",
            CHECKPOINTING,
            "test_recomputation_changes_no_weight_wherever_inputs_wait",
        )
        for key in ("partition_activations", "contiguous_memory_optimization", "number_checkpoints")
    ),
    *(Shown(f"aio.{key}", f"{AIO}/test_package.py", "test_deepspeeds_keys_keep_their_meaning") for key in SUBMITTED),
    *(
        Shown(
            f"checkpoint.in_memory.{key}",
            "tests-integration/test_in_memory.py",
            "test_a_lost_node_goes_on_from_memory_to_the_bit",
        )
        for key in ("every", "path")
    ),
    Shown(
        "sequence_parallel_size",
        "tests-integration/test_sequence_parallel.py",
        "test_every_stage_follows_one_process_bit_for_bit_alike",
    ),
    Shown(
        "checkpoint.format",
        "packages/zero-deepspeed/tests/test_written_checkpoints.py",
        "test_what_is_saved_in_either_format_continues_alike",
    ),
    Shown("checkpoint.mean_time_between_failures", INTERVAL, "test_rare_failures_make_saves_rare"),
    Shown("checkpoint.overhead", INTERVAL, "test_rank_0_chooses_for_all_says_why_and_adapts"),
    Shown(
        "checkpoint.use_node_local_storage",
        f"{ENGINE}/test_engine_checkpoint.py",
        "test_nodes_without_a_common_file_system_keep_what_their_ranks_need",
    ),
    Shown(
        "checkpoint.writer.decoupled",
        f"{ENGINE}/test_engine_background_saves.py",
        "test_a_save_behind_training_holds_the_state_at_its_call",
    ),
    Shown("comm.stopped_after", "tests-integration/test_left_alone.py", "test_a_stopped_rank_is_named"),
    Shown(
        "elastic.batch_size",
        "packages/zero-settings/tests/test_config_batch.py",
        "test_an_elastic_batch_keeps_what_its_rule_names_at_any_number_of_ranks",
    ),
    Shown(
        "offload.create",
        f"{ENGINE}/test_engine_swap_folders.py",
        "test_a_missing_swap_folder_is_refused_with_the_nearest_that_exists",
    ),
    Shown("offload.verify", f"{OFFLOAD}/test_faults.py", "test_a_flipped_bit_is_found"),
]
NEEDS_AN_ACCELERATOR = {
    "activation_checkpointing.cpu_checkpointing",
    f"{ZERO}.offload_param.pin_memory",
    f"{ZERO}.offload_optimizer.pin_memory",
    "deterministic",
    "activation_checkpointing.synchronize_checkpoint_boundary",
    "aio.use_gds",
}


CHANGES_TIMES_ALONE = {
    f"{ZERO}.offload_optimizer.pipeline_read",
    f"{ZERO}.offload_optimizer.pipeline_write",
    f"{ZERO}.reduce_bucket_size",
    "offload.activations.in_flight_bytes",
    "offload.activations.prefetch",
}


def prepared(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A complete configuration with a folder of its own."""
    base = {"train_micro_batch_size_per_gpu": effects.SAMPLES, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    whole = merged(base, settings)
    if "train_batch_size" in settings:
        whole.pop("train_micro_batch_size_per_gpu")

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: placed(inner) for key, inner in value.items()}
        return value.replace(FOLDER, str(folder)) if isinstance(value, str) else value

    return placed(whole)  # type: ignore[no-any-return]


def observe(changes: list[Change], folder: str) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """For each change: what is seen without it, again without it, and with it."""
    found = []
    for number, change in enumerate(changes):
        settings = [change.base, change.base, merged(change.base, at(change.key, change.value))]
        runs = []
        for turn, one in enumerate(settings):
            here = Path(folder) / f"{number}{'abc'[turn]}"
            here.mkdir(exist_ok=True)
            runs.append(effects.effects(prepared(one, here), str(here), change.case))
        found.append((runs[0], runs[1], runs[2]))
    return found


def keys_with_an_effect() -> list[str]:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("<!-- generated: effective -->")[2].partition("<!-- end -->")[0]
    return re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)


OFTEN = {
    "aio.queue_depth",
    "bf16.bf16_optimizer_states",
    f"{ZERO}.offload_param.buffer_size",
    f"{ZERO}.sub_group_size",
}


@pytest.mark.parametrize(
    "change",
    [pytest.param(c, id=c.key, marks=() if c.key in OFTEN else pytest.mark.soak) for c in CHANGES],
)
def test_changing_a_key_changes_what_is_seen(change: Change, tmp_path: Path) -> None:
    differs: set[str] = set()
    for before, again, after in (run[0] for run in run_ranks(observe, change.ranks, [change], str(tmp_path))):
        same = {fact for fact in before if before[fact] == again.get(fact)}
        differs |= {fact for fact in same | (after.keys() - before.keys()) if before.get(fact) != after.get(fact)}
    assert differs & set(change.sees), differs


def test_every_key_with_an_effect_is_shown_to_have_one() -> None:
    shown = [change.key for change in CHANGES] + [row.key for row in SHOWN]
    assert sorted(set(keys_with_an_effect()) - NEEDS_AN_ACCELERATOR - CHANGES_TIMES_ALONE - set(shown)) == []
    assert len(shown) == len(set(shown)) and set(shown) <= set(keys_with_an_effect())


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: row.key)
def test_a_key_is_changed_by_the_test_that_is_said_to(row: Shown) -> None:
    source = (ROOT / row.file).read_text(encoding="utf-8")
    bodies = [
        str(ast.get_source_segment(source, node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == row.test
    ]
    section, _, key = row.key.rpartition(".")
    words = {key, section.rpartition(".")[2]} if key == "enabled" else {key}
    assert bodies and any(word in source for word in words), row
