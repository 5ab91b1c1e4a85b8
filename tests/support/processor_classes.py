"""A family's own processor class, without the video processor that torchvision is needed for."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from support.shards import RawSample
from transformers import AutoImageProcessor, AutoTokenizer


def processor_of(
    monkeypatch: Any, kind: type, folder: Path, *, tokens: dict[str, str] | None = None, **own: Any
) -> Any:
    """The processor class of a family on the files of a folder.

    Args:
        monkeypatch: lifts the check that there is a video processor, which images do not need.
        kind: the processor class.
        folder: with tokenizer and image processor.
        tokens: names of special tokens that the class asks the tokenizer for.
        own: settings of the class.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(folder), extra_special_tokens=tokens or {})
    monkeypatch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)
    images = AutoImageProcessor.from_pretrained(str(folder))
    return kind(images, tokenizer, None, chat_template=tokenizer.chat_template, **own)


def processed(processor: Any, sample: RawSample) -> Any:
    """A conversation as `apply_chat_template` of the class hands it on: its images nested."""
    text = processor.apply_chat_template(sample.messages, tokenize=False)
    images = [Image.open(BytesIO(data)).convert("RGB") for data in sample.images]
    return processor(text=[text], images=[images] if images else None, return_tensors="pt")
