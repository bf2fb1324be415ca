"""One question on one picture as a model's inputs."""

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
    """Model inputs of one question on one picture, in the processor's own template.

    Parameters
    ----------
    processor, model
        Of the model that is asked.
    image
        A picture in RGB.
    question
        Plain text; a marker such as ``<image>`` in it is text.
    limits
        Bounds on the picture, checked before it is processed, and on its tokens, checked before it is encoded.
    """
    check_picture(image.width, image.height, limits=limits)
    inputs = processor(images=[image], text=[prompt_text(processor, question)], return_tensors="pt")
    tokens = int((inputs["input_ids"] == model.config.image_token_id).sum())
    check_picture(image.width, image.height, tokens=tokens, limits=limits)
    return on_model(inputs, model)


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
