"""What every test shares."""

from __future__ import annotations

import torch
from hypothesis import settings

# Test processes run beside each other; each computes on one core.
torch.set_num_threads(1)

settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")
