"""Random tensors of tests."""

from __future__ import annotations

import zlib

import pytest
import torch

from tests.conftest import TEST_SEED


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.rand(100)


@pytest.mark.parametrize("number", [1, 2])
def test_random_tensors_depend_on_their_place_alone(
    request: pytest.FixtureRequest, tensor: torch.Tensor, number: int
) -> None:
    node = request.node.nodeid
    for name, found in (("tensor of " + node, tensor), (node, torch.rand(100))):
        seed = zlib.crc32(f"{TEST_SEED} {name}".encode())
        assert torch.equal(found, torch.rand(100, generator=torch.Generator().manual_seed(seed)))
