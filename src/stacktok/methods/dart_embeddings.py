"""DART before the language model: pivots by the norm of input embeddings; can be served."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stacktok.core.tokens import EncodedCrop, Ints
from stacktok.methods.crop_methods import PickMethod
from stacktok.methods.dart import IMAGE_PIVOTS, TEXT_PIVOTS, cosines_of, grow, ranked
from stacktok.methods.info import MethodInfo


@dataclass(frozen=True)
class DARTEmbeddings(PickMethod):
    """DART on input embeddings, as in TensorRT Edge-LLM.

    The 4 image tokens and the 4 rows of the query with the largest L1 norm are pivots, the image's first, each kind by
    descending norm. Each takes its share of the image tokens of lowest cosine; exactly the budget stays.
    """

    query_aware = True
    info = MethodInfo(
        name="DART, embeddings",
        paper="DART, in Edge-LLM",
        deviations=(
            "text pivots are rows of the question, not of the whole prompt with its template",
            "the crops of an image are one set",
        ),
    )

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Ints:
        """The image's pivots, and what all pivots take in turn."""
        eligible = np.flatnonzero(crop.eligible)
        tokens = crop.projected[torch.from_numpy(eligible).to(crop.projected.device)]
        image = ranked(tokens.float().abs().sum(1))[: min(IMAGE_PIVOTS, k)]
        pivots = tokens[image]
        if query is not None and len(query):
            text = ranked(query.float().abs().sum(1))[:TEXT_PIVOTS]
            pivots = torch.cat([pivots, query[text].to(pivots)])
        picks: Ints = eligible[grow(cosines_of(pivots, tokens), image, k)]
        return picks
