"""Selection on a single image: from features, from affinities, or from an image prepared for many questions."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stacktok.core.affinity import (
    Affinity,
    Embeddings,
    QueryAffinity,
    check_features,
    check_query,
    given_affinity,
    norms_of,
    on_host,
    query_affinities,
    row_norms,
    vision_affinity,
)
from stacktok.core.budget import Budget, Coverage, resolve_budget
from stacktok.core.greedy import CoverageReference, GreedyRun, adaptive_size, choose_backend
from stacktok.core.inputs import Array, Eligible, Mask, check_same_device, eligible_mask
from stacktok.core.parameters import Parameters, Settings
from stacktok.core.record import Selection

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What an image is built with; a question cannot change it any more.
_OF_THE_IMAGE = ("tau_vision", "norm_epsilon", "backend")


class PreparedImage:
    """An image whose coverage side is done: each further question pays for itself alone.

    Made by `prepare`. Threads may share it; it can be copied and pickled.

    Attributes
    ----------
    parameters
        The image's.
    reference
        Its coverage side.
    embeddings
        Its post-projector embeddings.
    """

    def __init__(
        self, vision: Array, projected: Array, eligible: Eligible, parameters: Parameters, where: str = ""
    ) -> None:
        x, z, _ = check_features(vision, projected, None, where)
        self.parameters = parameters
        backend = choose_backend(parameters.backend, x.device, len(x))
        host = backend != "triton"
        norms = row_norms(x, f"{where}vision") if host else norms_of(x)
        self.reference = CoverageReference(
            vision_affinity(x, parameters.tau_vision, parameters.norm_epsilon, norms, host=host),
            eligible_mask(eligible, len(x)),
            backend,
        )
        self.embeddings = Embeddings.of(z, parameters.norm_epsilon, f"{where}projected", host=host)
        # Norms that were not looked at when they were made, since that would have been to wait for a device.
        self._unchecked = {} if host else {f"{where}vision": norms, f"{where}projected": self.embeddings.lengths}

    @property
    def n(self) -> int:
        """Number of encoded positions."""
        return self.reference.n

    @property
    def nbytes(self) -> int:
        """Bytes that preparing added to the features, which are kept by reference."""
        return self.reference.nbytes + self.embeddings.lengths.nbytes

    @property
    def eligible(self) -> Mask:
        """Which positions may be kept, (n,)."""
        return self.reference.eligible

    @property
    def vision_affinity(self) -> Affinity:
        """A^vv, (n, n), in host memory."""
        return on_host(self.reference.vision_affinity)

    def question(self, query: Array | None) -> torch.Tensor:
        """The rows of a query, (m, d), or None for m = 0, checked against this image."""
        q = check_query(query, self.embeddings.rows)
        check_same_device(projected=self.embeddings.rows, query=q)
        return q

    def check(self) -> None:
        """Refuse features without finite norms, where that has not been done; waits for a device."""
        for name, norms in self._unchecked.items():
            if not bool(torch.isfinite(norms).all()):
                raise ValueError(f"{name} holds NaN or infinity, or a norm that overflows; give finite features")
        self._unchecked = {}

    def query_affinity(self, query: Array | None, parameters: Parameters | None = None) -> QueryAffinity:
        """A^qv of a question, (m, n), in host memory.

        Parameters
        ----------
        query
            Embeddings of the query's tokens, (m, d), or None for m = 0.
        parameters
            Whose temperature to use; the image's own by default.
        """
        return on_host(self._query_affinity(query, parameters or self.parameters))

    def _query_affinity(self, query: Array | None, parameters: Parameters) -> QueryAffinity:
        return query_affinities(self.question(query), [self.embeddings], parameters)[0]

    def select(self, query: Array | None, budget: Budget, **settings: Unpack[Settings]) -> Selection:
        """Select tokens for a question.

        Parameters
        ----------
        query
            Embeddings of the query's tokens, (m, d), or None for m = 0.
        budget
            Count, fraction of the encoded positions, or percentage.
        **settings
            Parameters that differ from those of `prepare`; ``tau_vision``, ``norm_epsilon`` and ``backend`` cannot.
        """
        self.check()
        parameters = question_parameters(self.parameters, dict(settings))
        return _select(self.reference, self._query_affinity(query, parameters), parameters, budget)


def prepare(vision: Array, projected: Array, eligible: Eligible = None, **settings: Unpack[Settings]) -> PreparedImage:
    """Do everything about an image that no question changes.

    Parameters
    ----------
    vision
        Pre-projector features, (n, d_v).
    projected
        Post-projector embeddings, (n, d). Kept by reference: do not write into it afterwards.
    eligible
        Positions that may be kept: indices or a boolean mask; None for all.
    **settings
        See `Parameters`.
    """
    return PreparedImage(vision, projected, eligible, Parameters.of(settings))


def select(
    vision: Array,
    projected: Array,
    query: Array | None,
    budget: Budget,
    *,
    eligible: Eligible = None,
    **settings: Unpack[Settings],
) -> Selection:
    """Keep a budget of an image's visual tokens: Algorithm 1 of the paper, from features.

    Parameters
    ----------
    vision
        X, pre-projector features, (n, d_v).
    projected
        Z, post-projector embeddings as the language model would receive them, (n, d).
    query
        Q, input embeddings of the query's tokens, (m, d); None or m = 0 selects by coverage alone.
    budget
        A count, a fraction in (0, 1] of the encoded positions, or a percentage such as "20%".
    eligible
        Positions that may be kept, as indices or a boolean mask; None for all. All n positions stay targets of
        the affinities.
    **settings
        See `Parameters`; the paper's values are the defaults.

    Returns
    -------
    Selection
        The kept indices and the full record of the run.

    Notes
    -----
    Tensors and arrays of any floating-point type are taken; affinities are built in float32, or float64 for float64
    features. Tensors on an accelerator build their affinities there; the matrix is then copied to the host.
    """
    return prepare(vision, projected, eligible=eligible, **settings).select(query, budget)


def select_from_affinities(
    query_affinity: Array | None,
    vision_affinity: Array,
    budget: Budget,
    *,
    eligible: Eligible = None,
    **settings: Unpack[Settings],
) -> Selection:
    """Algorithm 1 on given affinities.

    Parameters
    ----------
    query_affinity
        A^qv, (m, n), non-negative; None or m = 0 selects by coverage alone.
    vision_affinity
        A^vv, (n, n), non-negative.
    budget, eligible, **settings
        As in `select`; temperatures have no effect.
    """
    parameters = Parameters.of(settings)
    reference, a_qv = given_unit(query_affinity, vision_affinity, eligible, parameters)
    return _select(reference, a_qv, parameters, budget)


def _select(reference: CoverageReference, query: QueryAffinity, parameters: Parameters, budget: Budget) -> Selection:
    """Algorithm 1 to the budget, and the swaps."""
    adaptive = Coverage.of(budget)
    k = resolve_budget(budget if adaptive is None else adaptive.at_most, reference.n, reference.capacity)
    run = GreedyRun.run([(reference, query)], parameters, [k], [k], [k])[0].on_host()
    if adaptive is None:
        return run.record(k)
    return run.record(k).prefix(adaptive_size(adaptive, [run], np.arange(k + 1)[:, None]), refine=True)


def given_unit(
    query_affinity: Array | None, vision_affinity: Array, eligible: Eligible, parameters: Parameters, crop: str = ""
) -> tuple[CoverageReference, QueryAffinity]:
    """The coverage side and A^qv from affinities that a caller gives; ``crop`` names the unit in error messages."""
    a_vv = given_affinity(vision_affinity, f"{crop}vision_affinity")
    n = a_vv.shape[1]
    if a_vv.shape[0] != n:
        raise ValueError(f"{crop}vision_affinity has shape {a_vv.shape}; give a square matrix (n, n)")
    a_qv: QueryAffinity = np.zeros((0, n), dtype=np.float32)
    if query_affinity is not None:
        depth = None if parameters.relevance_depth == "auto" else parameters.relevance_depth
        a_qv = given_affinity(query_affinity, f"{crop}query_affinity", depth)
        if a_qv.shape[1] != n:
            raise ValueError(f"{crop}query_affinity has {a_qv.shape[1]} columns for {n} tokens; give a matrix (m, n)")
    device = vision_affinity.device if isinstance(vision_affinity, torch.Tensor) else torch.device("cpu")
    backend = choose_backend(parameters.backend, device, n)
    if backend == "triton":
        a_vv, a_qv = torch.from_numpy(a_vv).to(device), torch.from_numpy(a_qv).to(device)
    return CoverageReference(a_vv, eligible_mask(eligible, n), backend), a_qv


def question_parameters(parameters: Parameters, changes: dict[str, Any]) -> Parameters:
    """Parameters of one question on a prepared image."""
    if not changes:
        return parameters
    for name in _OF_THE_IMAGE:
        if name in changes:
            raise ValueError(f"{name}={changes[name]!r} belongs to the prepared image; pass it to prepare")
    return Parameters.of(asdict(parameters) | changes)


__all__ = ["PreparedImage", "prepare", "select", "select_from_affinities"]
