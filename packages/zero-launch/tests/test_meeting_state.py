from __future__ import annotations

from zero_launch.meeting_state import on_another_clock

NODE = ["00000", 7, 0]


def test_times_move_to_another_clock_and_what_stands_for_lost_or_over_stays() -> None:
    state = {"round": 2, "deadline": 50.0, "heartbeats": [[NODE, 40.0], [["00001", 9, 0], 0.0]]}
    moved = on_another_clock(state, -7200.0)
    assert moved == {"round": 2, "deadline": -7150.0, "heartbeats": [[NODE, -7160.0], [["00001", 9, 0], 0.0]]}
    assert on_another_clock(moved, 7200.0) == state
    assert on_another_clock({**state, "deadline": 0.0}, 5.0) == {
        **state,
        "deadline": 0.0,
        "heartbeats": [[NODE, 45.0], [["00001", 9, 0], 0.0]],
    }
    assert on_another_clock(None, 5.0) is None
