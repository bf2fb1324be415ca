"""Fixtures of all tests."""

from __future__ import annotations

import torch
from hypothesis import Phase, settings

# Test processes run in parallel; each computes on one core.
torch.set_num_threads(1)

settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
# For tests that should fail: the first failure is enough.
settings.register_profile("unshrunk", settings.get_profile("default"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("default")
