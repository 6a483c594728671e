"""One thread a test process: the networks are tiny, and two workers with two threads each would fight for two cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("pathprox", deadline=None, derandomize=True)
settings.load_profile("pathprox")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def frost_folder(tmp_path):
    """Pictures in place of the five that frost needs."""
    from corrupting import write_frost

    return write_frost(tmp_path / "ice")
