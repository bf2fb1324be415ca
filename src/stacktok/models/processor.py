"""A checkpoint's processor, for images alone where torchvision is not installed.

Without torchvision, transformers refuses the processors of most families: some insist on a video processor, and those
of Mistral 3 and Gemma 4 cannot be imported at all. Images need none of it.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from stacktok.models.registry import adapter_for

# Of this family's processor only the checkpoint's own files know the class.
_CLASSES = {"glm_ocr": "Glm46VProcessor"}


def load_processor(name: str, config: Any) -> Any:
    """The processor of a checkpoint; without torchvision it takes no videos.

    Parameters
    ----------
    name
        Folder or hub name.
    config
        The model's configuration.
    """
    # The library's own annotations cover a part of what is called here.
    transformers: Any = import_module("transformers")
    if not import_module("transformers.utils").is_torchvision_available():
        kind = images_class(config)
        if kind is not None:
            return kind.from_pretrained(name, trust_remote_code=False)
    return transformers.AutoProcessor.from_pretrained(name, trust_remote_code=False)


def images_class(config: Any) -> Any:
    """The class of a processor for images alone; None where the family's own needs no torchvision."""
    tower = getattr(getattr(config, "vision_config", None), "model_type", None)
    if config.model_type == "gemma4" or tower == "pixtral":
        own: Any = import_module("stacktok.models.image_processors")
        return own.layout_processor(config, adapter_for(SimpleNamespace(config=config)))
    transformers: Any = import_module("transformers")
    names: Any = import_module("transformers.models.auto.processing_auto").PROCESSOR_MAPPING_NAMES
    kind = getattr(transformers, _CLASSES.get(config.model_type) or names.get(config.model_type) or "", None)
    return without_videos(kind) if kind is not None and "video_processor" in kind.get_attributes() else None


def without_videos(parent: Any) -> Any:
    """A processor's class without its video half, under the same name, so that what it saves loads again.

    Parameters
    ----------
    parent
        A class whose constructor takes the video processor third.
    """
    mixin: Any = import_module("transformers").ProcessorMixin

    class ImagesOnly(parent):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            # SmolVLM's constructor has no default for it.
            return [*super()._get_arguments_from_pretrained(*args, **kwargs), None]

        def __call__(self, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any) -> Any:
            if videos is not None:
                raise ValueError(
                    "videos need torchvision, which is not installed; pip install torchvision, or give "
                    f"{parent.__name__} images"
                )
            return super().__call__(images=images, text=text, **kwargs)

        def apply_chat_template(self, conversation: Any, chat_template: Any = None, **kwargs: Any) -> Any:
            # SmolVLM's own asks the video processor for its settings.
            return mixin.apply_chat_template(self, conversation, chat_template, **kwargs)

    ImagesOnly.__name__ = parent.__name__
    return ImagesOnly
