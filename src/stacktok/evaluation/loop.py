"""Asking a model many questions about pictures that are encoded once, whatever is kept of them.

The loop calls the stock language model on inputs that it compacts itself, without hooks: what it measures does not
depend on the runtime, and the two can be held against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import DynamicCache

from stacktok.core.attention import TowerSignal
from stacktok.core.tokens import EncodedImage, Reduction
from stacktok.models.base import EncoderCall
from stacktok.models.query import placeholders, without, word_ids
from stacktok.models.registry import adapter_for
from stacktok.runtime.compaction import Span, compact, count_positions
from stacktok.runtime.tower import tapped_tower


@dataclass(frozen=True, eq=False)
class Prompt:
    """A question about one encoded image.

    Attributes
    ----------
    ids
        Token ids of the unpruned prompt, placeholders included, (S,).
    image
        The encoded image.
    rows
        The rows that the unpruned image fills in the prompt, (image.length, d).
    query
        Input embeddings of the query's tokens, (m, d).
    """

    ids: torch.Tensor
    image: EncodedImage
    rows: torch.Tensor
    query: torch.Tensor


def obstacle(model: Any, processor: Any) -> str | None:
    """Why `Loop` cannot ask a model; None where it can."""
    adapter = adapter_for(model)
    if adapter.mrope:
        return f"{adapter.family} has (t, h, w) positions, which this loop does not lay out; ask through the runtime"
    told_by_prompt = adapter.group(model.config, [], processor) is not None
    if told_by_prompt or adapter.text_separators or adapter.gathers_masks:
        return (
            f"images of {adapter.family} cannot be laid out apart from their prompts, as this loop does; ask through "
            "the runtime"
        )
    return None


class Loop:
    """A model and its processor, asked question by question.

    Parameters
    ----------
    model
        A transformers model of a supported family with Llama-type positions.
    processor
        Its processor.
    max_new_tokens
        Longest answer.
    """

    def __init__(self, model: Any, processor: Any, max_new_tokens: int = 5) -> None:
        self.model, self.processor, self.max_new_tokens = model, processor, max_new_tokens
        self.adapter = adapter_for(model)
        why = obstacle(model, processor)
        if why is not None:
            raise ValueError(why)
        end = model.generation_config.eos_token_id
        self._end = torch.tensor([] if end is None else [end] if isinstance(end, int) else end, dtype=torch.long)
        self._pad = int(model.generation_config.pad_token_id or 0)

    @torch.inference_mode()
    def encode(self, picture: Any, signal: TowerSignal | None = None) -> tuple[EncodedImage, torch.Tensor]:
        """A picture as the encoder leaves it: the image with the tower's attention, and its unpruned rows.

        Parameters
        ----------
        picture
            The picture.
        signal
            Which attention; None for that of most methods.
        """
        inputs = self.processor.image_processor(images=picture, return_tensors="pt")
        arguments = {name: inputs[name] for name in ("pixel_values", "image_sizes") if name in inputs}
        with tapped_tower(self.adapter, self.model, signal or TowerSignal()) as tower:
            output = self.model.get_image_features(**arguments, return_dict=True)
        call = EncoderCall("image", output, output.pooler_output, arguments, self.model, self.processor)
        (image,) = self.adapter.encode(call, tower.take())
        return image, output.pooler_output[0]

    @torch.inference_mode()
    def prompt(self, picture: Any, encoded: tuple[EncodedImage, torch.Tensor], text: str) -> Prompt:
        """A user's question about an encoded picture, through the chat template."""
        content = [{"type": "image"}, {"type": "text", "text": text}]
        rendered = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        ids = self.processor(images=picture, text=rendered, return_tensors="pt")["input_ids"][0]
        return Prompt(ids, encoded[0], encoded[1], self.query(text))

    @torch.inference_mode()
    def query(self, text: str) -> torch.Tensor:
        """Input embeddings of a question's tokens, (m, d)."""
        known = without(text, placeholders(self.processor))
        words = word_ids(self.processor.tokenizer, self.adapter.query_words(known))
        query: torch.Tensor = self.model.get_input_embeddings()(torch.tensor(words, dtype=torch.long))
        return query

    @torch.inference_mode()
    def vocabulary(self) -> torch.Tensor:
        """Input embeddings of all words, special tokens left out, (V, d)."""
        special = set(self.processor.tokenizer.all_special_ids) | {self.model.config.image_token_id}
        ids = sorted(set(self.processor.tokenizer.get_vocab().values()) - special)
        words: torch.Tensor = self.model.get_input_embeddings()(torch.tensor(ids))
        return words

    def answers(
        self,
        prompts: Sequence[Prompt],
        reductions: Sequence[Reduction | None],
        positions: Literal["compact", "kept"] = "compact",
    ) -> list[str]:
        """Greedy answers; see `tokens`."""
        tokens = self.tokens(prompts, reductions, positions)
        decoded: list[str] = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return [text.strip() for text in decoded]

    @torch.inference_mode()
    def tokens(
        self,
        prompts: Sequence[Prompt],
        reductions: Sequence[Reduction | None],
        positions: Literal["compact", "kept"] = "compact",
    ) -> list[list[int]]:
        """Tokens of greedy answers, the one that ends an answer included.

        Parameters
        ----------
        prompts
            The questions, B of them.
        reductions
            What is left of each one's image; None leaves it whole.
        positions
            "compact" numbers what is left from 0, "kept" leaves every token its original position.
        """
        step, mask, at = self._inputs(prompts, reductions, positions)
        cache, answers, done = DynamicCache(), [], torch.zeros(len(prompts), dtype=torch.bool)
        embed = self.model.get_input_embeddings()
        for _ in range(self.max_new_tokens):
            output = self.adapter.language_model(self.model)(
                inputs_embeds=step, attention_mask=mask, position_ids=at, past_key_values=cache, use_cache=True
            )
            token = self.model.lm_head(output.last_hidden_state[:, -1]).argmax(-1)
            answers.append(token.masked_fill(done, -1))
            done |= torch.isin(token, self._end)
            if bool(done.all()):
                break
            step, at = embed(token)[:, None], at[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        return [[token for token in row if token >= 0] for row in torch.stack(answers, dim=1).tolist()]

    @torch.inference_mode()
    def score(
        self,
        prompts: Sequence[Prompt],
        reductions: Sequence[Reduction | None],
        answers: Sequence[Sequence[int]],
        positions: Literal["compact", "kept"] = "compact",
    ) -> tuple[list[float], list[bool]]:
        """Log-probabilities of given answers, and whether they are the greedy ones; one forward pass.

        Parameters
        ----------
        prompts, reductions, positions
            As in `tokens`.
        answers
            Tokens of every answer, as `tokens` returns them.
        """
        step, mask, at = self._inputs(prompts, reductions, positions)
        longest = max(map(len, answers))
        # What stands to the right of an answer is seen by none of its tokens.
        given = torch.tensor([[*answer, *[self._pad] * (longest - len(answer))] for answer in answers])
        start = step.shape[1]
        output = self.adapter.language_model(self.model)(
            inputs_embeds=torch.cat([step, self.model.get_input_embeddings()(given)], dim=1),
            attention_mask=torch.cat([mask, mask.new_ones(len(mask), longest)], dim=1),
            position_ids=torch.cat([at, at[:, -1:] + 1 + torch.arange(longest)], dim=1),
            use_cache=False,
        )
        logits = self.model.lm_head(output.last_hidden_state[:, start - 1 : -1]).float()
        real = torch.arange(longest) < torch.tensor([len(answer) for answer in answers])[:, None]
        chosen = logits.log_softmax(-1).gather(-1, given[..., None])[..., 0]
        same = (logits.argmax(-1) == given) | ~real
        return chosen.masked_fill(~real, 0.0).sum(1).tolist(), same.all(1).tolist()

    def _inputs(
        self,
        prompts: Sequence[Prompt],
        reductions: Sequence[Reduction | None],
        positions: Literal["compact", "kept"],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Embeddings, mask and positions of a batch of pruned prompts, padded on the left."""
        width = max(len(prompt.ids) for prompt in prompts)
        valid = np.zeros((len(prompts), width), dtype=np.bool_)
        embeds = torch.zeros(len(prompts), width, prompts[0].rows.shape[1])
        embed = self.model.get_input_embeddings()
        spans = []
        for row, (prompt, reduction) in enumerate(zip(prompts, reductions, strict=True)):
            start = width - len(prompt.ids)
            valid[row, start:] = True
            own = embed(prompt.ids)
            columns = (prompt.ids == self.model.config.image_token_id).nonzero()[:, 0]
            own[columns] = prompt.rows
            embeds[row, start:] = own
            spans.append([] if reduction is None else [Span(columns.numpy() + start, prompt.image, reduction)])
        kept, made = compact(valid, spans, torch.device("cpu"))
        place = count_positions(kept.valid)
        if positions == "kept":
            place = kept.gather(count_positions(torch.from_numpy(valid)))
        step = kept.gather(embeds)
        for row, token, embedding in made:
            step[row, token] = embedding.to(step)
        return step, kept.valid.long(), place
