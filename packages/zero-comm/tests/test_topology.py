"""Which ranks are on one node, and what leaves it."""

from __future__ import annotations

import socket

import pytest
import torch

from zero_comm import EngineGroups, Message, Tag, Topology, node_name, run_ranks


@pytest.mark.parametrize(
    ("nodes", "far", "block"),
    [
        ("", [0, 0, 0, 0], 4),
        ("aaaa", [0, 0, 0, 0], 4),
        ("aabb", [2, 2, 2, 2], 2),
        ("abab", [2, 2, 2, 2], 1),
        ("aaab", [1, 1, 1, 3], 1),
    ],
)
def test_a_topology_knows_who_is_far_and_which_blocks_lie_inside_a_node(nodes: str, far: list[int], block: int) -> None:
    topology = Topology(tuple(nodes))
    assert [topology.far_peers(rank) for rank in range(4)] == far
    assert topology.block_size(4) == block


def test_a_smaller_group_keeps_its_members_nodes() -> None:
    assert Topology(("a", "a", "b", "b")).subset([1, 3]) == Topology(("a", "b"))


def test_the_node_is_what_was_forced_else_the_launchers_else_the_host() -> None:
    torchrun = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert node_name(5, 2, torchrun) == node_name(4, 2, {}) != node_name(6, 2, {})
    assert node_name(5, None, torchrun) == node_name(4, None, {**torchrun, "RANK": "4", "LOCAL_RANK": "0"})
    assert node_name(5, None, torchrun) != node_name(3, None, {**torchrun, "RANK": "3"})
    assert node_name(0, None, {}) == node_name(7, None, torchrun) == socket.gethostname()


def traffic(ranks_per_node: int | None) -> dict[str, tuple[int, int]]:
    groups = EngineGroups.open([[0, 1, 2, 3]], ranks_per_node=ranks_per_node, secondary_size=2)
    groups.gather.all_gather(torch.empty(8), torch.zeros(2), Tag("gather", "all")).wait()
    assert groups.secondary is not None
    groups.secondary.all_gather(torch.empty(8), torch.zeros(4), Tag("publish", "near")).wait()
    groups.reduce.reduce_scatter(torch.zeros(8), torch.empty(2), Tag("reduce", "u")).wait()
    groups.broadcast(torch.zeros(2), 0, Tag("broadcast", "u"))
    before = groups.control.ledger.across_bytes("control")
    groups.control.agree(Message("step", "", 0))
    ledger = groups.gather.ledger
    found = {p: (ledger.sent_bytes(p), ledger.across_bytes(p)) for p in ("gather", "publish", "reduce", "broadcast")}
    found["control"] = (512 * 3, ledger.across_bytes("control") - before)
    groups.close()
    return found


@pytest.mark.parametrize(("ranks_per_node", "far"), [(None, 0), (4, 0), (2, 2), (1, 3)])
def test_the_ledger_keeps_bytes_across_nodes_apart(ranks_per_node: int | None, far: int) -> None:
    for rank, counted in enumerate(run_ranks(traffic, 4, ranks_per_node)):
        assert counted["gather"] == counted["reduce"] == (24, 8 * far)
        assert counted["publish"] == (16, 16 if far == 3 else 0)
        assert counted["broadcast"] == ((8, 8 if far else 0) if rank == 0 else (0, 0))
        assert counted["control"] == (512 * 3, 512 * far)
