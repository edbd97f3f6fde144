from __future__ import annotations

import pytest
import walk

from zero_settings import REMOVED_KEYS, Config

KEYS = [(path, key) for path, section in walk.sections() for key in section.written_keys()]
AUTO = [(path, key) for path, section in walk.sections() for key in section.model_fields if section.accepts_auto(key)]
REQUIRED = {"optimizer": {"type": "adam"}, "scheduler": {"type": "WarmupLR"}}


def dotted(path, key):
    return ".".join((*path, key))


@pytest.mark.parametrize(("path", "key"), [case for case in KEYS if len(case[1]) > 5], ids=lambda part: str(part))
def test_a_misspelt_key_at_any_depth_is_an_error_that_names_the_right_one(path, key, refused):
    misspelt = key + key[-1]
    error = refused(walk.nested(path, {**(REQUIRED.get(path[0], {}) if path else {}), misspelt: 1}))
    problem = next(problem for problem in error.problems if problem.path == dotted(path, misspelt))
    assert (problem.nearest or "").split(".")[-1] == key
    assert dotted(path, misspelt) in str(error) and "unknown key" in str(error)


@pytest.mark.parametrize(("section", "name", "params"), walk.PARAMS, ids=str)
def test_a_misspelt_parameter_of_every_optimizer_and_schedule_is_an_error(section, name, params, refused):
    for key in params.model_fields:
        error = refused({section: {"type": name, "params": {key + "s": 1}}})
        assert (error.path, error.nearest) == (f"{section}.params.{key}s", key)


@pytest.mark.parametrize(
    ("config", "path", "nearest"),
    [
        ({"stage": 3}, "stage", "zero_optimization.stage"),
        ({"offload_optimizer": {}}, "offload_optimizer", "zero_optimization.offload_optimizer"),
        ({"zero_optimization": {"gradient_clipping": 1.0}}, "zero_optimization.gradient_clipping", "gradient_clipping"),
        (
            {"optimizer": {"type": "adam", "params": {"max_grad_norm": 1}}},
            "optimizer.params.max_grad_norm",
            "gradient_clipping",
        ),
    ],
)
def test_a_key_at_the_wrong_place_is_told_where_it_belongs(config, path, nearest, refused):
    error = refused(config)
    assert (error.path, error.nearest) == (path, nearest)


def test_a_key_like_no_other_lists_what_there_is(refused):
    assert "the keys here are stage" in str(refused({"zero_optimization": {"xyzzy": 1}}))


def test_all_wrong_keys_are_reported_together(refused):
    error = refused({"fp61": {}, "zero_optimization": {"stge": 3, "offload_param": {"devise": "cpu"}}, "amp": {}})
    assert [problem.path for problem in error.problems] == [
        "amp",
        "fp61",
        "zero_optimization.stge",
        "zero_optimization.offload_param.devise",
    ]
    assert str(error).startswith("4 problems:\n")


@pytest.mark.parametrize("path", REMOVED_KEYS)
@pytest.mark.parametrize("value", [False, None, {}, {"enabled": False}])
def test_removed_keys_are_refused_even_when_off_and_the_replacement_is_named(path, value, refused):
    parent, _, key = path.rpartition(".")
    error = refused({parent: {key: value}} if parent else {key: value})
    assert error.path == path and error.action == REMOVED_KEYS[path]


@pytest.mark.parametrize(("path", "key"), AUTO, ids=lambda part: str(part))
def test_auto_is_accepted_where_frameworks_fill_it_and_is_the_default_otherwise(path, key, loaded):
    given = {**REQUIRED.get(path[0], {}), key: "auto"} if path else {key: "auto"}
    config = loaded({"train_micro_batch_size_per_gpu": 1, **walk.nested(path, given)})
    default = loaded({"train_micro_batch_size_per_gpu": 1})
    assert config.to_plain() == default.to_plain()
    if dotted(path, key) in config._provenance:
        assert config.provenance(dotted(path, key)).startswith("auto->")


@pytest.mark.parametrize("key", ["steps_per_print", "prescale_gradients", "dump_state", "aio", "optimizer"])
def test_auto_is_refused_where_nobody_would_fill_it(key, refused):
    error = refused({key: "auto"})
    assert error.path == key and "auto" in error.got


@pytest.mark.parametrize(
    ("config", "path", "value", "note"),
    [
        ({"zero_optimization": True}, "zero_optimization.stage", 1, "legacy form"),
        ({"zero_optimization": False}, "zero_optimization.stage", 0, "legacy form"),
        ({"bfloat16": {"enabled": True}}, "bf16.enabled", True, "written as bfloat16"),
        (
            {"zero_optimization": {"max_live_parameters": 7}},
            "zero_optimization.stage3_max_live_parameters",
            7,
            "written as max_live_parameters",
        ),
        ({"aio": {"thread_count": 3}}, "aio.intra_op_parallelism", 3, "written as thread_count"),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload_param": True}},
            "zero_optimization.offload_param.device",
            "cpu",
            "from the deprecated zero_optimization.cpu_offload_param",
        ),
    ],
)
def test_older_spellings_are_understood_and_noted(config, path, value, note, loaded):
    row = {row.path: row for row in loaded(config).report()}[path]
    assert (row.value, row.provenance) == (value, "user") and note in row.note


def test_the_old_offload_flags_are_noted_even_when_off(loaded, refused):
    rows = {row.path: row for row in loaded({"zero_optimization": {"cpu_offload": False}}).report()}
    row = rows["zero_optimization.offload_optimizer.device"]
    assert (row.value, row.provenance) == ("none", "user") and "zero_optimization.cpu_offload" in row.note
    pinned = {"stage": 2, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False}
    assert loaded({"zero_optimization": pinned}).zero_optimization.offload_param.pin_memory is False
    assert "expected cpu_offload: true with it" in str(
        refused({"zero_optimization": {**pinned, "cpu_offload_param": False}})
    )
    assert refused({"zero_optimization": {"cpu_offload": "yes"}}).path == "zero_optimization.cpu_offload"


@pytest.mark.parametrize("new", ["offload_optimizer", "offload_param"])
def test_an_old_offload_flag_counts_beside_a_section_that_is_null(new, loaded):
    old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[new]
    for value, device in ((True, "cpu"), (False, "none")):
        config = loaded({"zero_optimization": {"stage": 3, old: value, new: None}})
        row = {row.path: row for row in config.report()}[f"zero_optimization.{new}.device"]
        assert row.value == device and row.note == f"from the deprecated zero_optimization.{old}"


@pytest.mark.parametrize("value", [False, None])
def test_a_section_beside_an_old_offload_flag_that_is_off_is_not_said_to_come_from_it(value, loaded):
    section = {"stage": 2, "cpu_offload": value, "offload_optimizer": {"device": "cpu"}}
    row = {row.path: row for row in loaded({"zero_optimization": section}).report()}
    assert row["zero_optimization.offload_optimizer.device"].value == "cpu"
    assert "deprecated" not in row["zero_optimization.offload_optimizer.device"].note


@pytest.mark.parametrize("value", [0, 1])
def test_an_old_offload_flag_that_is_a_number_is_refused(value, refused):
    error = refused({"zero_optimization": {"stage": 2, "cpu_offload": value}})
    assert error.path == "zero_optimization.cpu_offload" and "expected true or false" in str(error)


def test_a_key_and_its_alias_together_are_refused(refused):
    error = refused({"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}})
    assert "they are one key" in str(error)
    assert "expected either cpu_offload or" in str(
        refused({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}})
    )


def test_an_error_in_an_alias_is_reported_under_the_name_that_was_written(refused):
    assert refused({"bfloat16": {"enabled": "yes"}}).path == "bfloat16.enabled"
    assert refused({"zero_optimization": {"prefetch_bucket_size": -1}}).path == "zero_optimization.prefetch_bucket_size"


def test_every_key_says_in_the_json_schema_what_it_does():
    schema = Config.json_schema()
    tables = {"": schema, **schema["$defs"]}
    assert sum(len(table.get("properties", {})) for table in tables.values()) > 300
    silent = [
        f"{name}.{key}"
        for name, table in tables.items()
        for key, value in table.get("properties", {}).items()
        if not value.get("description", "").endswith((".", '"'))
    ]
    assert silent == []


def test_every_key_is_in_the_json_schema_with_aliases_and_auto():
    schema = Config.json_schema()
    definitions = schema["$defs"]
    zero = definitions["ZeroOptimization"]["properties"]
    assert {"prefetch_bucket_size", "stage3_prefetch_bucket_size"} <= set(zero)
    assert {"const": "auto"} in zero["reduce_bucket_size"]["anyOf"]
    assert {"const": "auto"} in schema["properties"]["train_batch_size"]["anyOf"]
    assert "anyOf" not in schema["properties"]["dump_state"]
    assert schema["additionalProperties"] is False and zero.keys() >= {"stage"}
