import os
import secrets

import pytest
import torch


@pytest.fixture(autouse=True)
def seed(record_property):
    """Fresh random numbers in every run; DCFORMER_TEST_SEED repeats one."""
    value = int(os.environ.get("DCFORMER_TEST_SEED") or secrets.randbits(31))
    record_property("seed", value)
    print(f"DCFORMER_TEST_SEED={value}")  # pytest shows it where a test fails
    torch.manual_seed(value)
    return value
