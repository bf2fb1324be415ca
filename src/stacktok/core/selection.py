"""Selection on a single image: from features, from affinities, or from an image prepared for many questions."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from stacktok.core.affinity import (
    Affinity,
    Embeddings,
    QuerySide,
    check_features,
    check_query,
    given_affinity,
    query_sides,
    row_norms,
    vision_affinity,
)
from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.inputs import Array, Eligible, Mask, check_same_device, eligible_mask
from stacktok.core.parameters import Parameters, Settings
from stacktok.core.record import Selection
from stacktok.core.trajectory import Support, Trajectory
from stacktok.kernels import get_backend

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What an image is built with; a question cannot change it any more.
_OF_THE_IMAGE = ("tau_vision", "norm_epsilon", "backend")


class PreparedImage:
    """An image whose coverage side is done: each further question pays for itself alone.

    Made by `prepare`. Threads may share it.

    Attributes
    ----------
    parameters
        The image's.
    support
        Its coverage side.
    embeddings
        Its post-projector embeddings.
    """

    def __init__(
        self, vision: Array, projected: Array, eligible: Eligible, parameters: Parameters, where: str = ""
    ) -> None:
        x, z, _ = check_features(vision, projected, None, where)
        self.parameters = parameters
        self.support = Support(
            vision_affinity(x, parameters.tau_vision, parameters.norm_epsilon, row_norms(x, f"{where}vision")),
            eligible_mask(eligible, len(x)),
            get_backend(parameters.backend),
        )
        self.embeddings = Embeddings.of(z, parameters.norm_epsilon, f"{where}projected")

    @property
    def n(self) -> int:
        """Number of encoded positions."""
        return self.support.n

    @property
    def eligible(self) -> Mask:
        """Which positions may be kept, (n,)."""
        return self.support.eligible

    @property
    def vision_affinity(self) -> Affinity:
        """A^vv, (n, n)."""
        return self.support.vision_affinity

    def question(self, query: Array | None) -> torch.Tensor:
        """The rows of a query, (m, d), or None for m = 0, checked against this image."""
        q = check_query(query, self.embeddings.rows)
        check_same_device(projected=self.embeddings.rows, query=q)
        return q

    def query_affinity(self, query: Array | None, parameters: Parameters | None = None) -> Affinity:
        """A^qv of a question, (m, n).

        Parameters
        ----------
        query
            Embeddings of the query's tokens, (m, d), or None for m = 0.
        parameters
            Whose temperature to use; the image's own by default.
        """
        return query_sides(self.question(query), [self.embeddings], parameters or self.parameters)[0].affinity

    def trajectory(self, query: Array | None, budget: int, parameters: Parameters | None = None) -> Trajectory:
        """The walk of a question over this image, not yet begun; ``budget`` is a count."""
        parameters = parameters or self.parameters
        (side,) = query_sides(self.question(query), [self.embeddings], parameters)
        return Trajectory(self.support, side, parameters, budget)

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
        parameters = question_parameters(self.parameters, dict(settings))
        return finish(self.trajectory(query, self.count(budget), parameters))

    def count(self, budget: Budget) -> int:
        """A budget as a number of this image's tokens."""
        return resolve_budget(budget, self.n, self.support.capacity)


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
    support, side = given_unit(query_affinity, vision_affinity, eligible, parameters)
    k = resolve_budget(budget, support.n, support.capacity)
    return finish(Trajectory(support, side, parameters, k))


def given_unit(
    query_affinity: Array | None, vision_affinity: Array, eligible: Eligible, parameters: Parameters, crop: str = ""
) -> tuple[Support, QuerySide]:
    """A unit whose affinities a caller hands over, and the question's side; ``crop`` names it in error messages."""
    a_vv = given_affinity(vision_affinity, f"{crop}vision_affinity")
    n = a_vv.shape[1]
    if a_vv.shape[0] != n:
        raise ValueError(f"{crop}vision_affinity has shape {a_vv.shape}; give a square matrix (n, n)")
    side = QuerySide.empty(n)
    if query_affinity is not None:
        depth = None if parameters.relevance_depth == "auto" else parameters.relevance_depth
        a_qv = given_affinity(query_affinity, f"{crop}query_affinity", depth)
        if a_qv.shape[1] != n:
            raise ValueError(f"{crop}query_affinity has {a_qv.shape[1]} columns for {n} tokens; give a matrix (m, n)")
        side = QuerySide.of(a_qv, parameters.entropy_floor)
    return Support(a_vv, eligible_mask(eligible, n), get_backend(parameters.backend)), side


def finish(trajectory: Trajectory) -> Selection:
    """Walk to the budget and record."""
    trajectory.advance(trajectory.budget)
    return trajectory.record(trajectory.budget)


def question_parameters(parameters: Parameters, changes: dict[str, Any]) -> Parameters:
    """Parameters of one question on a prepared image."""
    if not changes:
        return parameters
    for name in _OF_THE_IMAGE:
        if name in changes:
            raise ValueError(f"{name}={changes[name]!r} belongs to the prepared image; pass it to prepare")
    return Parameters.of(asdict(parameters) | changes)


__all__ = ["PreparedImage", "prepare", "select", "select_from_affinities"]
