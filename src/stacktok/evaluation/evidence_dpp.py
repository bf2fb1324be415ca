"""A control for query-weighted coverage: the same evidence in a determinantal point process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from stacktok.core.affinity import Embeddings
from stacktok.core.tokens import EncodedCrop
from stacktok.core.weighted import Weighting, evidence
from stacktok.kernels.transfer import upload
from stacktok.methods.cdpruner import CDPruner, scaled


@dataclass(frozen=True)
class EvidenceDPP(CDPruner):
    """CDPruner with Spotlight's rho as its relevance."""

    plan_name: ClassVar[str] = "evidence-dpp"

    def relevance(
        self, crops: Sequence[EncodedCrop], query: torch.Tensor | None, *, host: bool = True
    ) -> list[torch.Tensor]:
        """Rho of every crop, brought to [0, 1]."""
        if query is None or not len(query):
            return super().relevance(crops, query, host=host)
        embeddings = [Embeddings.of(crop.projected, self.norm_epsilon, "projected") for crop in crops]
        rho = np.concatenate(evidence(query, embeddings, Weighting(), self.norm_epsilon))
        weight = scaled(upload(rho, query.device), np.concatenate([crop.eligible for crop in crops]))
        return list(torch.split(weight, [crop.n for crop in crops]))
