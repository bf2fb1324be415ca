"""Questions on pictures as a model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stacktok.models.pictures import DEFAULT_LIMITS, PictureLimits, check_picture
from stacktok.models.query import placeholders


def plain_text(text: str, processor: Any) -> str:
    """A user's text in which no word stands for an image or a video.

    ``<image>`` in a question would be taken for one more picture. It is written ``< image >``, which every tokenizer
    reads as text.

    Parameters
    ----------
    text
        What the user wrote.
    processor
        The model's, whose markers are looked for.
    """
    for marker in sorted(placeholders(processor), key=len, reverse=True):
        text = text.replace(marker, f"{marker[0]} {marker[1:-1]} {marker[-1]}")
    return text


def plain_messages(messages: Sequence[Mapping[str, Any]], processor: Any) -> list[dict[str, Any]]:
    """A conversation whose texts are `plain_text`; its images stay where they are."""

    def plain(part: Any) -> Any:
        if isinstance(part, str):
            return plain_text(part, processor)
        return {**part, "text": plain_text(part["text"], processor)} if part.get("type") == "text" else part

    return [
        {
            **message,
            "content": plain(message["content"])
            if isinstance(message["content"], str)
            else [plain(part) for part in message["content"]],
        }
        for message in messages
    ]


def last_question(messages: Sequence[Mapping[str, Any]]) -> str:
    """The texts of the last user turn of a conversation, in the form that chat templates take.

    Parameters
    ----------
    messages
        Role, and content as a text or as a list of images and texts.
    """
    for message in reversed(messages):
        if message["role"] == "user":
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            return " ".join(part["text"] for part in parts if part.get("type") == "text")
    return ""


def prompt_inputs(processor: Any, image: Any, question: str, model: Any, limits: PictureLimits = DEFAULT_LIMITS) -> Any:
    """Model inputs of one question on one picture; see `batch_inputs`."""
    return batch_inputs(processor, [image], [question], model, limits)


def batch_inputs(
    processor: Any,
    images: Sequence[Any],
    questions: Sequence[str],
    model: Any,
    limits: PictureLimits = DEFAULT_LIMITS,
) -> Any:
    """Model inputs of one question on each picture, in the processor's own template.

    Parameters
    ----------
    processor, model
        Of the model that is asked.
    images
        Pictures in RGB, B of them.
    questions
        Plain text, B of them; a marker such as ``<image>`` in it is text.
    limits
        Bounds on a picture, checked before it is processed, and on its tokens, checked before it is encoded.
    """
    for image in images:
        check_picture(image.width, image.height, limits=limits)
    texts = [prompt_text(processor, question) for question in questions]
    # Some processors want the images of every prompt in a list of their own; none minds.
    inputs = processor(images=[[image] for image in images], text=texts, return_tensors="pt", padding=True)
    for image, ids in zip(images, inputs["input_ids"], strict=True):
        tokens = int((ids == model.config.image_token_id).sum())
        check_picture(image.width, image.height, tokens=tokens, limits=limits)
    return on_model(inputs, model)


def further_questions(
    processor: Any, inputs: Any, texts: Sequence[str], rows: Sequence[tuple[int, str]], model: Any
) -> Any | None:
    """Model inputs of several questions on pictures that were processed once; pixels are left out.

    A picture's placeholders are copied from the prompt that it was processed with. None where that does not give those
    prompts themselves again, as in families whose placeholders are laid out with text between them.

    Parameters
    ----------
    processor, model
        Of the model that is asked.
    inputs
        Of `batch_inputs`, for P pictures.
    texts
        The P prompts of these.
    rows
        For every question, the picture and the prompt, B of them.
    """
    import torch

    token, tokenizer, device = model.config.image_token_id, processor.tokenizer, inputs["input_ids"].device
    along = [name for name, value in inputs.items() if value.shape == inputs["input_ids"].shape]
    first = {name: inputs[name].cpu() for name in along}
    spans = []
    for number, ids in enumerate(first["input_ids"]):
        places = (ids == token).nonzero()[:, 0]
        if not len(places):
            return None
        span = slice(int(places[0]), int(places[-1]) + 1)
        spans.append({name: value[number, span] for name, value in first.items()})

    # What stands for text in a sequence that runs along with the ids, such as token types, is 0; the check sees others.
    texts_of = {"attention_mask": 1}

    def spliced(image: int, ids: list[int]) -> dict[str, torch.Tensor] | None:
        if ids.count(token) != 1:
            return None
        at = ids.index(token)
        found = {}
        for name in along:
            plain = torch.tensor(ids) if name == "input_ids" else torch.full((len(ids),), texts_of.get(name, 0))
            found[name] = torch.cat([plain[:at], spans[image][name], plain[at + 1 :]])
        return found

    tokenized = tokenizer([*texts, *(text for _, text in rows)])["input_ids"]
    for image, ids in enumerate(tokenized[: len(texts)]):
        made = spliced(image, ids)
        valid = first["attention_mask"][image].bool()
        if made is None or any(not torch.equal(made[name], first[name][image][valid]) for name in along):
            return None
    made_rows = [spliced(image, ids) for (image, _), ids in zip(rows, tokenized[len(texts) :], strict=True)]
    if any(made is None for made in made_rows):
        return None
    width = max(len(made["input_ids"]) for made in made_rows if made is not None)
    pads = {"input_ids": tokenizer.pad_token_id or 0}
    found: dict[str, Any] = {}
    for name in along:
        batch = torch.full((len(rows), width), pads.get(name, 0), dtype=first[name].dtype)
        for row, made in enumerate(made_rows):
            if made is not None:
                batch[row, width - len(made[name]) :] = made[name]
        found[name] = batch.to(device)
    which = [image for image, _ in rows]
    for name, value in inputs.items():
        # Sizes and grids of pictures; positions are computed from them.
        if name not in along and not name.startswith("pixel") and len(value) == len(texts):
            found[name] = value[which]
    return found


def prompt_text(processor: Any, question: str) -> str:
    """The prompt of one question on one picture, in the processor's own template."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    if getattr(processor, "chat_template", None):
        text: str = processor.apply_chat_template(
            plain_messages(messages, processor), tokenize=False, add_generation_prompt=True
        )
        return text
    return f"USER: {getattr(processor, 'image_token', '<image>')}\n{plain_text(question, processor)} ASSISTANT:"


def on_model(inputs: Any, model: Any) -> Any:
    """A processor's output where the model is, in its type; quantised weights say nothing about that."""
    parameter = next((own for own in model.parameters() if own.is_floating_point()), next(model.parameters()))
    return inputs.to(parameter.device, parameter.dtype)
