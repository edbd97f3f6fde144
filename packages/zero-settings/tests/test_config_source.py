from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType

import pytest

from zero_settings import Config, ConfigError


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "ds.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_path_a_string_and_a_dict_give_the_same(file):
    source = {"train_batch_size": 4, "steps_per_print": float("inf")}
    path = file(json.dumps(source))
    configs = [Config.load(given, world_size=1) for given in (path, str(path), source, MappingProxyType(source))]
    assert all(config.to_plain() == configs[0].to_plain() and config.raw == source for config in configs)


def test_mappings_tuples_and_paths_become_plain_data():
    zero = OrderedDict(stage=2, offload_param=MappingProxyType({"nvme_path": Path("/local")}))
    source = {"train_batch_size": 4, "zero_optimization": zero}
    source["optimizer"] = {"type": "adam", "params": {"betas": (0.9, 0.95)}}
    raw = Config.load(source, world_size=1).raw
    assert raw["zero_optimization"]["offload_param"] == {"nvme_path": "/local"}
    assert type(raw["zero_optimization"]) is dict and raw["optimizer"]["params"]["betas"] == [0.9, 0.95]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"train_batch_size": 4, "train_batch_size": 8}', "train_batch_size: expected the key once"),
        (
            '{"fp16": {"enabled": true, "x": [{"a": 1, "a": 2}], "enabled": false}}',
            "fp16.enabled: expected the key once",
        ),
        ('{"train_batch_size": 4,}', "line 1, column 2"),
        ('{"a": 1} // batch', "line 1, column 10"),
        ("[1]", "expected a JSON object, got list"),
        ("", "expected JSON"),
        (b"\xff\xfe{}", "expected UTF-8 text"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_or_the_key(text, said, file):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(path, world_size=1)
    assert said in str(caught.value)
    assert str(path) in str(caught.value) or "once" in said


def test_every_repeated_key_of_a_file_is_reported(file):
    path = file('{"fp16": {"enabled": true, "x": [{"a": 1, "a": 2}], "enabled": false}}')
    with pytest.raises(ConfigError) as caught:
        Config.load(path, world_size=1)
    assert [problem.path for problem in caught.value.problems] == ["fp16.enabled", "fp16.x[0].a"]


@pytest.mark.parametrize("source", [None, 3, [1], object()])
def test_other_sources_are_refused(source):
    with pytest.raises(ConfigError, match="expected a dict, the path of a JSON file or a Config"):
        Config.load(source, world_size=1)


@pytest.mark.parametrize(
    "value",
    [b"x", object(), 10**5000, float("nan"), "\ud800", {1: 2}, [object()]],
    ids=["bytes", "object", "digits", "nan", "surrogate", "key", "list"],
)
@pytest.mark.parametrize("path", [("train_batch_size",), ("fp16", "loss_scale"), ("optimizer", "params", "lr"), ("x",)])
def test_a_value_that_no_file_holds_is_refused_by_its_key(path, value):
    source = value
    for key in reversed(path):
        source = {key: source}
    with pytest.raises(ConfigError, match=path[0]):
        Config.load(source, world_size=1)


def test_a_file_that_is_too_large_is_refused_before_it_takes_several_times_its_size(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b"9" * (17 << 20))
    with pytest.raises(ConfigError, match="ds.json.*expected at most 16777216 bytes of JSON"):
        Config.load(path, world_size=1)


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json.*No such file"):
        Config.load(tmp_path / "nowhere.json", world_size=1)
    with pytest.raises(ConfigError, match="directory"):
        Config.load(tmp_path, world_size=1)


def test_keys_that_are_no_strings_are_refused():
    with pytest.raises(ConfigError, match="zero_optimization: expected keys that are strings, got the key 3"):
        Config.load({"train_batch_size": 4, "zero_optimization": {3: 1}}, world_size=1)


def test_a_file_that_is_not_there_is_answered_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^ds.json: .*No such file.*; the working directory is {tmp_path}$"):
        Config.load("ds.json", world_size=1)
