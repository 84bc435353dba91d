"""Walks along texts: a draft at each position that a decode comes to."""

from __future__ import annotations

import pytest
import torch

from outstride.train.acceptance_length import rates_by_depth, visited_positions


def test_a_decode_is_walked() -> None:
    runs = torch.tensor([[-1, 2, 0, 0, 1, 0, -1, -1], [0, 0, 0, 0, 0, 0, 5, -1]])
    visited = visited_positions(runs, torch.tensor([2, 1]), torch.tensor([7, 3]))
    assert visited.int().tolist() == [[0, 1, 0, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
    room = torch.tensor([[7], [3]]) - 1 - torch.arange(8)
    assert rates_by_depth(runs, room, visited, 3) == [0.5, pytest.approx(1 / 3), 0.0]
