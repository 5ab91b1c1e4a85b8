"""Model folders that want their own code run; every payload leaves a marker where it ran."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.shards import TINY_MODEL


class _Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def marker_of(folder: Path) -> Path:
    """Where a folder's payloads leave their mark."""
    return folder.with_name(f"{folder.name}-ran")


def say(folder: Path, name: str, **values: Any) -> None:
    """Put entries into a JSON file of a folder; None takes one out."""
    path = folder / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    content |= values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def _everything(code: str) -> dict[str, Any]:
    autos = (
        "AutoConfig",
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoModelForImageTextToText",
        "AutoProcessor",
        "AutoImageProcessor",
        "AutoFeatureExtractor",
    )
    return {**dict.fromkeys(autos, code), "AutoTokenizer": [code, code]}


CODE = "payload.Payload"
MAP = _everything(CODE)


def _custom_generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "payload.py", folder / "custom_generate" / "generate.py")


def _pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(marker_of(folder))))


def _listed_pickle(folder: Path) -> None:
    _pickled_weights(folder)
    listed = {"weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))


def _adapter(folder: Path) -> None:
    say(
        folder,
        "adapter_config.json",
        peft_type="LORA",
        base_model_name_or_path=str(folder),
        auto_mapping={"parent_library": "payload", "base_model_class": "Payload"},
    )
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(_Touch(marker_of(folder))))


def _images(**values: Any) -> Callable[[Path], None]:
    return lambda folder: say(folder, "preprocessor_config.json", **values)


def _tokens(**values: Any) -> Callable[[Path], None]:
    return lambda folder: say(folder, "tokenizer_config.json", **values)


def _nested_processor(folder: Path) -> None:
    say(folder, "processor_config.json", auto_map=MAP, processor_class="Payload")
    say(folder, "preprocessor_config.json", image_processor_type="AutoProcessor")


def _nested_section(folder: Path) -> None:
    images = {"image_processor_type": "Payload", "auto_map": MAP}
    say(folder, "processor_config.json", image_processor=images)
    (folder / "preprocessor_config.json").unlink()


def _nested_tokenizer(folder: Path) -> None:
    say(folder, "processor_config.json", auto_map=MAP, processor_class="Payload")
    say(folder, "tokenizer_config.json", tokenizer_class="AutoProcessor")
    say(folder, "config.json", tokenizer_class="AutoProcessor")


PAYLOADS: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "the config's own classes": (lambda f: say(f, "config.json", auto_map=MAP), False),
    "an unknown model type": (
        lambda f: say(f, "config.json", auto_map=MAP, model_type="payload"),
        True,
    ),
    "an unknown image processor": (
        _images(auto_map=MAP, image_processor_type="Payload", processor_class=None),
        True,
    ),
    "an image processor of the Hub": (
        _images(auto_map=_everything(f"them/there--{CODE}"), image_processor_type="Payload"),
        True,
    ),
    "an image processor of both backends": (
        _images(auto_map={"AutoImageProcessor": [CODE, CODE]}, image_processor_type="Payload"),
        True,
    ),
    "a feature extractor": (
        _images(
            auto_map={"AutoFeatureExtractor": CODE},
            image_processor_type=None,
            feature_extractor_type="Payload",
        ),
        True,
    ),
    "a section of the processor's file": (_nested_section, True),
    "a processor inside the image processor": (_nested_processor, True),
    "the known image processor's own class": (_images(auto_map=MAP), False),
    "the tokenizer's own class": (_tokens(auto_map=MAP), False),
    "an unknown tokenizer": (_tokens(auto_map=MAP, tokenizer_class="Payload"), False),
    "a processor inside the tokenizer": (_nested_tokenizer, True),
    "a generate function": (_custom_generate, False),
    "pickled weights": (_pickled_weights, True),
    "pickled weights in the index": (_listed_pickle, True),
    "adapters": (_adapter, True),
    "a kernel of the Hub": (
        lambda f: say(f, "config.json", attn_implementation="kernels-community/flash-attn"),
        True,
    ),
}
"""What is put into a copy of the tiny model, and whether the folder must be refused for it; the
others have a class of transformers' own, which must be used."""


def payload_folder(folder: Path, name: str) -> Path:
    """A copy of the tiny model with one payload in it."""
    shutil.copytree(TINY_MODEL, folder)
    plant(folder, name)
    return folder


def plant(folder: Path, name: str) -> None:
    """Put a payload into a folder."""
    (folder / "payload.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(marker_of(folder))!r}).touch()\n\n\n"
        "class Payload:\n"
        "    @classmethod\n"
        "    def from_pretrained(cls, *_, **__):\n"
        "        return cls()\n\n"
        "    @classmethod\n"
        "    def register_for_auto_class(cls, *_, **__):\n"
        "        pass\n\n\n"
        "def generate(*_, **__):\n"
        "    pass\n"
    )
    PAYLOADS[name][0](folder)
