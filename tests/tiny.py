"""Tiny vision-language models with random weights, built offline: the real architectures, processors and templates."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.video_utils import VideoMetadata

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
QWEN3 = CHATML.replace(
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}",
    "",
)
QWEN3_5 = QWEN3.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
GLM = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<|begin_of_image|><|image|><|end_of_image|>' }}{% elif c['type'] == 'video' %}"
    "{{ '<|begin_of_video|><|video|><|end_of_video|>' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% if m['role'] == 'user' and enable_thinking is defined and not enable_thinking %}{{ '/nothink' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
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


def byte_tokenizer(special: list[str], end: str, **named: str) -> PreTrainedTokenizerFast:
    """Byte level, without an added space; the first special token pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=373 + len(special),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=end,
        padding_side="left",
        extra_special_tokens=named,
    )


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """As Qwen's."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    return byte_tokenizer(
        [*special, "<|video_pad|>"],
        "<|im_end|>",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )


def glm_tokenizer() -> PreTrainedTokenizerFast:
    """As GLM's."""
    special = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|video|>"]
    special += [f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")]
    return byte_tokenizer(special, "<|user|>", image_token="<|image|>", video_token="<|video|>")


def without_videos(processor: Any) -> Any:
    """A processor's class without its video half, which needs torchvision."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if argument is None else processor.check_argument_for_proper_class(self, name, argument)

    return type(processor.__name__, (processor,), {"check_argument_for_proper_class": check})


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
        given = images if any(images) else None
        return self.processor(images=given, text=prompts, return_tensors="pt", padding=True)


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


def _patch_processor(kind: Any, worker: Any, tokenizer: Any, template: str, patch: int, largest: int) -> Any:
    """The real processor of a family whose images are grids of patches; ``largest`` is in tokens."""
    side = 2 * patch
    return without_videos(kind)(
        image_processor=worker(
            patch_size=patch,
            merge_size=2,
            temporal_patch_size=2,
            size={"shortest_edge": side * side * 4, "longest_edge": side * side * largest},
        ),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=template,
    )


def _patch_text(tokenizer: Any, hidden: int, layers: int, sections: list[int], **own: Any) -> dict[str, Any]:
    """A language model with M-RoPE; ``sections`` of half of a head's rotated numbers."""
    rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 1e6, **own.pop("rope", {})}
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        "pad_token_id": tokenizer.pad_token_id,
        **own,
    }


def _patch_tower(hidden: int, patch: int, **own: Any) -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        **own,
    }


def _qwen_ids(tokenizer: Any) -> dict[str, int]:
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    return {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}


def qwen(hidden: int = 32, layers: int = 3) -> Tiny:
    """Qwen2.5-VL: window attention, 2 x 2 merging, M-RoPE."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    worker = transformers.Qwen2VLImageProcessorPil
    processor = _patch_processor(transformers.Qwen2_5_VLProcessor, worker, tokenizer, CHATML, 14, 48)
    config = transformers.Qwen2_5_VLConfig(
        text_config=_patch_text(
            tokenizer,
            hidden,
            layers,
            [hidden // 16, 3 * hidden // 32, 3 * hidden // 32],
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        ),
        vision_config=_patch_tower(hidden, 14, window_size=56, fullatt_block_indexes=[1], tokens_per_second=2),
        **_qwen_ids(tokenizer),
    )
    return _finish("qwen2_5_vl", transformers.Qwen2_5_VLForConditionalGeneration(config), processor)


def qwen2(hidden: int = 32, layers: int = 3) -> Tiny:
    """Qwen2-VL: every block of the tower attends over the whole frame."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    worker = transformers.Qwen2VLImageProcessorPil
    processor = _patch_processor(transformers.Qwen2VLProcessor, worker, tokenizer, CHATML, 14, 32)
    tower = _patch_tower(hidden, 14, embed_dim=hidden, mlp_ratio=2)
    config = transformers.Qwen2VLConfig(
        text_config=_patch_text(
            tokenizer,
            hidden,
            layers,
            [hidden // 16, 3 * hidden // 32, 3 * hidden // 32],
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        ),
        vision_config={k: v for k, v in tower.items() if k not in ("intermediate_size", "out_hidden_size")},
        **_qwen_ids(tokenizer),
    )
    return _finish("qwen2_vl", transformers.Qwen2VLForConditionalGeneration(config), processor)


_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def qwen3(hidden: int = 32, layers: int = 3, experts: bool = False) -> Tiny:
    """Qwen3-VL: DeepStack features after two layers of the language model."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    worker = transformers.Qwen2VLImageProcessorPil
    processor = _patch_processor(transformers.Qwen3VLProcessor, worker, tokenizer, QWEN3, 16, 32)
    own = {"rope": {"mrope_interleaved": True}, "head_dim": hidden // 2, **(_EXPERTS if experts else {})}
    settings = {
        "text_config": _patch_text(tokenizer, hidden, layers, [hidden // 8, hidden // 16, hidden // 16], **own),
        "vision_config": _patch_tower(hidden, 16, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
        **_qwen_ids(tokenizer),
    }
    if experts:
        config = transformers.Qwen3VLMoeConfig(**settings)
        return _finish("qwen3_vl_moe", transformers.Qwen3VLMoeForConditionalGeneration(config), processor)
    config = transformers.Qwen3VLConfig(**settings)
    return _finish("qwen3_vl", transformers.Qwen3VLForConditionalGeneration(config), processor)


def qwen3_5(hidden: int = 32, layers: int = 3, experts: bool = False, linear: int = 16) -> Tiny:
    """Qwen3.5: every other layer is a Gated DeltaNet, not the last; a quarter of a head is rotated."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    worker = transformers.Qwen2VLImageProcessorPil
    processor = _patch_processor(transformers.Qwen3VLProcessor, worker, tokenizer, QWEN3_5, 16, 32)
    own = {
        "rope": {"mrope_interleaved": True, "partial_rotary_factor": 0.25},
        "head_dim": 64,
        "linear_key_head_dim": linear,
        "linear_value_head_dim": linear,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "layer_types": [
            "full_attention" if layer % 2 or layer == layers - 1 else "linear_attention" for layer in range(layers)
        ],
    }
    if experts:
        own |= {**_EXPERTS, "shared_expert_intermediate_size": 16}
    text = _patch_text(tokenizer, hidden, layers, [4, 2, 2], **own)
    settings = {
        "text_config": {k: v for k, v in text.items() if not (experts and k == "intermediate_size")},
        "vision_config": _patch_tower(hidden, 16, num_position_embeddings=16),
        **_qwen_ids(tokenizer),
    }
    if experts:
        config = transformers.Qwen3_5MoeConfig(**settings)
        return _finish("qwen3_5_moe", transformers.Qwen3_5MoeForConditionalGeneration(config), processor)
    config = transformers.Qwen3_5Config(**settings)
    return _finish("qwen3_5", transformers.Qwen3_5ForConditionalGeneration(config), processor)


def glm(kind: str = "glm4v", hidden: int = 32, layers: int = 3) -> Tiny:
    """GLM-4V and its relatives: a convolution merges patches, half of a head is rotated."""
    torch.manual_seed(0)
    tokenizer = glm_tokenizer()
    newer = kind in ("glm46v", "glm_ocr")
    processor = _patch_processor(
        transformers.Glm46VProcessor if newer else transformers.Glm4vProcessor,
        transformers.Glm46VImageProcessorPil if newer else transformers.Glm4vImageProcessorPil,
        tokenizer,
        GLM,
        14,
        # The processor counts the pixels of both frames of a temporal patch.
        48,
    )
    ids = tokenizer.convert_tokens_to_ids
    own: dict[str, Any] = {"rope": {"partial_rotary_factor": 0.5}}
    if kind == "glm4v_moe":
        own |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    settings = {
        "text_config": _patch_text(tokenizer, hidden, layers, [hidden // 16, hidden // 32, hidden // 32], **own),
        "vision_config": _patch_tower(hidden, 14, image_size=56),
        **{f"{name}_token_id": ids(f"<|{name}|>") for name in ("image", "video")},
        **{
            f"{name}_{edge}_token_id": ids(f"<|{word}_of_{name}|>")
            for name in ("image", "video")
            for edge, word in (("start", "begin"), ("end", "end"))
        },
    }
    name = {"glm4v": "Glm4v", "glm4v_moe": "Glm4vMoe", "glm46v": "Glm46V", "glm_ocr": "GlmOcr"}[kind]
    config = getattr(transformers, f"{name}Config")(**settings)
    return _finish(kind, getattr(transformers, f"{name}ForConditionalGeneration")(config), processor)


def video_inputs(
    tiny: Tiny, question: str, grids: list[tuple[int, int, int]], seed: int = 0
) -> dict[str, torch.Tensor]:
    """Inputs of one prompt with videos, their pixels made by hand; grids are (t, h, w) in patches.

    The text around the frames is the processor's own.
    """
    processor, tokenizer = tiny.processor, tiny.processor.tokenizer
    content = [{"type": "video"}] * len(grids) + [{"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    frames = [VideoMetadata(2 * t, fps=2.0, frames_indices=list(range(2 * t))) for t, _, _ in grids]
    given = {"video_grid_thw": torch.tensor(grids), "video_metadata": frames}
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    try:
        runs = [processor.replace_video_token(given, video_idx=index) for index in range(len(grids))]
    finally:
        processor.video_processor = None
    pieces = text.split(processor.video_token)
    text = pieces[0] + "".join(run + piece for run, piece in zip(runs, pieces[1:], strict=True))
    encoded = tokenizer(text, return_tensors="pt")
    ids = encoded["input_ids"]
    patches = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "input_ids": ids,
        "attention_mask": encoded["attention_mask"],
        "mm_token_type_ids": torch.tensor(processor.create_mm_token_type_ids(ids.tolist())),
        "pixel_values_videos": torch.randn(
            patches, 3 * 2 * tiny.model.config.vision_config.patch_size**2, generator=generator
        ),
        "video_grid_thw": torch.tensor(grids),
    }
    if tiny.family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.ones(len(grids))
    return inputs


BUILDERS = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_next_mistral": functools.partial(llava_next, mistral=True),
    "qwen2_5_vl": qwen,
    "qwen2_vl": qwen2,
    "qwen3_vl": qwen3,
    "qwen3_vl_moe": functools.partial(qwen3, experts=True),
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": functools.partial(qwen3_5, experts=True),
    **{kind: functools.partial(glm, kind) for kind in ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")},
}


MROPE = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm_ocr")
"""Families whose positions are (t, h, w)."""

RELATIVES = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "glm46v")
"""Model types with the adapter of one of those families."""


@functools.cache
def build(family: str, layers: int = 3) -> Tiny:
    """A shared model; a test must leave it as it was."""
    from tests import tiny_tiles

    return {**BUILDERS, **tiny_tiles.BUILDERS}[family](layers=layers)
