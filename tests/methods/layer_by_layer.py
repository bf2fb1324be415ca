"""FastV and SparseVLM straight from their definitions: one row, eager attention, no cache, one token at a time.

The prompt and the tokens generated so far run through the stock layers from scratch. Tokens are objects in a list;
what goes is taken out of the list. By causality later tokens change nothing before them, so that every step of a
cached generation equals such a run whose decisions are those of the prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.models.by_hand import stock_inputs
from tests.tiny import Tiny


@dataclass(eq=False)
class Token:
    state: torch.Tensor
    position: torch.Tensor
    visual: bool
    prompt: bool
    column: int
    made_of: set[int] = field(default_factory=set)


def fastv(scores: list[float], tokens: list[Token], count: int) -> list[Token]:
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
    return [tokens[i] for i in sorted(ranked)]


def sparsevlm(scores: list[float], tokens: list[Token], count: int, recycle: bool, seed: int) -> list[Token]:
    count = min(count, len(tokens) - 1)
    kept = fastv(scores, tokens, count)
    if not recycle:
        return kept
    gone = [(score, token) for score, token in zip(scores, tokens, strict=True) if token not in kept]
    s = int(0.3 * len(gone)) + 1
    best = sorted(range(len(gone)), key=lambda i: (-gone[i][0], i))[:s]
    chosen = [gone[i][1] for i in sorted(best)]
    c = int(s / 10) + 1
    width = len(chosen[0].state)
    d = [[float((a.state - b.state).norm()) / math.sqrt(width) for b in chosen] for a in chosen]
    noise = torch.rand(s, generator=torch.Generator().manual_seed(seed))
    density = [math.exp(-sum(v * v for v in sorted(row)[:c]) / c) + 1e-6 * float(noise[i]) for i, row in enumerate(d)]
    largest = max(max(row) for row in d)
    delta = [min((d[i][j] for j in range(s) if density[j] > density[i]), default=largest) for i in range(s)]
    centres = sorted(range(s), key=lambda i: (-density[i] * delta[i], i))[:c]
    groups: list[list[Token]] = [[] for _ in centres]
    for i, token in enumerate(chosen):
        own = centres.index(i) if i in centres else min(range(c), key=lambda g: (d[i][centres[g]], g))
        groups[own].append(token)
    made = [
        Token(
            torch.stack([t.state for t in group]).mean(0),
            chosen[centre].position,
            True,
            True,
            chosen[centre].column,
            set().union(*(t.made_of for t in group)),
        )
        for centre, group in zip(centres, groups, strict=True)
    ]
    return kept + made


def raters(visual: torch.Tensor, text: torch.Tensor) -> list[int]:
    interest = torch.stack([(v @ text.T).softmax(0) for v in visual]).mean(0)
    return [i for i in range(len(text)) if interest[i] > interest.mean()]


@torch.no_grad()
def run(
    tiny: Tiny,
    inputs: Any,
    cuts: dict[int, int],
    *,
    method: str,
    positions: str,
    steps: int,
    seed: int = 0,
    heads: int = 0,
) -> tuple[list[torch.Tensor], list[int], list[Token]]:
    """Logits of every step, the prompt's length in every layer, and its tokens after the last."""
    language_model = tiny.model.model.language_model
    embeds, original, _ = stock_inputs(tiny, inputs)
    ids = inputs["input_ids"][0].tolist()
    image = [i for i, token in enumerate(ids) if token == tiny.model.config.image_token_id]
    text = list(range(image[-1] + 1, len(ids)))
    asked = [len(ids) - 1] if method == "fastv" else [text[i] for i in raters(embeds[0, image], embeds[0, text])]
    new: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    place = original[..., 0, :] if original.ndim == 3 else original[0]
    language_model.set_attn_implementation("eager")
    try:
        for _ in range(steps):
            tokens = [Token(embeds[0, i], place[..., i], i in image, True, i, {i - image[0]}) for i in range(len(ids))]
            last = place.max() + 1
            tokens += [
                Token(state, (last + i).expand(place.shape[:-1]), False, False, -1) for i, state in enumerate(new)
            ]
            lengths = []
            for number, layer in enumerate(language_model.layers):
                lengths.append(sum(token.prompt for token in tokens))
                h = torch.stack([token.state for token in tokens])[None]
                at = torch.stack([token.position for token in tokens], -1)
                at = at[:, None] if at.ndim == 2 else at[None]
                rotation = language_model.rotary_emb(h, at)
                size = len(tokens)
                mask = torch.full((size, size), torch.finfo(h.dtype).min).triu(1)[None, None]
                _, attention = layer.self_attn(
                    hidden_states=layer.input_layernorm(h), attention_mask=mask, position_embeddings=rotation
                )
                h = layer(h, attention_mask=mask, position_embeddings=rotation)[0]
                for token, state in zip(tokens, h, strict=True):
                    token.state = state
                if number in cuts:
                    rows = [i for i, token in enumerate(tokens) if token.prompt and token.column in asked]
                    columns = [i for i, token in enumerate(tokens) if token.visual]
                    part = attention[0][:, rows][:, :, columns]
                    if method == "sparsevlm+":
                        part = part[sorted(range(len(part)), key=lambda i: -float(part[i].sum()))[:heads]]
                        part = part / gravity(rotation, rows, columns)
                    scores = part.mean((0, 1)).tolist()
                    visual = [tokens[i] for i in columns]
                    if method == "fastv":
                        left = fastv(scores, visual, cuts[number])
                    else:
                        left = sparsevlm(scores, visual, cuts[number], method == "sparsevlm", seed)
                    tokens = tokens[: columns[0]] + left + tokens[columns[-1] + 1 :]
                    if positions == "compact":
                        for i, token in enumerate(tokens):
                            token.position = torch.tensor(i)
            scores_of_words = tiny.model.lm_head(language_model.norm(tokens[-1].state))
            logits.append(scores_of_words)
            new.append(tiny.model.get_input_embeddings()(scores_of_words.argmax()))
    finally:
        language_model.set_attn_implementation("sdpa")
    return logits, lengths, [token for token in tokens if token.visual]


def gravity(rotation: Any, rows: list[int], columns: list[int]) -> torch.Tensor:
    """Rotate vectors of ones and multiply them."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = rotation
    ones = torch.ones(1, 1, cos.shape[1], cos.shape[2])
    q, k = apply_rotary_pos_emb(ones, ones, cos, sin)
    return torch.stack([torch.stack([(q[0, 0, i] * k[0, 0, j]).sum() for j in columns]) for i in rows])
