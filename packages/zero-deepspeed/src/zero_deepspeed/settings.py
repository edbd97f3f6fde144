"""Loading of DeepSpeed's configurations, as users and frameworks write them, into `Config`."""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zero_settings import REMOVED_KEYS, SCHEMA_KEY, Config, ConfigError, Problem, known_keys, read, value_kinds

logger = logging.getLogger("DeepSpeed")

_READ_KEY_BY_KEY = (
    *("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler", "optimizer", "scheduler"),
)
_ASKS_NOTHING: tuple[Any, ...] = (None, False, -1, {}, [])
_CLIPPING = "DeepSpeed's default since 0.19"
_BY_MODELS = frozenset(
    [
        *("bf16", "bfloat16", "comet", "comms_logger", "compile", "csv_monitor", "fp16", "hybrid_engine"),
        *("tensor_parallel", "tensorboard", "timers", "wandb", "zero_optimization"),
    ]
)
"""Sections that DeepSpeed reads by pydantic models, which convert values."""
_LEAVES = "zero_optimization.leaf_module"
_HANDED_ON = frozenset(["optimizer", "scheduler"])
"""Sections whose values DeepSpeed hands on as they are, so that what torch refuses is refused."""
_NUMBERS: dict[type, TypeAdapter[Any]] = {bool: TypeAdapter(bool), int: TypeAdapter(int), float: TypeAdapter(float)}


def raw_config(source: Any) -> dict[str, Any]:
    """Return the user's configuration as a dict: a dict itself, or the content of a JSON or Hjson file or of urlsafe
    base64 of JSON text.

    ``source``: any of these; a string is taken for a path if there is such a file. Raises `ConfigError` for anything
    else.
    """
    if isinstance(source, dict):
        return source
    if isinstance(source, (str, os.PathLike)) and not os.path.exists(source):  # false too for a name that is too long
        try:
            return read(json.loads(base64.urlsafe_b64decode(os.fspath(source)).decode()))
        except (binascii.Error, UnicodeDecodeError, json.JSONDecodeError) as error:
            expected = "expected a dict, the path of a JSON file, or urlsafe base64 of JSON text"
            raise ConfigError(Problem("config", expected, repr(os.fspath(source)))) from error
    return _read_file(Path(source)) if isinstance(source, (str, os.PathLike)) else read(source)


def load_config(raw: Mapping[str, Any], world_size: int, *, trains: bool = True, sequence: int = 1) -> Config:
    """Return DeepSpeed's configuration ``raw`` (which stays as it is), resolved, with DeepSpeed's defaults where they
    differ.

    ``world_size``: the ranks over which states are sharded. ``trains``: false without an optimizer; then the section
    `scheduler` has no effect. ``sequence``: the ranks that share a sequence, as the mpu says.

    Where DeepSpeed is lenient, so is this. Removed keys of DeepSpeed that ask for nothing are left out. A warm-up of 0
    steps becomes 1 step. Booleans, numbers and lists may be written in another way where DeepSpeed takes them. With a
    warning, it leaves out unknown keys at the top and in sections that DeepSpeed reads key by key, offload at stage 0,
    numbers of a dynamic loss scale that is not used, and a `data_types.grad_accum_dtype` that holds less than the
    parameters' dtype (float32 is used then). Raises `ConfigError` for anything else that is wrong.
    """
    data = read(raw)
    if not trains:
        data.pop("scheduler", None)
    _drop_idle_removed_keys(data)
    _replace_zero_warmup(data)
    _drop_unknown_keys(data)
    _drop_idle_offload(data)
    _convert_values(data)
    _drop_unused_scale(data)
    _drop_narrow_accumulation(data)
    return Config.load(data, world_size=world_size, defaults=_dialect_defaults(data, sequence))


def load_for_construction(raw: Mapping[str, Any], world_size: int) -> Config:
    """Return ``raw`` resolved as by `load_config`, but without its batch sizes, optimizer and schedule, in which
    frameworks may have left values "auto" while a model is built. The micro-batch size is 1 instead. ``world_size``:
    the ranks over which states are sharded.
    """
    unresolved = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    kept = {key: value for key, value in raw.items() if key not in (*unresolved, "optimizer", "scheduler")}
    return load_config({**kept, "train_micro_batch_size_per_gpu": 1}, world_size)


def _read_file(path: Path) -> dict[str, Any]:
    """Return the content of a file: JSON, else Hjson (JSON with comments), as DeepSpeed reads it.

    Raises `ConfigError` if it is neither, or if Hjson is not installed.
    """
    try:
        return read(path)
    except ConfigError as refused:
        if not isinstance(refused.__cause__, json.JSONDecodeError):
            raise
        try:
            import hjson  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            action = "if the file is Hjson (JSON with comments), run: pip install 'zero-deepspeed[hjson]'"
            problem = Problem(str(path), "expected JSON", str(refused.__cause__), action=action)
            raise ConfigError(problem) from refused
        try:
            return read(hjson.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(_dict_of_pairs, path)))
        except hjson.HjsonDecodeError:
            raise refused from None


def _dict_of_pairs(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the (key, value) ``pairs`` of an object in the file ``path`` as a dict. Raises `ConfigError` if a key
    comes twice."""
    counts = Counter(key for key, _ in pairs)
    repeated = [key for key, count in counts.items() if count > 1]
    if repeated:
        action = "the last one would count: remove the others"
        raise ConfigError(Problem(f"{path}: {repeated[0]}", "expected the key once", "it twice", action=action))
    return dict(pairs)


def _dialect_defaults(data: Mapping[str, Any], sequence: int) -> dict[str, tuple[Any, str]]:
    """Return DeepSpeed's defaults that differ from ours for the configuration ``data``, in the form that `Config.load`
    takes: path of the key -> (value, reason). ``sequence``: the ranks that share a sequence, as the mpu says."""
    found: dict[str, tuple[Any, str]] = {"gradient_clipping": (1.0, _CLIPPING)}
    if sequence > 1:
        found["sequence_parallel_size"] = (sequence, "by the mpu")
    half = data.get("bf16", data.get("bfloat16"))
    if isinstance(half, dict) and half.get("enabled") is True and half.get("check_grad_overflow") is None:
        found["bf16.check_grad_overflow"] = (True, _CLIPPING)
    sections = [half, data.get("fp16")]
    if not any(isinstance(section, dict) and section.get("enabled") is True for section in sections):
        found["data_types.param_dtype"] = ("fp32", "DeepSpeed casts the module without fp16 and bf16")
    return found


def _drop_idle_removed_keys(data: dict[str, Any]) -> None:
    """Delete from ``data`` the keys that DeepSpeed has removed and that ask for nothing (see `_asks_nothing`)."""
    for path in REMOVED_KEYS:
        parent, _, key = path.rpartition(".")
        section = data.get(parent) if parent else data
        if isinstance(section, dict) and key in section and _asks_nothing(section[key]):
            del section[key]


def _asks_nothing(value: Any) -> bool:
    """Return whether a value is off: null, false, -1, empty, or a section that is not enabled."""
    if isinstance(value, dict) and value:
        return value.get("enabled") is False
    return any(value is idle or (value == idle and not isinstance(value, bool)) for idle in _ASKS_NOTHING)


def _replace_zero_warmup(data: dict[str, Any]) -> None:
    """Replace 0 warm-up steps of the scheduler in ``data`` by 1: DeepSpeed before 0.19.6 did so, and older frameworks
    write 0 for "auto"."""
    section = data.get("scheduler")
    params = section.get("params") if isinstance(section, dict) else None
    if isinstance(params, dict) and params.get("warmup_num_steps") == 0:
        params["warmup_num_steps"] = 1


def _drop_unknown_keys(data: dict[str, Any]) -> None:
    """Delete from ``data`` the keys that DeepSpeed would not read, with a warning for each."""
    for path, section, known in _lenient_sections(data):
        for key in [key for key in section if key not in known]:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {path}{nearest[0]}?" if nearest else ""
            logger.warning("the configuration's %s%s is no key of DeepSpeed and is ignored%s", path, key, hint)
            del section[key]


def _lenient_sections(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], set[str]]]:
    """Yield (path with a dot at the end, section, its known keys) for each section in which DeepSpeed ignores unknown
    keys; the path of the top is empty. The section aio comes twice if it has a key and its alias, the second time
    without aliases among the known keys.
    """
    yield "", data, {*known_keys(""), *REMOVED_KEYS, SCHEMA_KEY}
    for name in _READ_KEY_BY_KEY:
        if isinstance(data.get(name), dict):
            yield f"{name}.", data[name], set(known_keys(name))
    if isinstance(data.get("aio"), dict) and {"thread_count", "intra_op_parallelism"} <= set(data["aio"]):
        yield "aio.", data["aio"], set(known_keys("aio", aliases=False))


def _drop_idle_offload(data: dict[str, Any]) -> None:
    """Delete `zero_optimization.offload_optimizer` from ``data``, with a warning, if it names a device while the stage
    is 0 or "auto"."""
    zero = data.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (0, "auto"):
        return
    section = zero.get("offload_optimizer")
    if isinstance(section, dict) and section.get("device", "none") != "none":
        logger.warning("zero_optimization.offload_optimizer has no effect at stage 0, where nothing is sharded")
        del zero["offload_optimizer"]


def _drop_unused_scale(data: dict[str, Any]) -> None:
    """Delete from section `fp16` of ``data`` the integers of the dynamic loss scale that are not positive, with a
    warning, where that scale is not used: with a static one, and without fp16."""
    section = data.get("fp16")
    if not isinstance(section, dict):
        return
    scale = section.get("loss_scale", 0)
    if section.get("enabled") is True and not (isinstance(scale, (int, float)) and scale > 0):
        return
    for key in ("loss_scale_window", "min_loss_scale"):
        value = section.get(key)
        if isinstance(value, int) and value <= 0:
            logger.warning("fp16.%s: %d has no effect without a dynamic loss scale", key, value)
            del section[key]


def _drop_narrow_accumulation(data: dict[str, Any]) -> None:
    """Delete `data_types.grad_accum_dtype` from ``data``, with a warning, if it is fp16 or bf16 but not the dtype of
    the parameters."""
    types = data.get("data_types")
    if not isinstance(types, dict) or types.get("grad_accum_dtype") not in ("fp16", "bf16"):
        return
    given = types["grad_accum_dtype"]
    sections = {"fp16": data.get("fp16"), "bf16": data.get("bf16", data.get("bfloat16"))}
    half = [name for name, section in sections.items() if isinstance(section, dict) and section.get("enabled") is True]
    if half != [given]:
        logger.warning("data_types.grad_accum_dtype: %s holds less than the parameters; float32 is used", given)
        del types["grad_accum_dtype"]


def _convert_values(data: dict[str, Any]) -> None:
    """Replace values in ``data`` that have another type than their key by values of that type, where DeepSpeed takes
    them too.

    In the sections that DeepSpeed reads by pydantic models, these are 0, 1, "true" or "off" for a boolean, a string for
    a number, and in `leaf_module` one string for a list of them. At the top and in other sections DeepSpeed uses values
    as they are, so there only 0 and 1 are replaced, for a boolean. All else stays, to be refused later.
    """
    for path, section, kinds in value_kinds(data):
        top = path.partition(".")[0]
        if top in _HANDED_ON:
            continue
        for key, kind in kinds.items():
            value = section[key]
            if kind is tuple:
                section[key] = [value] if path == _LEAVES and isinstance(value, str) and value != "auto" else value
            elif top in _BY_MODELS:
                section[key] = _converted(value, kind)
            elif kind is bool and value in (0, 1) and isinstance(value, int):
                section[key] = bool(value)


def _converted(value: Any, kind: type) -> Any:
    """Return ``value`` as ``kind`` (bool, int or float) if a pydantic model takes it for one; else as it is."""
    if not isinstance(value, (int, str)) or isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        return value
    try:
        return _NUMBERS[kind].validate_python(value)
    except ValidationError:
        return value
