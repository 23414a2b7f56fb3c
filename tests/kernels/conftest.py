"""Owns what the kernels' tests share: every test that takes `kernels` runs once for each implementation, on one thread."""

import os

import pytest

# Read when a Triton kernel is defined; `compiled.py` and `on_gpu.py` run in processes without it.
os.environ["TRITON_INTERPRET"] = "1"

from tests.kernels.implementations import IMPLEMENTATIONS, Implementation


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None:
    """Shapes here are tiny: threads would only wait for each other."""


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda implementation: implementation.name)
def kernels(request: pytest.FixtureRequest) -> Implementation:
    """One implementation of `store_kv`, `paged_attention` and the batch that they read."""
    implementation: Implementation = request.param
    return implementation
