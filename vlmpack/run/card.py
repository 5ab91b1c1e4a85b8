"""The model card of an export: what was trained, on what, how it was proven, and what was not.

Written from the run folder alone. Paths of a machine and what an address may hide are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmpack.addresses import redacted
from vlmpack.evaluation.metrics import written_metrics
from vlmpack.training.run_dir import RunDir

CARD = "README.md"
_FOLDERS = re.compile(r"(?<![\w:/.~])~?/(?:[^/\s'\",\]}]+/)+")
"""What stands before the last name of an absolute path."""


def card_of(run_dir: RunDir, model: Path, recipe: str, *, adapter: bool) -> str:
    """The text of README.md for the hub.

    Args:
        run_dir: of the run; what it lacks is said to be missing.
        model: the folder that the run began with.
        recipe: its text, resolved.
        adapter: whether the folder holds adapters alone.
    """
    result = _json(run_dir.result)
    base = model.name
    parts = [
        *_front(model, adapter=adapter),
        f"# {run_dir.path.resolve().name}",
        "",
        f"{'Adapters for' if adapter else 'Finetuned from'} `{base}` with "
        f"vlmpack {_version(result)}on packed sequences.",
        "",
        "## Figures",
        "",
        *_figures(result),
        "## Proof",
        "",
        *_verified(run_dir),
        *_audited(run_dir),
        "## Use",
        "",
        *_use(adapter),
        "## Recipe",
        "",
        "```yaml",
        *_without_places(recipe).rstrip().splitlines(),
        "```",
        "",
    ]
    return "\n".join(parts)


def _front(model: Path, *, adapter: bool) -> Iterator[str]:
    """What the hub reads."""
    images = "vision_config" in _json(model / "config.json")
    yield "---"
    yield f"base_model: {json.dumps(model.name)}"
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    yield f"pipeline_tag: {'image-text-to-text' if images else 'text-generation'}"
    yield "tags:"
    yield from (f"- {tag}" for tag in ("vlmpack", *(("lora",) if adapter else ())))
    yield "---"
    yield ""


def _version(result: Mapping[str, Any]) -> str:
    version = (result.get("versions") or {}).get("vlmpack")
    return f"{version} " if version else ""


def _figures(result: Mapping[str, Any]) -> Iterator[str]:
    if not result:
        yield "The run has no `result.json`: it is not at its end."
        yield ""
        return
    rows = {
        "optimizer steps": result.get("steps"),
        "real tokens": result.get("real_tokens"),
        "slots of padded rows": result.get("padded_tokens"),
        "real tokens a second": result.get("tokens_per_second"),
    }
    before, after = written_metrics(result, "before"), written_metrics(result, "after")
    validation = result.get("validation_after") or {}
    yield "| | |"
    yield "|---|---|"
    for name, value in rows.items():
        if isinstance(value, int | float):
            yield f"| {name} | {value:,} |"
    for name, value in after.items():
        was = f" (before: {before[name]:.1%})" if name in before else ""
        yield f"| {name} | {value:.1%}{was} |"
    if isinstance(validation.get("loss"), int | float):
        yield f"| validation loss | {validation['loss']:.4f} |"
    yield ""


def _verified(run_dir: RunDir) -> Iterator[str]:
    found = _json(run_dir.path / "verify" / "verify.json")
    checks = found.get("checks")
    if not isinstance(checks, list) or not checks:
        yield "Not verified with the run (`training.verify`, or `vlmpack verify`)."
        yield ""
        return
    yield "`vlmpack verify`, packed samples against the stock model one by one:"
    yield ""
    yield "| what | status | measured | bound |"
    yield "|---|---|---|---|"
    for check in checks:
        measured, bound = (_number(check.get(key)) for key in ("measured", "bound"))
        yield f"| {check.get('name')} | {check.get('status')} | {measured} | {bound} |"
    yield ""


def _audited(run_dir: RunDir) -> Iterator[str]:
    there = any(run_dir.samples.glob("*")) if run_dir.samples.is_dir() else False
    if there:
        yield "The run folder records which samples each step trained (`vlmpack data audit`)."
        yield ""
    errors = run_dir.data_errors
    lines = errors.read_text(encoding="utf-8").count("\n") if errors.is_file() else 0
    yield f"Samples that were left out: {lines:,} lines in `data-errors.jsonl`."
    yield ""


def _use(adapter: bool) -> Iterator[str]:
    yield "```"
    if adapter:
        yield "vllm serve BASE --enable-lora --lora-modules tuned=THIS_FOLDER"
    else:
        yield "vllm serve THIS_FOLDER"
        yield 'vlmpack generate --model THIS_FOLDER --image picture.jpg "What is this?"'
    yield "```"
    yield ""


def _without_places(text: str) -> str:
    """A recipe's text without this machine's folders and what addresses hide."""
    return _FOLDERS.sub("", redacted(text))


def _number(value: object) -> str:
    return f"{value:.1e}" if isinstance(value, int | float) else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
