"""Run with Triton on the module search path: our kernels, compiled for GPUs that are not there.

    python -m support.compiled_kernels sm_80 sm_90

The answer has for each kernel, width and GPU its shared memory, registers and spilled bytes, as the
ptxas of Triton's wheel reports them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vlmpack.attention import wide_kernels
from vlmpack.backends import label_kernels, row_kernels
from vlmpack.backends.row_operators import WIDEST

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
DTYPES = {"bf16": "*bf16", "f16": "*fp16", "f32": "*fp32"}
WIDTHS = (80, 128, 256, 512, 1280, 2048, 3584, 5120, WIDEST)
HEADS = ((80, 80), (128, 128), (256, 256), (256, 64), (96, 32), (512, 512))
"""Columns of a head, and those that are rotated."""


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    gpu: str,
    **options: int,
) -> dict[str, int]:
    """What ptxas says of a kernel."""
    signature = types | dict.fromkeys(constants, "constexpr")
    order = [name for name in kernel.arg_names if name in signature]
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(order)
        if types.get(name, "").startswith("*") or name.endswith("stride")
    }
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in order},
        constexprs=constants,
        attrs=aligned,
    )
    target = GPUTarget("cuda", int(gpu.removeprefix("sm_")), 32)
    made = triton.compile(source, target=target, options={"num_warps": warps, **options})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        name = re.search(r"\.target (\w+)", made.asm["ptx"])
        assert name is not None
        said = subprocess.run(
            [PTXAS, "-v", f"--gpu-name={name[1]}", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    spilled = re.findall(r"(\d+) bytes spill", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert spilled and registers
    return {
        "shared": made.metadata.shared,
        "registers": int(registers[1]),
        "threads": 32 * warps,
        "spilled": sum(map(int, spilled)),
    }


def norms(gpu: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Of every width; of every dtype at two of them."""
    for width in WIDTHS:
        _, form = row_kernels._tile(width)
        warps = form.pop("num_warps")
        types = DTYPES if width in (128, 2048) else {"bf16": "*bf16", "f32": "*fp32"}
        for name, x in types.items():
            scalars = {"rows": "i32", "x_stride": "i32", "offset": "fp32"}
            weight, out = "*fp32", "*fp32" if name == "f32" and width == 128 else "*bf16"
            common = {"x": x, "weight": weight, "scales": "*fp32", **scalars}
            yield (
                f"norm {width} {name}",
                compiled(
                    row_kernels.norm_forward,
                    {**common, "out": out, "eps": "fp32"},
                    {"rounds_first": True, **form},
                    warps,
                    gpu,
                ),
            )
            yield (
                f"norm backward {width} {name}",
                compiled(
                    row_kernels.norm_backward,
                    {
                        **common,
                        "grad": out,
                        "x_grad": x,
                        "weight_sums": "*fp32",
                        "turns": "i32",
                        "grad_stride": "i32",
                    },
                    {"rounds_first": True, "learns": True, **form},
                    warps,
                    gpu,
                ),
            )


def rotations(gpu: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Of whole heads and of parts."""
    pointers = dict.fromkeys(("q", "k", "q_out", "k_out"), "*bf16")
    numbers = [
        name
        for name in row_kernels.rotation.arg_names
        if name.endswith(("_heads", "_row", "_token", "_head", "tokens"))
    ]
    types = {
        **pointers,
        "cos": "*fp32",
        "sin": "*fp32",
        **dict.fromkeys(numbers, "i32"),
        "sign": "fp32",
    }
    for width, turned in HEADS:
        form = row_kernels._head_tile(width, turned, 32)
        yield (
            f"rotation {width} {turned}",
            compiled(row_kernels.rotation, types, form, 4, gpu),
        )


def labels(gpu: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Of a published vocabulary and of one that no block divides."""
    forms = (
        *((151_936, False, False), (262_144, True, False), (32_003, False, False)),
        *((151_936, False, True), (262_144, True, True)),
    )
    for vocabulary, is_capped, is_divided in forms:
        constants = {
            "vocabulary": vocabulary,
            "is_capped": is_capped,
            "is_divided": is_divided,
            "columns": label_kernels.COLUMNS,
        }
        for name, pointer in DTYPES.items():
            names = ("losses", "peaks", "log_sums", "grads", "temperatures")
            wide = dict.fromkeys(names, "*fp32")
            types = {"logits": pointer, "targets": "*i64", **wide}
            types |= {"row_stride": "i32", "grad_stride": "i32", "cap": "fp32"}
            for kernel in (label_kernels.losses_kernel, label_kernels.gradients_kernel):
                own = {key: types[key] for key in kernel.arg_names if key in types}
                yield (
                    f"{kernel.__name__} {vocabulary} {name}{' divided' * is_divided}",
                    compiled(kernel, own, constants, label_kernels.WARPS, gpu),
                )


def wide_heads(gpu: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Of the dtypes that attention on CUDA is for, and of Gemma 4's heads and others."""
    for width, groups in ((512, 8), (320, 1)):
        form = wide_kernels.form_of(width, groups)
        options = {name: form.pop(name) for name in ("num_warps", "num_stages")}
        for name in ("bf16", "f16"):
            for kernel, own in (
                (wide_kernels.wide_forward, form),
                (wide_kernels.wide_backward_queries, form),
                (wide_kernels.wide_backward_keys, form | wide_kernels.TILE_OF_KEYS),
            ):
                types = {each: _type_of(each, DTYPES[name]) for each in kernel.arg_names}
                types = {each: kind for each, kind in types.items() if each not in own}
                made = compiled(
                    kernel, types, own, options["num_warps"], gpu, num_stages=options["num_stages"]
                )
                yield f"{kernel.__name__} {width} {groups} {name}", made


def _type_of(argument: str, pointer: str) -> str:
    known = {"cu": "*i32", "lse": "*fp32", "along": "*fp32", "scale": "fp32"}
    if argument in ("slots", "bounds") or argument.endswith("stride"):
        return "i32"
    return known.get(argument, pointer)


def main() -> None:
    kinds = (norms, rotations, labels, wide_heads)
    found = {gpu: dict(each for kind in kinds for each in kind(gpu)) for gpu in sys.argv[1:]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
