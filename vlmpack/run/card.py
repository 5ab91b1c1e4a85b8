"""The model card of an export: what was trained, on what, how it was proven, and what was not.

The card uses the run folder alone, as of the exported checkpoint. Figures of other steps, values
that are no numbers, local paths and secrets in addresses are left out. Names and messages are
escaped, so that none is read as Markdown, HTML or YAML.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from vlmpack.data.loading.ledger import Ledger
from vlmpack.errors import RunDirError
from vlmpack.evaluation.metrics import written_metrics
from vlmpack.file_format import AUDIT, FORMAT, VERIFICATION
from vlmpack.recipe.show import PublicRecipe
from vlmpack.terminal import printable
from vlmpack.training.metrics import answered, read_rows, validations
from vlmpack.training.record import read_launches, standing_batches
from vlmpack.training.run_dir import RunDir
from vlmpack.whole_file import read_json
from vlmpack.words import counted

CARD = "README.md"
RUN_KEY = "vlmpack_run"
"""Field of a card's head: which run the model is of, by its `RunDir.run_id`."""


def card_of(
    run_dir: RunDir,
    model: Path,
    recipe: PublicRecipe,
    *,
    adapter: bool,
    step: int,
    base: str | None = None,
) -> str:
    """The text of README.md for the hub.

    Args:
        step: optimizer steps taken at the checkpoint that is exported.
        base: what the model is called on the hub; None where that is not known, and the folder's
            own name stands for it.
    """
    result = run_dir.figures()
    base = base or model.name
    fence = _ticks(recipe.text, 3)
    parts = [
        *_front(run_dir, model, base, adapter=adapter),
        f"# {_text(run_dir.path.resolve().name)}",
        "",
        f"{'Adapters for' if adapter else 'Finetuned from'} {_code(base)} with "
        f"vlmpack {_version(result)}on packed sequences. {_which(result, step)}",
        "",
        "## Figures",
        "",
        *_figures(read_rows(run_dir.metrics), result, step),
        "## Proof",
        "",
        *_verified(run_dir),
        *_audited(run_dir, recipe, step),
        "## Use",
        "",
        *_use(adapter),
        "## Recipe",
        "",
        f"{fence}yaml",
        *recipe.text.rstrip().splitlines(),
        fence,
        "",
    ]
    return "\n".join(parts)


def _front(run_dir: RunDir, model: Path, base: str, *, adapter: bool) -> Iterator[str]:
    """The metadata that the hub and the next push read."""
    images = "vision_config" in _json(model / "config.json")
    yield "---"
    yield f"base_model: {_quoted(base)}"
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    yield f"pipeline_tag: {'image-text-to-text' if images else 'text-generation'}"
    yield "tags:"
    yield from (f"- {tag}" for tag in ("vlmpack", *(("lora",) if adapter else ())))
    yield f"{RUN_KEY}: {_quoted(run_dir.run_id())}"
    yield "---"
    yield ""


def _version(result: Mapping[str, Any]) -> str:
    version = _mapping(result.get("versions")).get("vlmpack")
    return f"{_text(version)} " if version else ""


def _which(result: Mapping[str, Any], step: int) -> str:
    """Whose weights these are, in a sentence."""
    steps = result.get("steps")
    if not result:
        end = "; the run has no `result.json`: it is not at its end"
    elif steps == step:
        end = ", its last one"
    else:
        end = f" of {steps:,}" if _is_number(steps) else ""
    best = _mapping(result.get("best"))
    is_best = best.get("step") == step and best.get("value") is not None
    what = f", the best one by {_code(best.get('figure'))}" if is_best else ""
    return f"The weights are those of step {step:,}{end}{what}."


def _figures(
    rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any], step: int
) -> Iterator[str]:
    """What was trained up to a step, and what its own evaluations found."""
    yield "| | |"
    yield "|---|---|"
    yield f"| optimizer steps | {step:,} |"
    for name, value in _trained(rows, result, step).items():
        if _is_number(value):
            yield f"| {name} | {value:,} |"
    mine, before = [row for row in rows if row["step"] == step], written_metrics(result, "before")
    is_after = result.get("exported_step", result.get("steps")) == step
    shares = written_metrics(result, "after") if is_after else {}
    for row in mine:
        shares |= answered(row)
    for name, value in shares.items():
        was = f" (before: {before[name]:.1%})" if name in before else ""
        yield f"| {_text(name)} | {value:.1%}{was} |"
    validated = [_mapping(result.get("validation_after")), *validations(mine)]
    of_step = [each.get("loss") for each in validated if each.get("step") == step]
    losses = [loss for loss in of_step if _is_number(loss)]
    if losses:
        yield f"| validation loss | {losses[-1]:.4f} |"
    yield ""
    if not shares and not losses:
        yield "This step was not evaluated: it has no validation loss, and answered no questions."
        yield ""


def _trained(
    rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any], step: int
) -> dict[str, Any]:
    """Counts up to a step, from the result or metrics.jsonl; empty if rows are missing."""
    names = ("samples", "real tokens", "slots of padded rows", "real tokens a second")
    if result.get("steps") == step:
        keys = ("samples", "real_tokens", "padded_tokens", "tokens_per_second")
        return {name: result.get(key) for name, key in zip(names, keys, strict=True)}
    taken = [row for row in rows if "loss" in row and row["step"] <= step]
    if not taken or len(taken) < step:
        return {}
    keys = ("num_samples", "num_tokens", "num_padded_slots", "seconds")
    if not all(_is_number(row.get(key)) for row in taken for key in keys):
        return {}
    samples, tokens, slots, seconds = (sum(row[key] for row in taken) for key in keys)
    counts = (samples, tokens, slots, round(tokens / max(1e-9, seconds), 1))
    return dict(zip(names, counts, strict=True))


def _verified(run_dir: RunDir) -> Iterator[str]:
    values = _json(run_dir.verify / "verify.json")
    checks = values.get("checks")
    refusal = VERIFICATION.refusal(values.get(FORMAT), "its `verify.json`") if values else None
    if refusal or not isinstance(checks, list) or not checks:
        why = f"{refusal}; " if refusal else ""
        yield f"Not verified with the run ({why}`training.verify`, or `vlmpack verify`)."
        yield ""
        return
    yield "`vlmpack verify`, packed samples against the stock model one by one:"
    yield ""
    yield "| what | status | measured | bound |"
    yield "|---|---|---|---|"
    for check in map(_mapping, checks):
        measured, bound = (_number(check.get(key)) for key in ("measured", "bound"))
        name, status = (_text(check.get(key)) for key in ("name", "status"))
        yield f"| {name} | {status} | {measured} | {bound} |"
    yield ""


def _audited(run_dir: RunDir, recipe: PublicRecipe, step: int) -> Iterator[str]:
    """The result of `vlmpack data audit`; without an audit, the content of the record alone."""
    values = _json(run_dir.audit)
    if values.get(FORMAT) == AUDIT.number and _is_audit(values):
        yield _proven(values, recipe, step)
        yield ""
        yield "| epoch | " + " | ".join(_COUNTED) + " |"
        yield "|---" * (len(_COUNTED) + 1) + "|"
        for epoch in values["epochs"]:
            yield f"| {epoch['epoch']} | {' | '.join(f'{epoch[name]:,}' for name in _COUNTED)} |"
    else:
        refusal = AUDIT.refusal(values.get(FORMAT), "its `audit.json`") if values else None
        why = f"{refusal or 'its `audit.json` is damaged'}; " if run_dir.audit.exists() else ""
        yield f"Not audited ({why}`vlmpack data audit RUN`, before the export)."
        yield _recorded(run_dir, recipe, step)
    yield ""
    lines = [line["batch"] for line in Ledger(run_dir.data_errors).lines()]
    left_out = sum(batch is None or batch < step for batch in lines)
    yield f"Samples that were left out: {left_out:,} lines in `data-errors.jsonl` up to this step."
    yield ""


_COUNTED = ("planned", "trained", "skipped", "pending", "lost")
"""Numbers of samples of an epoch, by an audit."""


def _is_audit(values: Mapping[str, Any]) -> bool:
    epochs, problems = values.get("epochs"), values.get("problems")
    if not isinstance(epochs, list) or not isinstance(problems, list):
        return False
    counts = ([_mapping(epoch).get(name) for name in ("epoch", *_COUNTED)] for epoch in epochs)
    return all(map(_is_number, chain((values.get("batches"), values.get("num_problems")), *counts)))


def _proven(values: Mapping[str, Any], recipe: PublicRecipe, step: int) -> str:
    batches = counted(values["batches"], "global batch", "global batches")
    what = f"`vlmpack data audit`, of the run's first {batches}"
    if number := max(values["num_problems"], len(values["problems"])):
        said = f"{what}: NOT PROVEN, {counted(number, 'problem')}."
        first = [_text(recipe.without_places(str(problem))) for problem in values["problems"][:1]]
        return said + "".join(f" The first: {problem}" for problem in first)
    after = "" if values["batches"] >= step else f" Those up to step {step:,} were not looked at."
    return f"{what}: proven, every draw of an epoch was trained once, or is accounted for.{after}"


def _recorded(run_dir: RunDir, recipe: PublicRecipe, step: int) -> str:
    """What the run recorded of its samples up to a step, in a sentence."""
    batches = samples = 0
    try:
        launches = read_launches(run_dir.samples) if run_dir.samples.is_dir() else []
        for recorded in standing_batches(run_dir.samples, launches) if launches else ():
            if recorded.batch < step:
                batches, samples = batches + 1, samples + len(recorded.trained)
    except RunDirError as error:
        why = _text(recipe.without_places(str(error)))
        return f"The run's own record of samples cannot be read: {why}."
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


_MARKUP = re.compile(r"[\\`*\[\]<>#|~&$]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown, GitHub's tables and formulas of the hub read as more than text."""


def _text(value: object) -> str:
    """Anything as text on one line of Markdown, where it means itself."""
    return _MARKUP.sub(r"\\\g<0>", printable(" ".join(str(value).split())))


def _code(value: object) -> str:
    """Anything as a code span."""
    text = printable(" ".join(str(value).split()))
    pad = " " if text[:1] == "`" or text[-1:] == "`" else ""
    ticks = _ticks(text, 1)
    return f"{ticks}{pad}{text}{pad}{ticks}"


def _ticks(text: str, least: int) -> str:
    """More backticks than any row of them in a text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _quoted(text: str) -> str:
    return str(yaml.safe_dump(printable(text), default_style='"', width=math.inf)).strip()


def _number(value: object) -> str:
    return f"{value:.1e}" if _is_number(value) else ""


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = read_json(path)
    except (OSError, ValueError):
        return {}
    return values


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def is_hub_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def hub_name_of(folder: Path) -> str | None:
    """OWNER/NAME of a folder in huggingface_hub's cache (`models--OWNER--NAME/snapshots/...`)."""
    snapshots = folder.absolute().parent
    kind, *parts = snapshots.parent.name.split("--")
    if snapshots.name != "snapshots" or kind != "models" or len(parts) != 2:
        return None
    return "/".join(parts)
