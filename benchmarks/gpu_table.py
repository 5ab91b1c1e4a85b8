"""What this package does on one GPU, in minutes: `make gpu-table MINUTES=8`.

    python benchmarks/gpu_table.py             # on a GPU: measure the list, from the top
    python benchmarks/gpu_table.py --fake      # on a CPU: run the whole list with tiny shapes
    python benchmarks/gpu_table.py --record    # write what the model says of each row anew

There is one ordered list (`ROWS`). A row is a process of its own (`gpu_row.py`), is saved as it
ends, and has a minute at most. Rows that are left out are named with the reason. Products and
copies come first. They say by what factors the card is slower than the model of `operator_cost.py`.

The model's figures come from `gpu_table_model.json`, since a torch that is built for CUDA cannot
record them. Without a GPU the command prints these alone, and labels them so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDERS = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]
sys.path[:0] = FOLDERS

import torch  # noqa: E402
from fake_cuda.guard import why_not  # noqa: E402
from fake_cuda.meta import Call, empty  # noqa: E402
from gpu_row import KERNELS, Kernel  # noqa: E402
from operator_cost import HOST, PEAK, PRODUCTS, Cost, cost_of  # noqa: E402
from operators import STEPS, Recorded, record  # noqa: E402

MODEL = HERE / "gpu_table_model.json"
ROW_SECONDS = 60.0
LEAST_SECONDS = 10.0
"""A row is not begun with less."""
SHOWN = (
    "torch", "triton", "transformers", "accelerate", "peft", "liger-kernel", "flash-attn",
    "transformer-engine", "flash-linear-attention", "causal-conv1d", "bitsandbytes",
    "megatron-core", "kernels",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the list.

    Args:
        kind: of `gpu_row.KINDS`.
        asked: fields of `operator_step.Asked`.
        options: of the kind.
        needs: modules that it cannot run without.
        beside: the row whose samples these are, for the ratio of both.
    """

    name: str
    kind: str
    asked: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: Sequence[str] = ()
    beside: str = ""


FULL, LORA, IN_BATCH = STEPS["full"], STEPS["lora"], STEPS["lora in_batch"]
SDPA = {"attention": "sdpa"}
FLASH = {"attention": "flash_attention_2"}


def _steps() -> list[Row]:
    def step(name: str, asked: Mapping[str, Any], beside: str = "", **more: Any) -> Row:
        needs = more.pop("needs", ())
        return Row(name, "step", {**asked, **more}, needs=needs, beside=beside)

    def stock(name: str, asked: Mapping[str, Any], beside: str, *needs: str, **options: Any) -> Row:
        return Row(name, "trainer", asked, options, needs, beside)

    nothing_again = "nothing computed again"
    return [
        step("full", FULL),
        stock("Trainer, full, packed, sdpa", FULL, "full", **SDPA),
        stock("Trainer, full, packed, flash-attn", FULL, "full", "flash_attn", **FLASH),
        step(f"full, {nothing_again}", FULL, "full", recompute="none"),
        step("lora", LORA),
        stock("Trainer and peft, packed, sdpa", LORA, "lora", "peft", **SDPA),
        stock("Trainer and peft, packed, flash-attn", LORA, "lora", "peft", "flash_attn", **FLASH),
        step(f"lora, {nothing_again}", LORA, "lora", recompute="none"),
        step("lora in_batch", IN_BATCH),
        step("lora none", IN_BATCH, "lora in_batch", padded=True),
        stock(
            "Trainer and peft, padded, sdpa", {**IN_BATCH, "padded": True}, "lora in_batch",
            "peft", **SDPA,
        ),
        step("dpo", STEPS["dpo"]),
        step("hybrid", STEPS["hybrid"]),
        step("gemma 4", STEPS["gemma 4"]),
        step("full, nothing fused", FULL, "full", fused="none"),
        step("full, selective", FULL, "full", recompute="selective"),
        step("lora, nothing fused", LORA, "lora", fused="none"),
        step("qlora", LORA, "lora", quantize="nf4", needs=("bitsandbytes",)),
        step("full, flash-attn", FULL, "full", attention="flash_attn", needs=("flash_attn",)),
        stock(
            "Trainer, full, packed, sdpa, liger", FULL, "full", "liger_kernel", liger=True, **SDPA
        ),
    ]  # fmt: skip


ROWS = [Row("kernels", "kernels"), *_steps()]
"""In the order in which they are measured, the most telling first."""
NOT_RECORDED = ("quantize", "attention", "padded")
"""Fields of a step that the recorder has no fake of. Attention under a mask is one kernel on a GPU,
and some products on tensors without numbers."""
TINY = {"qwen2_5_vl-3b": "tiny", "qwen3_5-2b": "tiny-hybrid", "gemma4-text": "tiny-gemma4"}


def request(row: Row, *, fake: bool) -> dict[str, Any]:
    """What `gpu_row` is asked for."""
    asked = {"kind": row.kind, "fake": fake, **row.options}
    if not row.asked:
        return asked
    step = dict(row.asked)
    if fake:
        step["shape"] = TINY[step["shape"]]
        step |= {"tokens": 512, "rows": 2} if "tokens" in step else {"samples": 3, "rows": 2}
    return {**asked, "asked": step}


def missing(row: Row) -> list[str]:
    """Modules that the row needs and that are not here."""
    return [name for name in row.needs if util.find_spec(name) is None]


def measured(row: Row, seconds: float, *, fake: bool) -> dict[str, Any]:
    """The row's figures, or `left_out`: why there are none."""
    if lacking := missing(row):
        return {"left_out": f"package missing: {', '.join(lacking)}"}
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(FOLDERS)}
    command = [sys.executable, "-m", "gpu_row", json.dumps(request(row, fake=fake))]
    try:
        ran = subprocess.run(
            command, env=surroundings, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"left_out": f"killed after {seconds:.0f} s"}
    if ran.returncode == 0:
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return found
    said = ran.stderr.strip()
    if "OutOfMemoryError" in said or "out of memory" in said:
        return {"left_out": "out of memory", "said": said[-2000:]}
    last = said.splitlines()[-1] if said else f"exit status {ran.returncode}"
    return {"left_out": f"failed: {last}", "said": said[-2000:]}


def go_down(
    rows: Sequence[Row],
    *,
    minutes: float,
    fake: bool,
    save: Callable[[Mapping[str, Any]], None],
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Every row's figures, saved after each; rows for which no time is left are named."""
    end, found = now() + 60 * minutes, {}
    for row in rows:
        left = end - now()
        if left < LEAST_SECONDS:
            found[row.name] = {"left_out": "time up"}
        else:
            print(f"running: {row.name}", file=sys.stderr, flush=True)
            started = now()
            found[row.name] = measured(row, min(ROW_SECONDS, left), fake=fake)
            found[row.name]["wall_seconds"] = round(now() - started, 1)
        save(found)
    return found


def modelled(kernel: Kernel) -> list[Cost]:
    """What the model says of a kernel; of attention forward, and forward and backward together."""
    if kernel.kind == "products":
        rows, inner, columns = kernel.sizes
        a, b, out = (
            empty(shape, torch.bfloat16)
            for shape in ((rows, inner), (inner, columns), (rows, columns))
        )
        return [cost_of(Call("aten::mm", [a, b], [out]))]
    if kernel.kind == "bytes":
        x = empty(kernel.sizes, torch.float32)
        return [cost_of(Call("aten::add", [x, x], [x]))]
    slots, length, heads, width = kernel.sizes
    q = empty((slots, heads, width), torch.bfloat16)
    pairs = slots * length / (2 if kernel.causal else 1)
    flops = pairs * heads * width
    forward = Call("aten::_flash_attention_forward", [q, q, q], [q], flops=4 * flops)
    backward = Call("aten::_flash_attention_backward", [q] * 5, [q, q, q], flops=10 * flops)
    first = cost_of(forward)
    return [first, first + cost_of(backward)]


def factors(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Measured seconds over the model's, by what bounds a call."""
    sums: dict[str, list[float]] = {}
    for kernel in KERNELS:
        if kernel.counts:
            own = sums.setdefault(kernel.kind, [0.0, 0.0])
            own[0] += found[kernel.name][-1]
            own[1] += modelled(kernel)[-1].seconds
    return {kind: taken / said for kind, (taken, said) in sums.items()}


def predicted_seconds(model: Mapping[str, Any], by: Mapping[str, float]) -> float:
    """Of a step: the GPU's with these factors, or the host's where it is slower."""
    device = sum(value * by.get(kind, 1.0) for kind, value in model["seconds"].items())
    return max(device, model["calls"] * HOST)


def of_recorded(step: Recorded) -> dict[str, Any]:
    """What is kept of a recorded step."""
    seconds = {"products": 0.0, "attention": 0.0, "bytes": 0.0}
    for part, count in step.times.items():
        for name, cost in step.parts[part].items():
            operator = name.split()[1]
            kind = "products" if f"aten::{operator}" in PRODUCTS else "bytes"
            kind = "attention" if "attention" in operator else kind
            seconds[kind] += count * cost.seconds
    whole = step.whole()
    figures = {name: getattr(whole, name) for name in ("launches", "calls", "bytes")}
    return {
        **{name: round(value) for name, value in figures.items()},
        "seconds": {kind: round(value, 4) for kind, value in seconds.items()},
        "tokens": step.tokens,
        "flops": step.flops,
        "peak": round(step.peak),
    }


def has_model(row: Row) -> bool:
    """Whether the recorder can make this step."""
    return row.kind == "step" and not any(name in row.asked for name in NOT_RECORDED)


def record_all(rows: Sequence[Row]) -> None:
    """Write what the model says of these rows, and of the others what it said before."""
    known = read_model()
    for row in filter(has_model, rows):
        print(f"recording: {row.name}", file=sys.stderr, flush=True)
        known[row.name] = {"asked": dict(row.asked), **of_recorded(record(row.asked))}
        lines = {name: known[name] for name in (each.name for each in ROWS) if name in known}
        content = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "rows": lines}
        MODEL.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_model() -> dict[str, Any]:
    """The model's figures by row; without those of another step than the row's own."""
    if not MODEL.exists():
        return {}
    rows = json.loads(MODEL.read_text(encoding="utf-8"))["rows"]
    return {row.name: rows[row.name] for row in ROWS if _is_of(row, rows.get(row.name))}


def _is_of(row: Row, known: Mapping[str, Any] | None) -> bool:
    return known is not None and has_model(row) and known["asked"] == dict(row.asked)


def found_here() -> dict[str, str]:
    """Card, driver, CUDA and the versions of packages, "-" for what is not here."""
    found = {"card": "-", "driver": "-", "CUDA": torch.version.cuda or "-"}
    if torch.cuda.is_available():
        found["card"] = torch.cuda.get_device_name()
        try:
            asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            ran = subprocess.run(asked, capture_output=True, text=True, timeout=10)
            found["driver"] = ran.stdout.strip().splitlines()[0] if ran.stdout.strip() else "-"
        except (OSError, subprocess.TimeoutExpired):
            pass
    for name in SHOWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def kernel_table(found: Mapping[str, Sequence[float]] | None) -> list[str]:
    """Rates of single kernels; the model's alone where nothing was measured."""
    lines = ["| kernel | rate | of the model | measured / model, time |", "|---|---|---|---|"]
    for kernel in KERNELS:
        passes = ("",) if kernel.kind != "attention" else (", forward", ", forward and backward")
        for place, name in enumerate(passes):
            cost = modelled(kernel)[place]
            work, unit = (cost.bytes, "TB/s") if kernel.kind == "bytes" else (cost.flops, "TFLOP/s")

            def rate(seconds: float, work: float = work, unit: str = unit) -> str:
                return f"{work / seconds / 1e12:,.{2 if unit == 'TB/s' else 0}f} {unit}"

            own = None if found is None else found[kernel.name][place]
            shown = ("-", "-") if own is None else (rate(own), f"{own / cost.seconds:.2f}")
            lines.append(
                f"| {kernel.name}{name} | {shown[0]} | {rate(cost.seconds)} | {shown[1]} |"
            )
    return lines


def step_table(
    rows: Sequence[Row],
    found: Mapping[str, Any],
    model: Mapping[str, Any],
    by: Mapping[str, float] | None,
) -> list[str]:
    """A line for each step; the model's figures alone where nothing was measured.

    Args:
        model: its figures by row.
        by: factors between the card and the model, where they were measured.
    """
    lines = []
    rates: dict[str, float] = {}
    for row in rows:
        own, said = found.get(row.name, {}), model.get(row.name)
        seconds = _median(own.get("step_seconds"))
        tokens = own.get("tokens") or (said or {}).get("tokens", 0)
        plain = predicted_seconds(said, {}) if said else None
        scaled = predicted_seconds(said, by) if said and by else None
        if seconds or plain:
            rates[row.name] = tokens / (seconds or plain or math.inf)
        other, own_rate = rates.get(row.beside), rates.get(row.name)
        ratio = f"{own_rate / other:.2f} x {row.beside}" if own_rate and other else "-"
        losses = own.get("losses")
        # The formula counts gradients of frozen weights as well.
        same = (
            (said or model.get(row.beside)) if row.asked.get("language", "full") == "full" else None
        )
        peaks = [each and each / 2**30 for each in (own.get("peak"), (said or {}).get("peak"))]
        cells = [
            _shown(seconds and tokens / seconds, ",.0f"),
            _shown(plain and tokens / plain, ",.0f"),
            _shown(scaled and tokens / scaled, ",.0f"),
            _shown(seconds and (scaled or plain) and seconds / (scaled or plain or 1), ".2f"),
            _shown(same and same["flops"] / (seconds or plain or math.inf) / PEAK, ".1%"),
            ratio,
            _shown(peaks[0], ".1f"),
            _shown(peaks[1], ".1f"),
            _shown(losses and losses[0], ".4f"),
            _shown(own.get("loss_difference"), ".1e"),
        ]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return [
        "| step | tokens/s | the model's | with the card's factors | measured / model, time | MFU "
        "| tokens/s of another row | peak GiB | the model's | first loss "
        "| packed against one by one |",
        "|" + "---|" * 11,
        *lines,
    ]


def _median(values: Sequence[float] | None) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _shown(value: Any, form: str) -> str:
    return f"{value:{form}}" if value else "-"


def page(content: Mapping[str, Any], rows: Sequence[Row], *, fake: bool) -> str:
    """The whole result as Markdown."""
    found = content["rows"]
    here = content["here"]
    kernels = found.get("kernels", {}).get("seconds")
    by = None if kernels is None or fake else factors(kernels)
    versions = ", ".join(f"{name} {value}" for name, value in here.items() if name != "card")
    what = "one " + here["card"] if found and not fake else "no GPU"
    lines = [f"`{content['command']}`, {content['date']}, {what}. {versions}.", ""]
    if fake:
        lines += ["**The list on a CPU**, with tiny shapes. No figure says anything of a GPU."]
    elif not found:
        lines += ["**These are the model's figures. Nothing here was measured.**"]
    if by is not None:
        shown = ", ".join(f"{kind} {value:.2f}" for kind, value in by.items())
        lines += [f"The card takes so many times the model's time: {shown}."]
    lines += ["", *kernel_table(None if fake else kernels), ""]
    model = {} if fake else read_model()
    lines += step_table([row for row in rows if row.asked], found, model, by)
    left = [f"- {name}: {each['left_out']}" for name, each in found.items() if "left_out" in each]
    if not found:
        left = [
            f"- {row.name}: the recorder does not make this step"
            for row in rows
            if row.asked and not has_model(row)
        ]
    return "\n".join([*lines, *(["", "Left out:", "", *left] if left else [])]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--minutes", type=float, default=8.0, help="for the whole list")
    parser.add_argument(
        "--fake", action="store_true", help="tiny shapes on a CPU, whatever is here"
    )
    parser.add_argument("--record", action="store_true", help=f"write {MODEL.name} anew")
    parser.add_argument("--only", help="rows whose name contains this")
    parser.add_argument(
        "--save", type=Path, help="a .json, beside which a .md is written; default: on a GPU, "
        "benchmarks/results/gpu-table-DATE.json",
    )  # fmt: skip
    asked = parser.parse_args(arguments)
    rows = [row for row in ROWS if (asked.only or "") in row.name]
    if not rows:
        parser.error(
            f"--only {asked.only} is in no row's name; there are {'; '.join(r.name for r in ROWS)}"
        )
    if asked.record:
        if why := why_not():
            parser.exit(1, f"gpu_table --record: {why}\n")
        record_all(rows)
        return
    here, on_gpu = found_here(), torch.cuda.is_available()
    print("\n".join(f"{name:24} {version}" for name, version in here.items()), flush=True)
    given = sys.argv[1:] if arguments is None else arguments
    content: dict[str, Any] = {
        "command": " ".join(["python benchmarks/gpu_table.py", *given]),
        "date": time.strftime("%Y-%m-%d"),
        "here": here,
        "rows": {},
    }
    path = asked.save
    if path is None and on_gpu and not asked.fake:
        path = HERE / "results" / f"gpu-table-{content['date']}.json"

    def save(found: Mapping[str, Any]) -> None:
        content["rows"] = found
        if path is not None:
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            path.with_suffix(".md").write_text(page(content, rows, fake=asked.fake), "utf-8")

    if on_gpu or asked.fake:
        go_down(rows, minutes=asked.minutes, fake=asked.fake, save=save)
    else:
        built = torch.version.cuda
        print(
            f"\nNo GPU was found: this torch is {torch.__version__}, built "
            f"{f'for CUDA {built}' if built else 'without CUDA'}, and torch.cuda.is_available() is "
            "False. The list needs one GPU, a torch for CUDA and 140 GB for its largest rows. "
            "To run the list on this CPU with tiny shapes, add --fake. Below is what the model of "
            "`make operators` says of it."
        )
        save({})
    print(f"\n{page(content, rows, fake=asked.fake)}", end="")
    failed = [name for name, row in content["rows"].items() if "failed" in row.get("left_out", "")]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
