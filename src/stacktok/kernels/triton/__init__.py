"""Kernels for GPUs, in Triton: all images and crops of a batch in one launch, results that stay on the device.

One file per kernel: its state and invariants in words, the kernel, and the function that launches it. `launch` holds
what they share. The functions are those of `stacktok.kernels.cpu`, on tensors of one device; on the same affinities
they return the same bits. With ``TRITON_INTERPRET=1`` in the environment Triton runs them on tensors of the CPU.
"""

from stacktok.kernels.triton.determinantal import pick_determinantal
from stacktok.kernels.triton.facility_location import State, greedy, precompute
from stacktok.kernels.triton.max_min import pick_max_min
from stacktok.kernels.triton.merge import Runs, allocate
from stacktok.kernels.triton.swaps import Refined, Retained, refine

__all__ = [
    "Refined",
    "Retained",
    "Runs",
    "State",
    "allocate",
    "greedy",
    "pick_determinantal",
    "pick_max_min",
    "precompute",
    "refine",
]
