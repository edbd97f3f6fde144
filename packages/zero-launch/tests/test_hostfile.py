from __future__ import annotations

import time

import pytest

from zero_launch import Hostfile

TEXT = """
# the cluster
node-a slots=4   # fast
node-b   slots=2

10.0.0.3 slots=1
"""


def test_hosts_come_in_order_with_their_slots(tmp_path):
    (tmp_path / "hosts").write_text(TEXT)
    hostfile = Hostfile.read(tmp_path / "hosts")
    assert list(hostfile.hosts.items()) == [("node-a", (0, 1, 2, 3)), ("node-b", (0, 1)), ("10.0.0.3", (0,))]
    assert hostfile.world_size == 7
    assert hostfile == Hostfile.parse(TEXT) and hash(hostfile) == hash(Hostfile.parse(TEXT))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=1\nb", r"hosts:2: expected 'host slots=N', got 'b'"),
        ("a slots=x", r"hosts:1: expected 'host slots=N', got 'a slots=x'"),
        ("a slots=0", r"hosts:1: host 'a' offers slots=0"),
        ("a slots=1\n\na slots=2", r"hosts:3: host 'a' is already named in line 1"),
        ("# nothing", r"hosts: no host in it"),
        ("-oProxyCommand=touch${IFS}x slots=1", r"hosts:1: .* is no host name"),
        ("-a slots=1", r"hosts:1: '-a' is no host name: .*no - at its beginning"),
        ("you@-a slots=1", r"hosts:1: 'you@-a' is no host name"),
        ("a,b slots=1", r"hosts:1: 'a,b' is no host name"),
        ("^file slots=1", r"hosts:1: '\^file' is no host name"),
        ("a slots=999999999", r"hosts:1: expected at most 65536 hosts of at most 65536 slots each"),
        ("a slots=9999999999", r"hosts:1: expected 'host slots=N'"),
        ("a slots=" + "9" * 5000, r"^hosts:1: expected 'host slots=N', got 5008 characters$"),
    ],
)
def test_a_bad_line_is_refused_by_number(text, message):
    with pytest.raises(ValueError, match=message):
        Hostfile.parse(text, source="hosts")


def test_a_name_that_a_program_would_take_for_an_option_is_refused_wherever_it_comes_from(tmp_path):
    with pytest.raises(ValueError, match="hosts: '-oX' is no host name"):
        Hostfile({"-oX": (0,)})
    (tmp_path / "hosts").write_bytes(b"\xff\xfe slots=1\n")
    with pytest.raises(ValueError, match="hosts: expected UTF-8 text"):
        Hostfile.read(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({}, {"node-a": (0, 1, 2, 3), "node-b": (0, 1), "10.0.0.3": (0,)}),
        ({"include": "node-b@node-a:3,1"}, {"node-a": (1, 3), "node-b": (0, 1)}),
        ({"exclude": "node-b@node-a:0"}, {"node-a": (1, 2, 3), "10.0.0.3": (0,)}),
    ],
)
def test_filters_select_hosts_and_slots_in_the_files_order(filters, left):
    assert list(Hostfile.parse(TEXT).select(**filters).hosts.items()) == list(left.items())


@pytest.mark.parametrize(
    ("filter", "left"),
    [
        ("you@a", {"you@a": (0, 1)}),
        ("b@you@a:1", {"you@a": (1,), "b": (0,)}),
        ("you@a:0,1@b:0", {"you@a": (0, 1), "b": (0,)}),
        ("me@a@b", {"me@a": (0,), "b": (0,)}),
    ],
)
def test_a_filter_may_name_a_host_with_its_user(filter, left):
    hosts = Hostfile.parse("you@a slots=2\nme@a slots=1\nb slots=1")
    assert list(hosts.select(include=filter).hosts.items()) == list(left.items())
    excluded = dict(hosts.select(exclude=filter).hosts)
    assert all(not set(slots) & set(excluded.get(host, ())) for host, slots in left.items())


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"include": "node-x"}, "include 'node-x': no host 'node-x' in the hostfile; it has node-a, node-b, 10.0.0.3"),
        ({"include": "node-b:2"}, "host 'node-b' has no slot 2; it has 0,1"),
        ({"include": "node-b:1,x"}, "expected slot numbers after 'node-b', got '1,x'"),
        ({"exclude": "node-b@node-b:0"}, "host 'node-b' is named twice"),
        ({"exclude": "node-a@node-b@10.0.0.3"}, "leaves no slot"),
        ({"include": "node-a", "exclude": "node-b"}, "not both"),
    ],
)
def test_a_filter_that_does_not_fit_is_refused_with_what_there_is(filters, message):
    with pytest.raises(ValueError, match=message):
        Hostfile.parse(TEXT).select(**filters)


def test_a_filter_over_the_most_slots_takes_no_time():
    hosts = Hostfile.parse("b slots=65536")
    begin = time.process_time()
    assert hosts.select(include="b") == hosts
    assert time.process_time() - begin < 5  # 30 s where each slot was looked for in all others
    with pytest.raises(ValueError, match="host 'b' has no slot 65536; it has 0 to 65535") as refused:
        hosts.select(include="b:65536")
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("filter", "left"),
    [
        ("fe80::1", {"fe80::1": (0, 1)}),
        ("fe80::1:1@fe80::2", {"fe80::1": (1,), "fe80::2": (0,)}),
        ("you@fe80::3:0,1@b:0", {"you@fe80::3": (0, 1), "b": (0,)}),
        ("me@fe80::3@fe80::2:0", {"fe80::2": (0,), "me@fe80::3": (0,)}),
        ("fe80::1:2", {"fe80::1:2": (0,)}),
    ],
)
def test_a_filter_may_name_a_host_by_its_ipv6_address(filter, left):
    names = {"fe80::1": 2, "fe80::2": 1, "you@fe80::3": 2, "me@fe80::3": 1, "b": 1, "fe80::1:2": 1}
    hosts = Hostfile({name: tuple(range(slots)) for name, slots in names.items()})
    assert list(hosts.select(include=filter).hosts.items()) == list(left.items())


def test_an_ipv6_host_that_is_not_there_is_named_in_full():
    with pytest.raises(ValueError, match="no host 'fe80::9' in the hostfile"):
        Hostfile({"fe80::1": (0,)}).select(exclude="fe80::9")


@pytest.mark.parametrize("name", ["", "@a", "a@", "a@b@c", "you@-a", "a b"])
def test_a_name_is_a_host_or_a_user_at_a_host(name):
    with pytest.raises(ValueError, match="expected 'host' or 'user@host', each of letters, digits"):
        Hostfile({name: (0,)})
