"""How a batch splits, without ranks."""

from __future__ import annotations

import pytest
import torch

from zero_sequence import SequenceError, split_batch


def test_everything_along_the_sequence_is_sharded_and_the_rest_is_the_same() -> None:
    ids = torch.arange(8).view(2, 4)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones(2, 4),
        "inputs": torch.randn(2, 4, 3),
        "weight": torch.ones(2),
        "name": "a",
    }
    first, second = split_batch(batch, 2)
    assert first["input_ids"].tolist() == [[0, 1], [4, 5]] and second["input_ids"].tolist() == [[2, 3], [6, 7]]
    assert second["attention_mask"].shape == (2, 2) and second["inputs"].shape == (2, 2, 3)
    assert torch.equal(second["weight"], torch.ones(2)) and second["name"] == "a"
    assert first["position_ids"].tolist() == [[0, 1]] * 2 and second["position_ids"].tolist() == [[2, 3]] * 2


def test_labels_are_shifted_before_they_are_sharded_or_stay() -> None:
    batch = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
    first, second = split_batch(batch, 2)
    assert "labels" not in first
    assert first["shift_labels"].tolist() == [[1, 2]] and second["shift_labels"].tolist() == [[3, -100]]
    first, second = split_batch(batch, 2, shift=False)
    assert "shift_labels" not in first and second["labels"].tolist() == [[2, 3]]


def test_packed_samples_count_from_their_own_beginning() -> None:
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    first, second = split_batch({"input_ids": torch.arange(8)[None], "cu_seq_lens_q": bounds}, 2)
    assert first["position_ids"].tolist() == [[0, 1, 2, 0]] and second["position_ids"].tolist() == [[1, 2, 3, 4]]
    assert torch.equal(second["cu_seq_lens_q"], bounds)
    with pytest.raises(SequenceError, match="expected bounds from 0 to 8"):
        split_batch({"input_ids": torch.arange(8)[None], "cu_seq_lens_q": bounds[:2]}, 2)


def test_a_length_that_does_not_divide_is_padded_only_when_asked() -> None:
    ids = torch.arange(1, 6)[None]
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones(1, 5), "position_ids": ids - 1}
    with pytest.raises(SequenceError, match="a batch of length 5 does not split over 4 ranks: pad it to 8"):
        split_batch(batch, 4)
    shards = split_batch(batch, 4, pad_token_id=9)
    full = {key: torch.cat([shard[key] for shard in shards], dim=1).tolist()[0] for key in shards[0]}
    assert full["input_ids"] == [1, 2, 3, 4, 5, 9, 9, 9]
    assert full["shift_labels"] == [2, 3, 4, 5, -100, -100, -100, -100]
    assert full["attention_mask"] == [1, 1, 1, 1, 1, 0, 0, 0]
    assert full["position_ids"] == list(range(8))


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    with pytest.raises(SequenceError, match=r"expected a batch with input_ids of \(batch, length\), got \{'a': 1\}"):
        split_batch({"a": 1}, 2)
    with pytest.raises(SequenceError, match=r"attention_mask: expected \(batch, 4\), got \(1, 1, 4, 4\)"):
        split_batch({"input_ids": torch.ones(1, 4), "attention_mask": torch.ones(1, 1, 4, 4)}, 2)
