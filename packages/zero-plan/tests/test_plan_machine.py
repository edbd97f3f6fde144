from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zero_plan import PlanError, Setup, estimate_step, load_machine, parse_machine, presets
from zero_plan.cli import main
from zero_plan.machine import KEYS
from zero_plan.quantities import format_quantity, parse_count, parse_quantity
from zero_plan.shapes import load_shape


@pytest.mark.parametrize("name", presets())
def test_every_value_of_a_preset_has_a_source_and_survives_a_round_trip(name: str) -> None:
    machine = load_machine(name)
    for key, value in machine.rows():
        assert len(value.source) > 10 and value.source != name, key
    assert dict(parse_machine(machine.as_toml(), "copy").rows()) == dict(machine.rows())


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("80 GB", "bytes", 80e9),
        ("80GiB", "bytes", 80 * 2**30),
        ("1_000 B", "bytes", 1000),
        ("3.35 TB/s", "bytes/s", 3.35e12),
        ("400 Gb/s", "bytes/s", 50e9),
        ("989.4 TFLOP/s", "FLOP/s", 989.4e12),
        (8, "count", 8),
        ("8", "count", 8),
    ],
)
def test_quantities_are_read_as_people_write_them(text: object, unit: str, value: float) -> None:
    assert parse_quantity(text, unit, "x") == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("80 GB/s", "bytes"),
        ("80 GB", "bytes/s"),
        ("80", "bytes"),
        ("80 Gb", "bytes"),
        ("80 GFLOP", "FLOP/s"),
        ("-1 GB", "bytes"),
        ("0 GB", "bytes"),
        ("1.2.3 GB", "bytes"),
        ("eight", "count"),
        (0, "count"),
        (True, "count"),
        (8.5, "bytes"),
        ("", "bytes"),
    ],
)
def test_what_has_another_unit_is_refused_with_an_example(text: object, unit: str) -> None:
    with pytest.raises(PlanError, match="disk: expected .* such as"):
        parse_quantity(text, unit, "disk")


def test_quantities_are_shown_with_three_digits() -> None:
    assert [format_quantity(value, "B") for value in (80e9, 999.6e9, 1234, 5, 0)] == [
        "80 GB",
        "1 TB",
        "1.23 kB",
        "5 B",
        "0 B",
    ]
    assert parse_count("2.78395904B") == 2_783_959_040


TOML = """
name = "mine"
[device]
memory = "24 GB"
fp32 = { value = "80 TFLOP/s", source = "the box" }
[node]
devices = 2
"""


def test_a_file_says_where_its_values_are_from_and_every_one_can_be_replaced() -> None:
    machine = parse_machine(TOML, "mine.toml")
    assert machine.values["device.memory"].source == "mine.toml" and machine.values["device.fp32"].source == "the box"
    changed = machine.with_values({"device.memory": "48 GB", "disk.endurance": "7 PB"})
    assert (changed.need("device.memory"), changed.need("disk.endurance")) == (48e9, 7e15)
    assert machine.need("device.memory") == 24e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[device", "mine.toml: not valid TOML"),
        ('[devices]\nmemory = "1 GB"', "got 'devices'; did you mean 'device'?"),
        ('[device]\nmemry = "1 GB"', "no key 'device.memry'; did you mean 'device.memory'?"),
        ('[device]\nmemory = "1 GB/s"', "device.memory: expected bytes such as '80 GB', got '1 GB/s'"),
        ('[device]\nmemory = { source = "x" }', "device.memory: expected { value, source }, got source"),
        ("[node]\ndevices = 2", "device.memory is missing (memory of one accelerator)"),
        ("name = 3", "name: expected text, got 3"),
    ],
)
def test_a_bad_file_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_machine(text, "mine.toml")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def refused(capsys: Any, *words: str) -> str:
    try:
        assert main(words) == 2
    except SystemExit as error:
        assert error.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return str(said.err)


def test_bad_input_of_the_command_is_one_sentence(capsys: Any, tmp_path: Path) -> None:
    base = ("estimate", "--shape", "llama-3-8b", "--machine")
    assert "did you mean 'h100-sxm-80gb-x8'?" in refused(capsys, *base, "h100-sxm-80gb")
    assert "nowhere.toml: cannot be read" in refused(capsys, *base, "nowhere.toml")
    assert "expected KEY=VALUE, got 'x'" in refused(capsys, *base, "dgx-2", "--set", "x")
    assert "no key 'disk.tbw'" in refused(capsys, *base, "dgx-2", "--set", "disk.tbw=1 PB")
    assert "did you mean 'llama-3-8b'?" in refused(capsys, "estimate", "--shape", "llama3-8b", "--machine", "dgx-2")
    assert "--heads" in refused(capsys, "estimate", "--layers", "2", "--machine", "dgx-2")
    assert "hpz: expected stage 3, got stage 2" in refused(capsys, *base, "dgx-2", "--stage", "2", "--hpz")
    assert "divisor of world_size (24), got 16" in refused(capsys, *base, "dgx-2", "--world-size", "24")
    odd = tmp_path / "config.json"
    odd.write_text('{"model_type": "t5"}')
    assert "got 't5'" in refused(capsys, "estimate", "--shape", str(odd), "--machine", "dgx-2")
    odd.write_text('{"model_type": "llama"}')
    assert "'num_hidden_layers' is missing" in refused(capsys, "estimate", "--shape", str(odd), "--machine", "dgx-2")


def test_an_estimate_says_what_binds_and_whether_it_fits(capsys: Any) -> None:
    words = ["estimate", "--shape", "gpt2-xl", "--machine", "dgx-2", "--dtype", "fp16", "--offload-optimizer", "nvme"]
    words += ["--checkpointing", "full", "--set", "disk.endurance=100 PB"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "1,557,611,200 parameters, stage 3, 16 ranks" in said and "fits" in said
    assert "bound by disk write" in said or "bound by disk read" in said
    assert "TB are written per 1,000 steps and node; worn after" in said
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wear"]["terabytes_per_1000_steps"] == pytest.approx(16 * found["tiers"]["disk_write"] * 1000 / 1e12)
    assert main([*words, "--micro-batch", "4000"]) == 1
    assert "does NOT fit" in capsys.readouterr().out


def test_a_tier_of_unknown_capacity_is_no_fit_and_has_its_exit_status(tmp_path: Path, capsys: Any) -> None:
    assert main(["machine", "dgx-2", "--toml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    machine = tmp_path / "m.toml"
    machine.write_text("\n".join(line for line in lines if not line.startswith("capacity")))
    words = ["estimate", "--shape", "gpt2-xl", "--machine", str(machine), "--offload-optimizer", "nvme"]
    words += ["--checkpointing", "full"]
    assert main(words) == 3
    assert "unknown: disk.capacity is not given" in capsys.readouterr().out
    assert main([*words, "--set", "disk.capacity=1 TB"]) == 0
    assert main([*words, "--micro-batch", "4000"]) == 1  # the device is known


def test_what_the_machine_does_not_say_is_named_and_not_guessed(capsys: Any) -> None:
    words = ["estimate", "--shape", "llama-3-8b", "--machine", "b200-sxm-180gb-x8", "--world-size", "16"]
    assert main([*words, "--checkpointing", "full"]) == 0
    assert "network.per_node is not given" in capsys.readouterr().out


def test_machine_prints_presets_values_and_files(capsys: Any) -> None:
    assert main(["machine"]) == 0
    assert all(name in capsys.readouterr().out for name in ["dgx-2"])
    assert main(["machine", "dgx-2", "--toml", "--set", "disk.endurance=1 PB"]) == 0
    machine = parse_machine(capsys.readouterr().out, "printed")
    assert machine.need("disk.endurance") == 1e15
    assert main(["machine", "dgx-2", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["values"]) <= set(KEYS)
    assert main(["machine", "dgx-2"]) == 0
    assert "arXiv 2104.07857" in capsys.readouterr().out


DRIVES = ("disk.capacity", "disk.read_and_write")


def test_a_drive_that_reads_and_writes_at_once_bounds_a_step_once(capsys: Any) -> None:
    words = ["estimate", "--shape", "gpt2-xl", "--machine", "dgx-2", "--dtype", "fp16", "--offload-optimizer", "nvme"]
    times = []
    for more in ([], ["--set", "disk.read_and_write=30 GB/s"]):
        assert main([*words, "--checkpointing", "full", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        times.append(found["time"])
    moved = 16 * (found["tiers"]["disk_read"] + found["tiers"]["disk_write"])
    assert times[1]["binding"] == "disk, both ways" and times[1]["least"] == pytest.approx(moved / 30e9)
    assert times[1]["most"] == pytest.approx(times[0]["most"])


def test_probe_measures_this_machine(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("zero_nvme_aio")
    from zero_plan import probe

    monkeypatch.setattr(probe, "MATRIX_SIDES", {"cpu": (64, 128), "other": (1024,)})
    monkeypatch.setattr(probe, "COPIED_BYTES", 1 << 20)
    target = tmp_path / "here.toml"
    assert main(["probe", "--out", str(target), "--disk", str(tmp_path), "--disk-size", "64 MiB"]) == 0
    machine = load_machine(str(target))
    for key in ("device.fp32", "device.bf16", "node.host_memory_bandwidth", "disk.read", "disk.write", *DRIVES):
        assert machine.need(key) > 0 and "probe" in machine.values[key].source
    assert list(tmp_path.iterdir()) == [target]
    assert "--disk" in refused(capsys, "probe", "--disk", str(tmp_path / "absent"))


def test_a_rank_of_several_nodes_may_send_over_the_network_as_well() -> None:
    shape, machine = load_shape("gpt2-xl"), load_machine("dgx-2")
    (row,) = [
        row
        for row in estimate_step(shape, Setup(3, 64, 16), machine, dtype="fp16").bounds
        if row.resource == "links of a rank"
    ]
    assert row.rate == 150e9 + 100e9 / 16
    (row,) = [
        row
        for row in estimate_step(shape, Setup(3, 16, 16), machine, dtype="fp16").bounds
        if row.resource == "links of a rank"
    ]
    assert row.rate == 150e9


def test_a_slow_warm_up_takes_none_of_the_repetitions_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from zero_plan import probe

    durations = [100.0, 0.3, 0.2, 0.4, 0.3, 0.1]  # seconds of a clock of its own: the warm-up, then each repetition
    now = 0.0

    def work() -> None:
        nonlocal now
        now += durations.pop(0)

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now))
    assert probe._fastest_seconds(work, torch.device("cpu")) == pytest.approx(0.1)
    assert durations == []
