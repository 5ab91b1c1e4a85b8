"""The judge: what is run, in which order, and what each figure is compared with.

The collator gets copies of the samples. Writing into them is a finding, because a dataset in memory
returns the same samples in the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from vlmpack.errors import VlmpackError
from vlmpack.proof.judge.alone import (
    CPU,
    Alone,
    Place,
    Sample,
    alone_of,
    compute_alone,
    copied,
    locate,
    longest_start,
    on,
    require_model,
)
from vlmpack.proof.judge.computed import (
    Collate,
    Losses,
    NoBatchError,
    Run,
    Step,
    by_sample,
    changes_of,
    check_gradients,
    check_isolation,
    check_losses,
    check_mean,
)
from vlmpack.proof.judge.coordinates import check_coordinates
from vlmpack.proof.judge.findings import (
    Finding,
    Judgement,
    check_labels,
    check_padding,
    check_pixels,
    check_positions,
    failed,
)
from vlmpack.proof.measure import Check, full_float32
from vlmpack.words import raised


@full_float32()
def judge(
    model: Any,
    collate: Collate,
    samples: Sequence[Any],
    *,
    alone: Alone = alone_of,
    labels: Literal["unshifted", "shifted"] = "unshifted",
    losses: Losses | None = None,
    step: Step | None = None,
    change: Callable[[Any], Any] | None = None,
    stock: Any = None,
) -> Judgement:
    """Whether a batch that somebody's collator makes computes what its samples do alone.

    Args:
        model: a transformers model with its head, in float32, on any device. In other types losses
            and gradients are shown without a bound. It is judged without TF32 and in eval mode,
            batches are moved to its device, and its gradients are dropped.
        collate: a list of samples -> a batch of padded or packed rows. The batch is a mapping with
            `input_ids` (B, S), `labels` (B, S) and whatever else the model takes.
        samples: two or more, as `collate` takes them. Some have images if the model takes them.
        alone: a sample -> the model's own arguments for it, as a batch of one. By default samples
            are mappings of unbatched values, as transformers' collators take them.
        labels: `unshifted` as transformers has them (the model shifts), or `shifted`, where a
            label stands where it is predicted.
        losses: how the batch is computed. By default `model(**batch)`, and the cross entropy of its
            logits.
        step: what a trainer makes of several micro-batches, to see how it averages. With None, the
            model's own loss of one batch, if it returns one.
        change: a sample -> one of the same length with other contents, for the search for leaks.
            By default its ordinary tokens and pixels are changed.
        stock: computes each sample alone, by default `model`. Give one of the same class and
            weights if the attention of `model` was replaced. Its gradients are dropped.

    Returns:
        What was found; see `Judgement`.

    Raises:
        VlmpackError: `model` is no model, or there are fewer than two samples. Some samples cannot
            be run alone, or `collate` makes a batch of all of them but of no part.
    """
    require_model("model", model)
    if stock is not None:
        require_model("stock=", stock)
    if len(samples) < 2:
        raise VlmpackError(f"judge: {len(samples)} samples; packing needs two or more to be wrong")
    model.eval()
    singly, gradients = compute_alone(model, stock, samples, alone)
    total = sum(len(sample.losses) for sample in singly)
    run = Run(model, collate, losses, shifted=labels == "shifted")
    copies = copied(list(samples))
    made = _batch(run, copies)
    if isinstance(made, Finding):
        return Judgement((made,), len(samples), total)
    where, lost = _places(made, singly, run.shifted)
    if lost is not None:
        return Judgement((lost,), len(samples), total)
    findings = check_coordinates(model, singly)
    findings += _check_batch(made, singly, where, run.shifted, opaque=losses is not None)
    written = check_written(run, alone, list(samples), copies, singly)
    findings += written
    if any(one.fault for one in written):  # what follows makes further batches
        return Judgement(tuple(findings), len(samples), total)
    try:
        computed = run(made)
    except Exception as error:
        refusal = f"the model {raised(error)}"
        findings.append(failed("forward", "refused", refusal, "the arguments of the batch"))
        return Judgement(tuple(findings), len(samples), total)
    outcome = [check_losses(run, made, computed, singly, where)]
    outcome += check_gradients(run, computed, gradients)  # which lets go of the graph
    before = by_sample(made, computed, where, shifted=run.shifted)
    changes = changes_of(model, samples, alone, change, findings)
    isolated = _later("isolation", check_isolation, run, samples, singly, where, before, changes)
    findings += [isolated, *outcome]
    findings.append(_later("average", check_mean, run, step, samples, made, singly))
    return Judgement(tuple(_with_causes(findings)), len(samples), total)


def _later(name: str, check: Callable[..., Finding], *given: Any) -> Finding:
    """Findings of a check that calls the judged code again, which may raise on changed samples."""
    try:
        return check(*given)
    except VlmpackError:
        raise
    except Exception as error:
        detail = f"a later call, with changed samples or some of them, {raised(error)}"
        return failed(name, "refused", detail, "what it takes beside the first batch")


def _batch(run: Run, samples: Sequence[Any]) -> Mapping[str, Any] | Finding:
    try:
        return run.make(samples)
    except NoBatchError as error:
        return failed("collate", "refused", str(error), "what it returns")
    except Exception as error:
        detail = f"the collator {raised(error)}"
        return failed("collate", "refused", detail, "the samples that it takes")


def _places(
    batch: Mapping[str, Any], samples: Sequence[Sample], shifted: bool
) -> tuple[list[Place], Finding | None]:
    places = locate(batch, samples, shifted=shifted)
    lost = [number for number, at in enumerate(places) if at is None]
    if lost:
        ids = samples[lost[0]].ids
        there = longest_start(batch["input_ids"], ids, places)
        detail = f"sample {lost[0]}: its {len(ids)} tokens are not in the batch"
        if there > 1:  # a first token alone may be anything's
            detail = f"sample {lost[0]}: of its {len(ids)} tokens the batch has the first {there}"
        return [], failed("tokens", "tokens lost", detail, "truncation, and what expands images")
    return [at for at in places if at is not None], None


def _check_batch(
    made: Mapping[str, Any],
    samples: Sequence[Sample],
    where: Sequence[Place],
    shifted: bool,
    *,
    opaque: bool,
) -> list[Finding]:
    findings = [check_labels(made["labels"], samples, where, shifted=shifted)]
    padding = check_padding(made["labels"], where, shifted=shifted)
    if padding is not None and findings[0].fault not in ("label shift", "double shift"):
        findings.append(padding)
    packed = len({at.row for at in where}) < len(where)
    positions = made.get("position_ids")
    findings += check_positions(positions, samples, where, packed=packed, opaque=opaque)
    return findings + check_pixels(made, _in_order(samples, where), opaque=opaque)


def _in_order(samples: Sequence[Sample], where: Sequence[Place]) -> list[Sample]:
    order = sorted(range(len(where)), key=lambda n: (where[n].row, where[n].start))
    return [samples[number] for number in order]


def _with_causes(findings: Sequence[Finding]) -> list[Finding]:
    """Add a cause to losses and gradients that differ without an earlier finding."""
    causes = {one.fault for one in findings} - {
        "",
        "other loss",
        "other gradients",
        "mean of means",
        "coordinates beyond the image",  # of the samples, so losses are alike
    }
    if not causes:
        return list(findings)
    follow = ("other loss", "other gradients")
    return [Finding(one.check, "" if one.fault in follow else one.fault) for one in findings]


def check_written(
    run: Run,
    alone: Alone,
    samples: Sequence[Any],
    copies: Sequence[Any],
    stock: Sequence[Sample],
) -> list[Finding]:
    """Whether a second batch of the samples, in another order, is the same after the collator wrote
    into them; nothing where it left them as they are.

    Args:
        copies: those that the collator got, after it made a batch of them.
    """
    written = _first_written(alone, copies, stock)
    if not written:
        return []
    try:
        again = run.make(copied(copies[::-1]))
    except Exception as error:
        other = f"the collator {raised(error)}"
    else:
        names = _differing(run.make(copied(samples[::-1])), again)
        other = f"it has other {', '.join(names)}" if names else ""
    words = f"the collator writes into its samples ({written})"
    if not other:
        detail = f"{words}; a second batch of them is the same"
        return [Finding(Check(name="samples", status="pass", detail=detail))]
    detail = f"{words}, and a second batch of them is another: {other}"
    look_at = "what it changes in place, which has to be a copy"
    return [failed("samples", "samples written", detail, look_at)]


def _first_written(alone: Alone, copies: Sequence[Any], stock: Sequence[Sample]) -> str:
    """What changed in the first sample that the collator wrote into; empty if none."""
    for number, (one, before) in enumerate(zip(copies, stock, strict=True)):
        try:
            names = _differing(before.given, on(dict(alone(copied(one))), CPU))
        except Exception as error:
            return f"sample {number}, which {raised(error)} when it is read again"
        if names:
            return f"{', '.join(names)} of sample {number}"
    return ""


def _differing(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Names of tensors that differ, and of what only one has."""
    return [
        name
        for name in dict.fromkeys([*one, *two])
        if name not in one or name not in two or not _same(one[name], two[name])
    ]


def _same(one: Any, two: Any) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN; other values are not compared."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return True
    if one.shape != two.shape:
        return False
    return bool(((one == two) | ((one != one) & (two != two))).all())
