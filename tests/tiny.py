"""Tiny vision-language models with random weights, built offline: the real architectures, processors and templates."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "USER: What is in the image? ASSISTANT: a red square on a blue field. How many cats are there? The answer is two. "
    "Is there a dog? Question: Describe the snowboard in the picture, please. system user assistant [INST] [/INST] "
    "A chat between a curious human and an artificial intelligence assistant. You are a helpful assistant. 0123456789"
)

# The prompt formats that the families were trained with.
VICUNA = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'][0]['text'] + ' ' }}{% else %}"
    "{{ m['role'].upper() + ': ' }}{% for c in m['content'] %}{% if c['type'] == 'image' %}{{ '<image>\\n' }}"
    "{% endif %}{% endfor %}{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] + ' ' }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
VICUNA_SYSTEM = "{{ 'A chat between a curious human and an artificial intelligence assistant. ' }}" + VICUNA
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<image>\\n' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{{ ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'][0]['text'] + '</s>' }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% elif c['type'] == 'video' %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Words carry their leading space, as in Llama."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "\u2581"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens={"image_token": "<image>"},
    )


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Byte level, without an added space, as in Qwen."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    special.append("<|video_pad|>")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        padding_side="left",
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    )


class QwenProcessor(transformers.Qwen2_5_VLProcessor):
    """The real processor without its video half, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


@dataclass(frozen=True, eq=False)
class Tiny:
    """A model, its processor, and prompts in its own format."""

    family: str
    model: Any
    processor: Any

    def prompt(self, question: str, images: int = 1) -> str:
        content = [{"type": "image"}] * images + [{"type": "text", "text": question}]
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    def inputs(self, questions: list[str], images: list[list[Image.Image]]) -> Any:
        """Model inputs of a batch; each question comes with its own list of images."""
        prompts = [self.prompt(question, len(own)) for question, own in zip(questions, images, strict=True)]
        flat = [image for own in images for image in own]
        return self.processor(images=flat or None, text=prompts, return_tensors="pt", padding=True)


def picture(width: int = 96, height: int = 64, seed: int = 0) -> Image.Image:
    """A picture with some structure: random blocks of colour."""
    blocks = np.random.default_rng(seed).integers(
        0, 256, (max(1, height // 12), max(1, width // 12), 3), dtype=np.uint8
    )
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)


def _vision(size: int, hidden: int) -> Any:
    return transformers.CLIPVisionConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=size,
        patch_size=14,
        projection_dim=hidden,
    )


def _text(tokenizer: Any, hidden: int, kind: Any = transformers.LlamaConfig, layers: int = 3) -> Any:
    return kind(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _finish(family: str, model: Any, processor: Any) -> Tiny:
    model.eval()
    # Default initial weights give nearly equal features; larger ones make selections and logits depend on everything.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or "newline" in name:
                scale = 0.5 if "embed" in name else 0.15
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.generation_config.eos_token_id = None
    return Tiny(family, model, processor)


def llava(size: int = 84, hidden: int = 32, layers: int = 3, **image_processor: Any) -> Tiny:
    """LLaVA-1.5: CLIP with CLS, two-layer projector, Llama."""
    torch.manual_seed(0)
    tokenizer = llama_tokenizer()
    kind = transformers.LlavaImageProcessorPil if image_processor else transformers.CLIPImageProcessorPil
    processor = transformers.LlavaProcessor(
        image_processor=kind(
            size={"shortest_edge": size}, crop_size={"height": size, "width": size}, **image_processor
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=VICUNA,
    )
    config = transformers.LlavaConfig(
        vision_config=_vision(size, hidden),
        text_config=_text(tokenizer, hidden, layers=layers),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=(size // 14) ** 2,
    )
    return _finish("llava", transformers.LlavaForConditionalGeneration(config), processor)


def llava_next(size: int = 56, hidden: int = 32, mistral: bool = False, layers: int = 3) -> Tiny:
    """LLaVA-NeXT: base view and tiles, newlines, Vicuna or Mistral."""
    torch.manual_seed(0)
    tokenizer = llama_tokenizer()
    shapes = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]
    pinpoints = [[rows * size, columns * size] for rows, columns in shapes]
    processor = transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": size}, crop_size={"height": size, "width": size}, image_grid_pinpoints=pinpoints
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=MISTRAL if mistral else VICUNA_SYSTEM,
    )
    config = transformers.LlavaNextConfig(
        vision_config=_vision(size, hidden),
        text_config=_text(
            tokenizer, hidden, transformers.MistralConfig if mistral else transformers.LlamaConfig, layers
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=(size // 14) ** 2,
        image_grid_pinpoints=pinpoints,
    )
    return _finish("llava_next", transformers.LlavaNextForConditionalGeneration(config), processor)


def qwen(hidden: int = 32, layers: int = 3) -> Tiny:
    """Qwen2.5-VL: window attention, 2 x 2 merging, M-RoPE."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    processor = QwenProcessor(
        image_processor=transformers.Qwen2VLImageProcessorPil(
            patch_size=14,
            merge_size=2,
            temporal_patch_size=2,
            size={"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 48},
        ),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=CHATML,
    )
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [hidden // 16, 3 * hidden // 32, 3 * hidden // 32],
                "rope_theta": 1e6,
            },
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 3,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return _finish("qwen2_5_vl", transformers.Qwen2_5_VLForConditionalGeneration(config), processor)


def video_inputs(
    tiny: Tiny, question: str, grids: list[tuple[int, int, int]], seed: int = 0
) -> dict[str, torch.Tensor]:
    """Inputs of one prompt with videos, their pixels made by hand; grids are (t, h, w) in patches."""
    tokenizer = tiny.processor.tokenizer
    content = [{"type": "video"}] * len(grids) + [{"type": "text", "text": question}]
    text = tiny.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    pieces = text.split("<|video_pad|>")
    text = pieces[0]
    for (t, h, w), piece in zip(grids, pieces[1:], strict=True):
        text += "<|video_pad|>" * (t * h * w // 4) + piece
    encoded = tokenizer(text, return_tensors="pt")
    ids = encoded["input_ids"]
    patches = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": ids,
        "attention_mask": encoded["attention_mask"],
        "mm_token_type_ids": 2 * (ids == tokenizer.convert_tokens_to_ids("<|video_pad|>")).int(),
        "pixel_values_videos": torch.randn(patches, 3 * 2 * 14 * 14, generator=generator),
        "video_grid_thw": torch.tensor(grids),
        "second_per_grid_ts": torch.ones(len(grids)),
    }


BUILDERS = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_next_mistral": functools.partial(llava_next, mistral=True),
    "qwen2_5_vl": qwen,
}


@functools.cache
def build(family: str, layers: int = 3) -> Tiny:
    """A shared model; a test must leave it as it was."""
    return BUILDERS[family](layers=layers)
