"""Converts an export with llama.cpp's converter, and says what the files hold in a line of JSON.

    python gguf_one.py CONVERTER EXPORT OUT

It runs in an environment of its own, where vlmpack is not installed. The converter knows
pre-tokenizers by a digest of what they do, and not that of a tiny tokenizer. So it is told one
here; for the tiny models that is all that is replaced.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any


def convert(converter: Path, export: Path, out: Path, *more: str) -> str | None:
    """Run the converter; what it says where it fails."""
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    sys.argv = ["convert", str(export), "--outfile", str(out), "--outtype", "f32", *more]
    try:
        runpy.run_path(str(converter / "convert_hf_to_gguf.py"), run_name="__main__")
    except SystemExit as error:
        return f"exit {error.code}" if error.code else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def held(path: Path) -> dict[str, Any]:
    """Tensors with their shapes, tokens and template of a file, by gguf's own reader."""
    from gguf import GGUFReader  # type: ignore[import-not-found]

    reader = GGUFReader(path)
    tokens = reader.get_field("tokenizer.ggml.tokens")
    template = reader.get_field("tokenizer.chat_template")
    return {
        "architecture": reader.get_field("general.architecture").contents(),
        "tensors": {t.name: [int(n) for n in t.shape] for t in reader.tensors},
        "tokens": tokens.contents() if tokens else None,
        "template": template.contents() if template else None,
    }


def main(converter: Path, export: Path, out: Path) -> None:
    """Convert the language model, and the tower where there is one."""
    sys.path[:0] = [str(converter), str(converter / "gguf-py")]
    found: dict[str, Any] = {}
    config = json.loads((export / "config.json").read_text(encoding="utf-8"))
    # For these it asks for prediction layers, which the tiny models have not.
    model = ("--no-mtp",) if config["model_type"].startswith("qwen3_5") else ()
    parts = (
        {"model": model, "tower": ("--mmproj",)} if "vision_config" in config else {"model": model}
    )
    for part, more in parts.items():
        path = out / f"{part}.gguf"
        failure = convert(converter, export, path, *more)
        found[part] = {"fails": failure} if failure else held(path)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*(Path(one) for one in sys.argv[1:4]))
