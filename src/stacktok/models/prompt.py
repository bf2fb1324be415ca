"""One question on one picture as a model's inputs."""

from __future__ import annotations

from typing import Any


def prompt_inputs(processor: Any, image: Any, question: str, model: Any) -> Any:
    """Model inputs of one question on one picture, in the processor's own template."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    if getattr(processor, "chat_template", None):
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    else:
        prompt = f"USER: {getattr(processor, 'image_token', '<image>')}\n{question} ASSISTANT:"
    inputs = processor(images=[image], text=[prompt], return_tensors="pt")
    parameter = next(model.parameters())
    return inputs.to(parameter.device, parameter.dtype)
