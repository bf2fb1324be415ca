"""Forward passes of training and their losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from stacktok.scenes.questions import FAMILIES
from stacktok.scenes.vocabulary import BACKGROUNDS, CATEGORY
from training.data import Batch
from training.labels import BACKGROUND_WEIGHT, NOUNS, SLOTS
from training.model import Llava
from training.text import build_tokenizer

TEMPERATURE = 0.05


class Heads(nn.Module):
    """Read-outs that exist in training only: box and centre from a projected token, nouns from the CLS token."""

    def __init__(self, vision_hidden: int, text_hidden: int) -> None:
        super().__init__()
        self.box = nn.Linear(text_hidden, 3)
        self.centre = nn.Linear(text_hidden, 1)
        self.present = nn.Linear(vision_hidden, len(NOUNS))


@dataclass(frozen=True)
class Prompt:
    """Input of the language model.

    Parameters
    ----------
    hidden
        (b, l, width) embeddings: start, picture, questions.
    rotation
        Cosines and sines of the positions.
    mask
        (b, 1, l, l) which place sees which.
    before
        Length of start and picture.
    """

    hidden: Tensor
    rotation: tuple[Tensor, Tensor]
    mask: Tensor
    before: int


class Objective:
    """Losses of a model on a batch.

    Parameters
    ----------
    model
        What is trained.
    heads
        Read-outs used in training only.
    """

    def __init__(self, model: Llava, heads: Heads) -> None:
        self.model, self.heads = model, heads
        tokenizer = build_tokenizer()
        self.slot_ids = [torch.tensor(tokenizer.convert_tokens_to_ids(list(words))) for words, _ in SLOTS.values()]
        self.word_in_slot = torch.full((len(SLOTS), len(tokenizer)), -1)
        for index, ids in enumerate(self.slot_ids):
            self.word_in_slot[index, ids] = torch.arange(len(ids))
        self.half = model.config.text_config.num_attention_heads // 2
        self.counting = list(FAMILIES).index("counting")
        self.prefix = tokenizer("<s>USER: ").input_ids
        self.first_background = len(NOUNS) - len(BACKGROUNDS)
        self.horizontal = list(SLOTS).index("horizontal")
        self.grid = model.config.vision_config.image_size // model.config.vision_config.patch_size

    def encode(self, pixels: Tensor, corner: Tensor) -> tuple[Tensor, Tensor]:
        """Features that the language model reads, and the CLS token of the last layer.

        Parameters
        ----------
        pixels
            (b, 3, h, w) bytes; pictures smaller than the model's take positions from a window of its grid.
        corner
            (b, 2) row and column of that window's corner.

        Returns
        -------
        tuple
            Projected tokens (b, n, text width) and CLS (b, vision width).
        """
        tower = self.model.model.vision_tower
        mean = torch.tensor(OPENAI_CLIP_MEAN)[:, None, None]
        std = torch.tensor(OPENAI_CLIP_STD)[:, None, None]
        embeddings = tower.embeddings
        patches = embeddings.patch_embedding((pixels / 255 - mean) / std)
        height, width = patches.shape[-2:]
        table = embeddings.position_embedding.weight
        rows = corner[:, 0, None, None] + torch.arange(height)[:, None]
        columns = corner[:, 1, None, None] + torch.arange(width)
        positions = table[1 + rows * self.grid + columns].flatten(1, 2)
        start = (embeddings.class_embedding + table[0]).expand(len(pixels), 1, -1)
        hidden = tower.pre_layrnorm(torch.cat([start, patches.flatten(2).mT + positions], dim=1))
        *used, last = tower.encoder.layers
        for layer in used:
            hidden = layer(hidden, attention_mask=None)
        return self.model.model.multi_modal_projector(hidden[:, 1:]), tower.post_layernorm(_cls_only(last, hidden))

    def alignment(self, batch: Batch, tokens: Tensor, cls: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Pull each projected token towards the words for what it shows."""
        table = functional.normalize(self.model.model.language_model.embed_tokens.weight, dim=-1)
        cosine = functional.normalize(tokens, dim=-1) @ table.T / TEMPERATURE
        total = torch.zeros(())
        report = {}
        for index, (name, (_, weight)) in enumerate(SLOTS.items()):
            target = batch.words[:, index]
            chosen = target >= 0
            if not chosen.any():
                continue
            logits, goal = cosine[chosen][:, self.slot_ids[index]], target[chosen]
            each = functional.cross_entropy(logits, goal, reduction="none")
            weights = torch.ones_like(each)
            if name in ("noun", "sort"):
                background = batch.words[:, 0][chosen] >= self.first_background
                weights[background] = BACKGROUND_WEIGHT
                report[f"align/{name}"] = (logits.argmax(-1) == goal)[~background].float().mean().item()
            else:
                report[f"align/{name}"] = (logits.argmax(-1) == goal).float().mean().item()
            total = total + weight * (each * weights).sum() / weights.sum()
        owned = batch.words[:, self.horizontal] >= 0
        box = functional.smooth_l1_loss(self.heads.box(tokens[owned]), batch.box[owned], beta=0.1)
        flags = self.heads.centre(tokens[owned])[:, 0]
        centre = functional.binary_cross_entropy_with_logits(flags, batch.centre[owned], pos_weight=torch.tensor(4.0))
        present = functional.binary_cross_entropy_with_logits(self.heads.present(cls), batch.present)
        hits = (flags > 0).float()
        both = (hits * batch.centre[owned]).sum().item()
        report["align/centre_f1"] = 2 * both / max(1.0, (hits.sum() + batch.centre[owned].sum()).item())
        report["align/box"] = box.item()
        report["align/cls"] = present.item()
        return total + 2.0 * box + 0.5 * centre + 0.5 * present, report

    def sequence(self, crops: Tensor, newline: Tensor) -> Tensor:
        """Put what belongs to the patches of all crops (b * c, n, width) into the prompt's order (b, length, width).

        One view stays as it is. Of a base view and four tiles, the base comes first, then the tiles' rows side by side
        with `newline` (width) at the end of each.
        """
        if self.model.config.model_type == "llava":
            return crops
        base, *tiles = crops.unflatten(0, (-1, 5)).unbind(1)
        squares = [tile.unflatten(1, (self.grid, self.grid)) for tile in tiles]
        canvas = torch.cat([torch.cat(squares[:2], dim=2), torch.cat(squares[2:], dim=2)], dim=1)
        ends = newline.expand(len(canvas), canvas.shape[1], 1, -1)
        return torch.cat([base, torch.cat([canvas, ends], dim=2).flatten(1, 2)], dim=1)

    def prompt(self, batch: Batch, tokens: Tensor) -> Prompt:
        """Start, picture and all questions of each scene in one row.

        Each question sees the start of the prompt, the picture and itself, at the positions it would have alone.
        """
        text = self.model.model.language_model
        visual = self.sequence(tokens, getattr(self.model.model, "image_newline", torch.empty(0)))
        prefix = torch.tensor(self.prefix).expand(len(visual), -1)
        before = visual.shape[1] + prefix.shape[1]
        hidden = torch.cat([text.embed_tokens(prefix), visual, text.embed_tokens(batch.ids)], dim=1)
        place = torch.cat([torch.arange(before).expand(len(visual), -1), before + batch.offset], dim=1)
        return Prompt(hidden, text.rotary_emb(hidden, position_ids=place), block_mask(batch.block, before), before)

    def answer_logits(self, prompt: Prompt) -> Tensor:
        """Logits (b, t, vocabulary) after every text token."""
        text = self.model.model.language_model
        *layers, last = text.layers
        hidden = prompt.hidden
        for layer in layers:
            hidden = layer(hidden, attention_mask=prompt.mask, position_embeddings=prompt.rotation)
        logits: Tensor = self.model.lm_head(text.norm(_text_only(last, hidden, prompt)))
        return logits

    def grounding(self, batch: Batch, prompt: Prompt) -> tuple[Tensor, float]:
        """Make half of the first layer's heads look from a question's word at the patches that show it.

        Where there is a base view beside tiles, the first of these heads looks at the base view and the others at the
        tiles: the one knows where a thing is, the others what it is in detail.

        Returns
        -------
        tuple
            Mean negative log of the attention on those patches, and its mean share.
        """
        scores, words = self._first_looks(batch, prompt, slice(0, self.half))
        shown = torch.zeros(*batch.ids.shape, words.shape[1], dtype=torch.bool)
        for index, table in enumerate(self.word_in_slot):
            asked = table[batch.ids]
            shown |= (asked[:, :, None] == words[:, None, :, index]) & (asked >= 0)[:, :, None]
        seen = scores[..., -words.shape[1] :]
        mass = []
        for head, mine in enumerate(self._views(words.shape[1])):
            useful = (shown & mine).any(-1)
            mass.append(seen[:, head][useful].masked_fill(~(shown & mine)[useful], -torch.inf).logsumexp(-1))
        every = torch.cat(mass)
        return -every.mean(), every.exp().mean().item()

    def _views(self, length: int) -> list[Tensor]:
        """Which of the picture's tokens (length) each grounded head is to look at."""
        everything = torch.ones(length, dtype=torch.bool)
        if self.model.config.model_type == "llava":
            return [everything] * self.half
        base = torch.arange(length) < self.grid**2
        return [base, *[~base] * (self.half - 1)]

    def tally(self, batch: Batch, prompt: Prompt) -> Tensor:
        """Make one more head of the first layer share its attention evenly: a kind's objects and the start token.

        However many patches show an object, together they get one part of n + 1; the start token's part then tells the
        number n of objects. Mean cross-entropy.
        """
        scores, words = self._first_looks(batch, prompt, slice(self.half, self.half + 1))
        owner = self.sequence(batch.owner[..., None], torch.full((1,), -1))[..., 0]
        asked = self.word_in_slot[0][batch.ids]
        kinds = (asked >= 0) & (asked < len(CATEGORY))
        shown = (asked[:, :, None] == words[:, None, :, 0])[kinds]
        owner = owner[:, None].expand(-1, batch.ids.shape[1], -1)[kinds]
        seen = scores[:, 0][kinds]
        total, parts = seen[:, 0], torch.ones(len(seen))
        for index in range(int(owner.max()) + 1):
            mine = shown & (owner == index)
            there = mine.any(-1)
            mass = seen[there][:, -words.shape[1] :].masked_fill(~mine[there], -torch.inf).logsumexp(-1)
            total, parts = total.index_add(0, there.nonzero()[:, 0], mass), parts + there
        return -(total / parts).mean()

    def _first_looks(self, batch: Batch, prompt: Prompt, heads: slice) -> tuple[Tensor, Tensor]:
        """Log attention (b, heads, t, start and picture) of the first layer's text, words of the picture's tokens."""
        layer = self.model.model.language_model.layers[0]
        attention = layer.self_attn
        normed = layer.input_layernorm(prompt.hidden)
        rows = slice(heads.start * attention.head_dim, heads.stop * attention.head_dim)

        def some(linear: nn.Linear) -> Tensor:
            chosen = functional.linear(normed, linear.weight[rows])
            return chosen.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        query, key = apply_rotary_pos_emb(some(attention.q_proj), some(attention.k_proj), *prompt.rotation)
        scores = query[:, :, prompt.before :] @ key.mT * attention.scaling
        scores = scores.masked_fill(~prompt.mask[:, :, prompt.before :], -torch.inf).log_softmax(-1)
        # (b, length, slots); an end of a row shows nothing.
        words = self.sequence(batch.words.mT, torch.full((len(SLOTS),), -1))
        return scores[..., : prompt.before], words

    def language(self, batch: Batch, prompt: Prompt, counting: float = 1.0) -> tuple[Tensor, Tensor]:
        """Loss on the answers, and which text tokens (b, t) are predicted right (True outside answers).

        `counting` weighs the answers of the counting family.
        """
        logits = self.answer_logits(prompt)
        chosen = batch.target >= 0
        each = functional.cross_entropy(logits[chosen], batch.target[chosen], reduction="none")
        weight = torch.where(batch.family[chosen] == self.counting, counting, 1.0)
        return (each * weight).sum() / weight.sum(), ~chosen | (logits.argmax(-1) == batch.target)


def block_mask(block: Tensor, before: int) -> Tensor:
    """Which place sees which, (b, 1, l, l): causal, and questions do not see each other."""
    count, width = block.shape
    length = before + width
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = causal.expand(count, length, length).clone()
    same = block[:, :, None] == block[:, None, :]
    mask[:, before:, before:] &= same
    return mask[:, None]


def _cls_only(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Output of an encoder layer for the CLS token alone (b, width)."""
    attention = layer.self_attn
    normed = layer.layer_norm1(hidden)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)

    mixed = functional.scaled_dot_product_attention(
        heads(attention.q_proj(normed[:, :1])), heads(attention.k_proj(normed)), heads(attention.v_proj(normed))
    )
    state = hidden[:, 0] + attention.out_proj(mixed.transpose(1, 2).flatten(2))[:, 0]
    return state + layer.mlp(layer.layer_norm2(state))


def _text_only(layer: nn.Module, hidden: Tensor, prompt: Prompt) -> Tensor:
    """Output of a decoder layer for the text after the picture alone (b, t, width); nothing reads the rest of it."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    query, key = heads(attention.q_proj(normed)), heads(attention.k_proj(normed))
    query, key = apply_rotary_pos_emb(query, key, *prompt.rotation)
    mixed = functional.scaled_dot_product_attention(
        query[:, :, prompt.before :],
        key,
        heads(attention.v_proj(normed)),
        attn_mask=prompt.mask[:, :, prompt.before :],
    )
    state = hidden[:, prompt.before :] + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return state + layer.mlp(layer.post_attention_layernorm(state))
