"""Tiny models of the families with tiles, row breaks and ready masks: real architectures, processors and templates."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any
from unittest import mock

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import WORDS, Tiny, _finish, _text, byte_tokenizer, without_videos

# The prompt formats that the families were trained with.
INTERNVL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<IMG_CONTEXT>\\n' }}{% elif c['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ONEVISION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<image>' }}{% elif c['type'] == 'video' %}{{ '<video>' }}{% endif %}{% endfor %}"
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ '\\n' + c['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SMOLVLM = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<image>' }}{% elif c['type'] == 'video' %}{{ '<video>' }}{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
MISTRAL_3 = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '[IMG]' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{{ '[/INST]' }}"
    "{% else %}{{ m['content'][0]['text'] + '</s>' }}{% endif %}{% endfor %}"
)


def gemma_template(begin: str, end: str, image: str) -> str:
    """Gemma's: the assistant is called model, and texts are trimmed."""
    return (
        "{{ bos_token }}{% for m in messages %}"
        f"{{{{ '{begin}' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}}}"
        "{% for c in m['content'] %}"
        f"{{% if c['type'] == 'image' %}}{{{{ '{image}' }}}}{{% else %}}{{{{ c['text'] | trim }}}}{{% endif %}}"
        f"{{% endfor %}}{{{{ '{end}\\n' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{begin}model\\n' }}}}{{% endif %}}"
    )


GEMMA_3 = gemma_template("<start_of_turn>", "<end_of_turn>", "<start_of_image>")
GEMMA_4 = gemma_template("<|turn>", "<turn|>", "<|image|>")


def internvl_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen's, with InternVL's image tokens."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values()]
    return byte_tokenizer(special, "<|im_end|>", **named)


def onevision_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen's, with LLaVA-OneVision's image tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]
    return byte_tokenizer(special, "<|im_end|>", image_token="<image>", video_token="<video>")


def smolvlm_tokenizer(*, tile_tokens: bool = True) -> PreTrainedTokenizerFast:
    """Tiles are named by tokens in SmolVLM2, and by plain text in Idefics3."""
    special = ["<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<video>"]
    if tile_tokens:
        special += ["<global-img>", *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))]
    return byte_tokenizer(special, "<end_of_utterance>", image_token="<image>")


def mistral_tokenizer() -> PreTrainedTokenizerFast:
    """Mistral's control tokens, the prompt's among them."""
    special = ["<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    return byte_tokenizer(special, "</s>")


def gemma_tokenizer(special: list[str], named: dict[str, str]) -> PreTrainedTokenizerFast:
    """Spaces are characters of their own and none is added, as in Gemma."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "\u2581"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>", *special],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens=named,
    )


@functools.cache
def processor_class(family: str, name: str) -> Any:
    """A real processor whose module takes functions from the torchvision half that the PIL half has as well."""
    module = f"transformers.models.{family}"
    pil = importlib.import_module(f"{module}.image_processing_pil_{family}")
    with mock.patch.dict(sys.modules, {f"{module}.image_processing_{family}": pil}):
        own = getattr(importlib.import_module(f"{module}.processing_{family}"), name)
    return without_videos(own)


class SmolVLMProcessor(transformers.SmolVLMProcessor):
    def apply_chat_template(self, conversation: Any, chat_template: Any = None, **kwargs: Any) -> Any:
        # The class's own asks the video processor for its settings.
        return transformers.ProcessorMixin.apply_chat_template(self, conversation, chat_template, **kwargs)


def _siglip(size: int, patch: int, hidden: int) -> Any:
    return transformers.SiglipVisionConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=size,
        patch_size=patch,
        vision_use_head=False,
    )


def internvl(hidden: int = 32, layers: int = 3) -> Tiny:
    """InternVL: up to four tiles of 4 x 4 tokens and a thumbnail, pixel shuffle, a tower with CLS."""
    torch.manual_seed(0)
    tokenizer = internvl_tokenizer()
    processor = without_videos(transformers.InternVLProcessor)(
        image_processor=transformers.GotOcr2ImageProcessorPil(
            size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4
        ),
        tokenizer=tokenizer,
        video_processor=None,
        image_seq_length=16,
        chat_template=INTERNVL,
    )
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=(56, 56),
            patch_size=(7, 7),
        ),
        text_config=_text(tokenizer, hidden, transformers.Qwen2Config, layers),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    return _finish("internvl", transformers.InternVLForConditionalGeneration(config), processor)


def smolvlm(hidden: int = 32, layers: int = 3, *, idefics3: bool = False) -> Tiny:
    """SmolVLM2 or Idefics3: tiles of 4 x 4 tokens between texts, the whole picture last."""
    torch.manual_seed(0)
    tokenizer = smolvlm_tokenizer(tile_tokens=not idefics3)
    sizes: dict[str, Any] = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 48}}
    processor: Any
    if idefics3:
        processor = transformers.Idefics3Processor(
            transformers.Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=16, chat_template=SMOLVLM
        )
    else:
        processor = without_videos(SmolVLMProcessor)(
            transformers.SmolVLMImageProcessorPil(**sizes), tokenizer, None, image_seq_len=16, chat_template=SMOLVLM
        )
    vision = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 48,
        "patch_size": 6,
    }
    kind = transformers.Idefics3Config if idefics3 else transformers.SmolVLMConfig
    config = kind(
        vision_config=vision,
        text_config=_text(tokenizer, hidden, layers=layers),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model: Any = transformers.Idefics3ForConditionalGeneration if idefics3 else None
    model = model or transformers.SmolVLMForConditionalGeneration
    return _finish("idefics3" if idefics3 else "smolvlm", model(config), processor)


def mistral3(hidden: int = 32, layers: int = 3, *, pixtral: bool = False) -> Tiny:
    """Mistral 3: dynamic resolution, 2 x 2 merging, row breaks; Pixtral is a LLaVA with the same tower."""
    torch.manual_seed(0)
    tokenizer = mistral_tokenizer()
    merge = 1 if pixtral else 2
    processor = processor_class("pixtral", "PixtralProcessor")(
        image_processor=transformers.PixtralImageProcessorPil(
            size={"longest_edge": 56 if pixtral else 98}, patch_size=7
        ),
        tokenizer=tokenizer,
        patch_size=7,
        spatial_merge_size=merge,
        chat_template=MISTRAL_3,
    )
    vision = transformers.PixtralVisionConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=98,
        patch_size=7,
    )
    common: dict[str, Any] = {
        "vision_config": vision,
        "text_config": _text(tokenizer, hidden, transformers.MistralConfig, layers),
        "image_token_id": tokenizer.convert_tokens_to_ids("[IMG]"),
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    }
    if pixtral:
        config = transformers.LlavaConfig(**common, vision_feature_select_strategy="full")
        return _finish("pixtral", transformers.LlavaForConditionalGeneration(config), processor)
    config = transformers.Mistral3Config(**common, spatial_merge_size=2)
    return _finish("mistral3", transformers.Mistral3ForConditionalGeneration(config), processor)


def gemma3(hidden: int = 32, layers: int = 3, window: int = 1024, *, newlines: int = 1) -> Tiny:
    """Gemma 3: 5 x 5 tokens of 4 x 4 patches, sliding layers and a full one, images bidirectional."""
    torch.manual_seed(0)
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = gemma_tokenizer(["<start_of_turn>", "<end_of_turn>", *named.values()], named)
    # Lines between paragraphs are tokens of their own in the family's vocabulary; vLLM's processor looks for them.
    tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in range(2, newlines + 1)])
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(size={"height": 120, "width": 120}),
        tokenizer,
        chat_template=GEMMA_3,
        image_seq_length=25,
    )
    text = _text(tokenizer, hidden, transformers.Gemma3TextConfig, layers)
    text.update(
        {
            "sliding_window": window,
            "query_pre_attn_scalar": hidden // 4,
            "layer_types": ["sliding_attention", *["full_attention"] * (layers - 2), "sliding_attention"],
        }
    )
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=_siglip(120, 6, hidden),
        mm_tokens_per_image=25,
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        image_token_index=ids("<image_soft_token>"),
        tie_word_embeddings=False,
    )
    return _finish("gemma3", transformers.Gemma3ForConditionalGeneration(config), processor)


def gemma4(hidden: int = 32, layers: int = 3, window: int = 512, *, large: bool = False) -> Tiny:
    """Gemma 4: up to 70 tokens of 3 x 3 patches. Small: per-layer inputs and a layer that shares keys; large: images
    bidirectional in sliding layers.
    """
    torch.manual_seed(0)
    named = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
    tokenizer = gemma_tokenizer(["<|turn>", "<turn|>", "<|video|>", *named.values()], named)
    processor = processor_class("gemma4", "Gemma4Processor")(
        feature_extractor=None,
        image_processor=transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=GEMMA_4,
        image_seq_length=70,
    )
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "global_head_dim": hidden // 2,
        "sliding_window": window,
        "layer_types": ["sliding_attention", *["full_attention"] * (layers - 1)],
        "vocab_size_per_layer_input": len(tokenizer),
        "hidden_size_per_layer_input": 0 if large else 8,
        "num_kv_shared_layers": 0 if large else 1,
        "use_bidirectional_attention": "vision" if large else None,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    vision = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": hidden // 2,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 256,
    }
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        boi_token_id=ids("<|image>"),
        eoi_token_id=ids("<image|>"),
        image_token_id=ids("<|image|>"),
        video_token_id=ids("<|video|>"),
        audio_token_id=ids("<|audio|>"),
        tie_word_embeddings=False,
    )
    return _finish("gemma4", transformers.Gemma4ForConditionalGeneration(config), processor)


def llava_onevision(hidden: int = 32, layers: int = 3, tiles: int = 4) -> Tiny:
    """LLaVA-OneVision: views of 5 x 5 tokens, a canvas of more than ``tiles`` tiles resized, SigLIP, Qwen2."""
    torch.manual_seed(0)
    tokenizer = onevision_tokenizer()
    size = 70
    pinpoints = [[rows * size, columns * size] for rows in (1, 2, 3) for columns in (1, 2, 3)]
    processor = without_videos(transformers.LlavaOnevisionProcessor)(
        image_processor=transformers.LlavaOnevisionImageProcessorPil(
            size={"height": size, "width": size}, image_grid_pinpoints=pinpoints
        ),
        tokenizer=tokenizer,
        video_processor=None,
        num_image_tokens=25,
        vision_feature_select_strategy="full",
        chat_template=ONEVISION,
        vision_aspect_ratio=f"anyres_max_{tiles}",
    )
    config = transformers.LlavaOnevisionConfig(
        vision_config=_siglip(size, 14, hidden),
        text_config=_text(tokenizer, hidden, transformers.Qwen2Config, layers),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio=f"anyres_max_{tiles}",
        tie_word_embeddings=False,
    )
    return _finish("llava_onevision", transformers.LlavaOnevisionForConditionalGeneration(config), processor)


BUILDERS = {
    "internvl": internvl,
    "smolvlm": smolvlm,
    "idefics3": functools.partial(smolvlm, idefics3=True),
    "mistral3": mistral3,
    "pixtral": functools.partial(mistral3, pixtral=True),
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_large": functools.partial(gemma4, large=True),
    "llava_onevision": llava_onevision,
}

TILES = ("internvl", "smolvlm", "mistral3", "gemma3", "gemma4", "llava_onevision")
"""One model per family."""

VARIANTS = ("idefics3", "pixtral", "gemma4_large")
"""Model types and sizes with the adapter of one of those families."""

READY_MASKS = ("gemma3", "gemma4")
"""Families whose language model is given ready masks."""
