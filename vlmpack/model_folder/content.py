"""The content of a folder's files except its weights, by key, so that a difference can be named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmpack.whole_file import regular_bytes

PROCESSOR_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What decides the tokens of a sample; their bytes make the fingerprint, and exports copy them."""

LONGEST = 120
"""Characters of a value that is kept as it is; of a longer one its digest is."""

_IGNORED = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash")
"""Entries that decide nothing: who wrote a file, and where it lay."""

Content = dict[str, Any]
"""`config.json: vision_config.depth` -> its value."""


def config_content(folder: Path) -> Content:
    """The content of config.json, key by key."""
    return _content(folder / "config.json")


def generation_content(folder: Path) -> Content:
    """generation_config.json, which changes answers alone."""
    return _content(folder / "generation_config.json")


def processor_content(
    folder: Path, before: Mapping[str, Any], digests: Mapping[str, str]
) -> tuple[Content, dict[str, str]]:
    """Tokenizer, chat template and image processor, and a digest of each file's bytes.

    Args:
        before: earlier content, perhaps of another folder; empty for none.
        digests: digests of the earlier files. Unchanged files are not parsed again, which takes
            half a second for a tokenizer of 10 MB.
    """
    content: Content = {}
    now: dict[str, str] = {}
    for name in PROCESSOR_FILES:
        path = folder / name
        if not path.is_file():
            continue
        now[name] = _digest(regular_bytes(path))
        if digests.get(name) == now[name]:
            content |= {key: said for key, said in before.items() if key.startswith(name)}
        else:
            content |= _content(path)
    return content, now


def _content(path: Path) -> Content:
    """Empty for a file that is not there; one that is no JSON object counts as a text."""
    if not path.is_file():
        return {}
    data = regular_bytes(path)
    try:
        values = json.loads(data) if path.suffix == ".json" else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return {path.name: f"{len(data):,} bytes, digest {_digest(data)}"}
    flat: Content = {}
    if path.name == "tokenizer.json":
        flat |= _added_tokens(values.pop("added_tokens", None))
        values["model"] = _kept(values.get("model"))  # the vocabulary and its merges, as one
    flat |= {
        key: value for key, value in _flat("", values) if key.rpartition(".")[2] not in _IGNORED
    }
    return {f"{path.name}: {key}": value for key, value in flat.items()}


def _added_tokens(tokens: Any) -> Content:
    if not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
        return {"added_tokens": _kept(tokens)}
    return {f"added token {token.get('content')!r}": _kept(token) for token in tokens}


def _flat(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict) and value:
            yield from _flat(name, value)
        else:
            yield name, _kept(value)


def _kept(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    if len(text) <= LONGEST:
        return _same_number(value)
    # A JSON string may hold half a surrogate pair, which no other encoding takes.
    return f"{len(text):,} characters, digest {_digest(text.encode(errors='surrogatepass'))}"


def _same_number(value: Any) -> Any:
    """A number as a canonical value.

    10000.0 becomes 10000, since a config may be saved with either. NaN equals nothing, so it
    becomes a text.
    """
    if isinstance(value, list):
        return [_same_number(each) for each in value]
    if not isinstance(value, float):
        return value
    if value != value:
        return "NaN"
    return int(value) if value.is_integer() else value


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
