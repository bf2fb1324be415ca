"""A control for query-weighted coverage: the same evidence in a determinantal point process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.affinity import Embeddings
from stacktok.core.tokens import EncodedCrop
from stacktok.core.weighted import Weighting, evidence
from stacktok.methods.cdpruner import CDPruner, scaled


@dataclass(frozen=True)
class EvidenceDPP(CDPruner):
    """CDPruner with Spotlight's rho as its relevance."""

    plan_name: ClassVar[str] = "evidence-dpp"

    def relevance(self, crops: Sequence[EncodedCrop], query: torch.Tensor | None) -> list[NDArray[np.float64]]:
        """Rho of every crop, brought to [0, 1]."""
        if query is None or not len(query):
            return super().relevance(crops, query)
        embeddings = [Embeddings.of(crop.projected, self.norm_epsilon, "projected") for crop in crops]
        rho = np.concatenate(evidence(query, embeddings, Weighting(), self.norm_epsilon))
        weight = scaled(rho, np.concatenate([crop.eligible for crop in crops]))
        return np.split(weight, np.cumsum([crop.n for crop in crops])[:-1])
