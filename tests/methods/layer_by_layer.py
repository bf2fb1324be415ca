"""Methods inside the language model straight from their definitions: one row, eager attention, one token at a time.

The prompt and the tokens generated so far run through the stock layers from scratch. Tokens are objects in a list;
what goes is taken out of the list. By causality later tokens change nothing before them, so that every step of a
cached generation equals such a run whose decisions are those of the prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from tests.models.by_hand import deepstack_rows, sequence, stock_arguments
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


def dart(keys: torch.Tensor, states: torch.Tensor, image: list[int], text: list[int], shares: list[int]) -> list[int]:
    """Of a prompt's tokens those of the image that stay, by their indices; ``states`` are normed.

    As in the authors' forward pass: pivots come in the order of a set of their indices in the prompt, and each takes
    its share of the image tokens that nobody has taken.
    """

    def largest(tokens: list[int]) -> list[int]:
        return sorted(tokens, key=lambda i: (-float(keys[i].abs().sum()), i))[:4]

    kept, words = set(largest(image)), set(largest(text))
    for share, pivot in zip(shares, list(set(largest(image) + largest(text))), strict=True):
        near = {i: float(torch.cosine_similarity(states[pivot], states[i], dim=0)) for i in image if i not in kept}
        kept |= set(sorted(near, key=lambda i: (near[i], i))[:share])
    return sorted(kept - words)


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
    shares: tuple[int, ...] = (),
) -> tuple[list[torch.Tensor], list[int], list[Token]]:
    """Logits of every step, the prompt's length in every layer, and its tokens after the last.

    Parameters
    ----------
    tiny, inputs
        A model and one prompt.
    cuts
        Tokens that stay, by the layer after which the others go.
    method, positions
        Of the cuts; "compact" renumbers after each.
    steps
        Of generation.
    seed
        Of SparseVLM's noise.
    heads
        That SparseVLM+ counts.
    shares
        Tokens that each of DART's pivots takes.
    """
    language_model = tiny.model.model.language_model
    seen = stock_arguments(tiny, inputs)
    embeds, original, _ = sequence(seen, inputs)
    added = deepstack_rows(seen)
    ids = inputs["input_ids"][0].tolist()
    image = [i for i, token in enumerate(ids) if token == tiny.model.config.image_token_id]
    text = list(range(image[-1] + 1, len(ids)))
    asked = (
        [len(ids) - 1]
        if not method.startswith("sparse")
        else [text[i] for i in raters(embeds[0, image], embeds[0, text])]
    )
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
                recurrent = not hasattr(layer, "self_attn")
                if not recurrent:
                    cache = DynamicCache()
                    _, attention = layer.self_attn(
                        hidden_states=layer.input_layernorm(h),
                        attention_mask=mask,
                        position_embeddings=rotation,
                        past_key_values=cache,
                    )
                    keys = cache.layers[number].keys[0].transpose(0, 1).flatten(1)
                h = layer(h, attention_mask=None if recurrent else mask, position_embeddings=rotation)[0]
                for token, state in zip(tokens, h, strict=True):
                    more = added.get((0, token.column), []) if token.visual else []
                    token.state = state + more[number] if number < len(more) else state
                if number in cuts:
                    if method == "pyramiddrop":
                        following = language_model.layers[number + 1]
                        _, attention = following.self_attn(
                            hidden_states=following.input_layernorm(torch.stack([t.state for t in tokens])[None]),
                            attention_mask=mask,
                            position_embeddings=rotation,
                        )
                    rows = [i for i, token in enumerate(tokens) if token.prompt and token.column in asked]
                    columns = [i for i, token in enumerate(tokens) if token.visual]
                    part = attention[0][:, rows][:, :, columns]
                    if method == "sparsevlm+":
                        interleaved = tiny.family == "glm4v"
                        turned = gravity(rotation, layer.self_attn.head_dim, interleaved, rows, columns)
                        part = corrected(part, turned, heads)
                    scores = part.mean((0, 1)).tolist()
                    visual = [tokens[i] for i in columns]
                    if method == "dart":
                        states = language_model.norm(torch.stack([token.state for token in tokens]))
                        words = [i for i, token in enumerate(tokens) if token.prompt and i > columns[-1]]
                        left = [tokens[i] for i in dart(keys, states, columns, words, list(shares))]
                    elif method in ("fastv", "pyramiddrop"):
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


def corrected(attention: torch.Tensor, weights: torch.Tensor, heads: int) -> torch.Tensor:
    """SparseVLM+: every head divided by the rotary weights; then the heads whose quotients sum to most, (heads, R, n).

    The order is that of the authors' forward pass: the correction is applied to the attention of all heads, and what
    selects heads is given its result.
    """
    quotients = [
        [[a / w for a, w in zip(*row, strict=True)] for row in zip(head, weights.tolist(), strict=True)]
        for head in attention.tolist()
    ]
    sums = [sum(sum(row) for row in head) for head in quotients]
    ranked = sorted(range(len(sums)), key=lambda h: (-sums[h], h))
    return torch.tensor([quotients[h] for h in ranked[:heads]])


def gravity(rotation: Any, width: int, interleaved: bool, rows: list[int], columns: list[int]) -> torch.Tensor:
    """Rotate vectors of ones and multiply them.

    A pair is two neighbours, or a number of the first half of the rotated ones and its counterpart in the second; what
    is not rotated stays 1.
    """
    cos, sin = (part[0] for part in rotation)
    rotated = cos.shape[-1]
    half = rotated // 2
    pairs = [(2 * j, 2 * j + 1) if interleaved else (j, j + half) for j in range(half)]

    def turned(i: int) -> list[float]:
        vector = [1.0] * width
        for a, b in pairs:
            c, s = float(cos[i, a]), float(sin[i, a])
            vector[a], vector[b] = c - s, s + c
        return vector

    return torch.tensor(
        [[sum(a * b for a, b in zip(turned(i), turned(j), strict=True)) for j in columns] for i in rows]
    )
