"""The model card of an export: what was trained, on what, how it was proven, and what was not.

Written from the run folder alone, of the checkpoint that is exported: a figure of another step has
no place in it. Paths of a machine and what an address may hide are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmpack.addresses import redacted
from vlmpack.data.loading.ledger import Ledger
from vlmpack.errors import RunDirError
from vlmpack.evaluation.metrics import written_metrics
from vlmpack.recipe.identity import MAY_GROW
from vlmpack.training.metrics import read_rows, validations
from vlmpack.training.record import read_launches
from vlmpack.training.record_history import standing_batches
from vlmpack.training.run_dir import RunDir
from vlmpack.words import counted

CARD = "README.md"
RUN_KEY = "vlmpack_run"
"""Field of a card's head: which run the model is of, as `run_key` tells them apart."""
_FOLDERS = re.compile(r"(?<![\w:/.~])~?/(?:[^/\s'\",\]}]+/)+")
"""What stands before the last name of an absolute path."""


def card_of(run_dir: RunDir, model: Path, recipe: str, *, adapter: bool, step: int) -> str:
    """The text of README.md for the hub.

    Args:
        run_dir: of the run; what it lacks is said to be missing.
        model: the folder that the run began with.
        recipe: its text, resolved.
        adapter: whether the folder holds adapters alone.
        step: optimizer steps taken at the checkpoint that is exported.
    """
    result = run_dir.figures()
    base = model.name
    parts = [
        *_front(run_dir, model, adapter=adapter),
        f"# {run_dir.path.resolve().name}",
        "",
        f"{'Adapters for' if adapter else 'Finetuned from'} `{base}` with "
        f"vlmpack {_version(result)}on packed sequences. {_which(result, step)}",
        "",
        "## Figures",
        "",
        *_figures(read_rows(run_dir.metrics), result, step),
        "## Proof",
        "",
        *_verified(run_dir),
        *_audited(run_dir, step),
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


def run_key(run_dir: RunDir) -> str:
    """Tells runs apart, by what decides what is learned and by the weights that training began
    with. A run that is made longer keeps its own."""
    identity = {
        name: value for name, value in _json(run_dir.identity).items() if name not in MAY_GROW
    }
    text = json.dumps([identity, _json(run_dir.model).get("weights")], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _front(run_dir: RunDir, model: Path, *, adapter: bool) -> Iterator[str]:
    """What the hub reads, and the next push."""
    images = "vision_config" in _json(model / "config.json")
    yield "---"
    yield f"base_model: {json.dumps(model.name)}"
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    yield f"pipeline_tag: {'image-text-to-text' if images else 'text-generation'}"
    yield "tags:"
    yield from (f"- {tag}" for tag in ("vlmpack", *(("lora",) if adapter else ())))
    yield f"{RUN_KEY}: {json.dumps(run_key(run_dir))}"
    yield "---"
    yield ""


def _version(result: Mapping[str, Any]) -> str:
    version = (result.get("versions") or {}).get("vlmpack")
    return f"{version} " if version else ""


def _which(result: Mapping[str, Any], step: int) -> str:
    """Whose weights these are, in a sentence."""
    if not result:
        end = "; the run has no `result.json`: it is not at its end"
    elif result.get("steps") == step:
        end = ", its last one"
    else:
        end = f" of {result.get('steps', 0):,}"
    best = result.get("best") or {}
    is_best = best.get("step") == step and best.get("value") is not None
    what = f", the best one by `{best['figure']}`" if is_best else ""
    return f"The weights are those of step {step:,}{end}{what}."


def _figures(
    rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any], step: int
) -> Iterator[str]:
    """What was trained up to a step, and what its own evaluations found."""
    yield "| | |"
    yield "|---|---|"
    yield f"| optimizer steps | {step:,} |"
    for name, value in _trained(rows, result, step).items():
        if isinstance(value, int | float):
            yield f"| {name} | {value:,} |"
    mine, before = [row for row in rows if row["step"] == step], written_metrics(result, "before")
    is_after = result.get("exported_step", result.get("steps")) == step
    shares = written_metrics(result, "after") if is_after else {}
    shares |= {
        name.removeprefix("answers_"): value
        for row in mine
        for name, value in row.items()
        if name.startswith("answers_") and isinstance(value, int | float)
    }
    for name, value in shares.items():
        was = f" (before: {before[name]:.1%})" if name in before else ""
        yield f"| {name} | {value:.1%}{was} |"
    validated = [result.get("validation_after") or {}, *validations(mine)]
    losses = [found["loss"] for found in validated if found.get("step") == step]
    if losses:
        yield f"| validation loss | {losses[-1]:.4f} |"
    yield ""
    if not shares and not losses:
        yield "This step was not evaluated: it has no validation loss, and answered no questions."
        yield ""


def _trained(
    rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any], step: int
) -> dict[str, Any]:
    """Counts up to a step: the result's of the last one, else sums over metrics.jsonl; of a
    metrics.jsonl with gaps none."""
    names = ("samples", "real tokens", "slots of padded rows", "real tokens a second")
    if result.get("steps") == step:
        keys = ("samples", "real_tokens", "padded_tokens", "tokens_per_second")
        return {name: result.get(key) for name, key in zip(names, keys, strict=True)}
    taken = [row for row in rows if "loss" in row and row["step"] <= step]
    if not taken or len(taken) < step:
        return {}
    keys = ("num_samples", "num_tokens", "num_padded_slots", "seconds")
    samples, tokens, slots, seconds = (sum(row[key] for row in taken) for key in keys)
    counts = (samples, tokens, slots, round(tokens / max(1e-9, seconds), 1))
    return dict(zip(names, counts, strict=True))


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


def _audited(run_dir: RunDir, step: int) -> Iterator[str]:
    """What `vlmpack data audit` found, or that nobody asked it and what the record alone says."""
    found = _json(run_dir.audit)
    epochs, problems = found.get("epochs"), found.get("problems")
    if isinstance(epochs, list) and isinstance(problems, list):
        yield _proven(found, step)
        yield ""
        yield "| epoch | " + " | ".join(_COUNTED) + " |"
        yield "|---" * (len(_COUNTED) + 1) + "|"
        for epoch in epochs:
            yield f"| {epoch['epoch']} | {' | '.join(f'{epoch[name]:,}' for name in _COUNTED)} |"
    else:
        yield "Not audited (`vlmpack data audit RUN`, before the export)."
        yield _recorded(run_dir, step)
    yield ""
    lines = [line["batch"] for line in Ledger(run_dir.data_errors).lines()]
    left_out = sum(batch is None or batch < step for batch in lines)
    yield f"Samples that were left out: {left_out:,} lines in `data-errors.jsonl` up to this step."
    yield ""


_COUNTED = ("planned", "trained", "skipped", "pending", "lost")
"""Numbers of samples of an epoch, by an audit."""


def _proven(found: Mapping[str, Any], step: int) -> str:
    batches = counted(found["batches"], "global batch", "global batches")
    what = f"`vlmpack data audit`, of the run's first {batches}"
    if found["problems"]:
        number, first = counted(found["num_problems"], "problem"), found["problems"][0]
        return f"{what}: NOT PROVEN, {number}. The first: {_without_places(first)}"
    after = "" if found["batches"] >= step else f" Those up to step {step:,} were not looked at."
    return f"{what}: proven, every draw of an epoch was trained once, or is accounted for.{after}"


def _recorded(run_dir: RunDir, step: int) -> str:
    """What the run wrote down of its samples up to a step, in a sentence; nothing is compared."""
    batches = samples = 0
    try:
        launches = read_launches(run_dir.samples) if run_dir.samples.is_dir() else []
        for recorded in standing_batches(run_dir.samples, launches) if launches else ():
            if recorded.batch < step:
                batches, samples = batches + 1, samples + len(recorded.trained)
    except RunDirError as error:
        return f"The run's own record of samples cannot be read: {_without_places(str(error))}."
    if not batches:
        return "The run has no record of samples."
    of = counted(batches, "global batch", "global batches")
    return f"The run's own record has {of} up to this step, with {counted(samples, 'sample')}."


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
