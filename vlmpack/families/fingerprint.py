"""What decides tokens and pixels: the processor's files, taken apart for messages."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from vlmpack.model_folder.content import PROCESSOR_FILES


def processor_parts(folder: Path) -> dict[str, str]:
    """A digest each of a model folder's tokenizer, template and image processor.

    The template counts as one wherever it is kept: in a file of its own or in the tokenizer's.
    """
    parts = {"tokenizer": b"", "template": b"", "processor": b""}
    for name in PROCESSOR_FILES:
        path = folder / name
        data = path.read_bytes() if path.is_file() else b"-"
        if name == "tokenizer_config.json" and path.is_file():
            data, template = _without_template(data)
            parts["template"] += template
        if name.startswith("chat_template"):
            part = "template"
        else:
            part = "processor" if "processor" in name else "tokenizer"
        parts[part] += data + b"\0"
    return {name: digest(data) for name, data in parts.items()}


def digest(data: bytes) -> str:
    """16 hex digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _without_template(data: bytes) -> tuple[bytes, bytes]:
    """A tokenizer_config.json without its chat template, and the template."""
    try:
        config = json.loads(data)
        template = config.pop("chat_template", None)
    except (ValueError, AttributeError):
        return data, b""
    if template is None:
        return data, b""
    return json.dumps(config, sort_keys=True).encode(), json.dumps(template).encode()
