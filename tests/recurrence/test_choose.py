"""What runs is chosen once, with a reason; nothing falls back in silence."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from vlmpack.backends.hf.recurrence import KERNELS
from vlmpack.errors import CapabilityError
from vlmpack.forecast.activations import PACKAGES
from vlmpack.proof.verify.recurrent import TOKEN_DIMS
from vlmpack.recurrence import (
    KINDS,
    choose,
    choose_recurrence,
    fixed_delta_rule,
    fixed_scan,
    packaged_kinds,
    segment_convolution,
    segment_delta_rule,
    segment_scan,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def chosen(requested="auto", device=CUDA, dtype=torch.bfloat16, **options):
    return choose_recurrence(requested, device=device, dtype=dtype, **options)


@pytest.fixture
def install(monkeypatch):
    """Stand-ins for packages: functions with the arguments that ours pass."""

    def functions(*, seq_idx=None, cu_seqlens_cpu=None, chunk_indices=None):
        raise AssertionError("never called")

    def install(*packages, function=functions):
        def import_module(name):
            if name.split(".")[0] not in packages:
                raise ImportError(f"No module named {name!r}")
            return SimpleNamespace(
                causal_conv1d_fn=function,
                causal_conv1d=function,
                chunk_gated_delta_rule=function,
                mamba_chunk_scan_combined=function,
            )

        monkeypatch.setattr(choose.importlib, "import_module", import_module)

    return install


def names(choice):
    return choice.convolution.name, choice.delta_rule.name, choice.scan.name


def test_every_table_has_every_kind(monkeypatch):
    assert tuple(entry.name for entry in fields(choose.RecurrenceChoice)) == KINDS
    assert tuple(TOKEN_DIMS) == tuple(PACKAGES) == KINDS
    assert {kernel.kind for kernel in KERNELS.values()} == {*KINDS, None}
    monkeypatch.setattr(choose, "find_spec", lambda name: name)
    assert packaged_kinds(torch.bfloat16) == KINDS


def test_on_cpu_the_torch_forms_run_and_say_why():
    choice = chosen(device=CPU, dtype=torch.float32)
    functions = (choice.convolution.function, choice.delta_rule.function, choice.scan.function)
    assert functions == (segment_convolution, segment_delta_rule, segment_scan)
    assert "fla needs a CUDA device, this one is cpu" in choice.delta_rule.reason
    assert "mamba_ssm needs a CUDA device" in choice.scan.reason
    assert choice.described().startswith(
        "convolution: segments, delta rule: segments, scan: segments (causal_conv1d needs"
    )


def test_rows_that_a_graph_captures_take_the_fixed_forms():
    choice = chosen(device=CPU, fixed_shape=True)
    assert choice.delta_rule.function is fixed_delta_rule
    assert choice.scan.function is fixed_scan
    assert choice.convolution.function is segment_convolution
    assert names(choice) == ("fixed",) * 3


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        (("causal_conv1d", "fla", "mamba_ssm"), ("causal_conv1d", "fla", "mamba_ssm")),
        (("fla",), ("fla", "fla", "segments")),
        (("mamba_ssm",), ("segments", "segments", "mamba_ssm")),
        ((), ("segments", "segments", "segments")),
    ],
    ids=str,
)
def test_on_cuda_each_kind_takes_the_first_package_that_is_installed(install, packages, expected):
    install(*packages)
    choice = chosen()
    assert names(choice) == expected
    if "mamba_ssm" not in packages:
        assert "mamba_ssm 2.2" not in choice.scan.reason
        assert "cannot be imported" in choice.scan.reason
        assert "wanted: mamba-ssm 2.2 or newer" in choice.scan.reason


def test_each_name_stands_for_its_function(install):
    install("causal_conv1d", "fla", "mamba_ssm")
    choice = chosen()
    assert choice.convolution.function is choose.conv1d_convolution
    assert choice.delta_rule.function is choose.fla_delta_rule
    assert choice.scan.function is choose.mamba_scan
    assert choice.convolution.reason == "first choice"


def test_the_torch_forms_can_be_asked_for(install):
    install("causal_conv1d", "fla", "mamba_ssm")
    choice = chosen("torch")
    assert names(choice) == ("segments",) * 3
    assert (
        choice.described()
        == "convolution: segments, delta rule: segments, scan: segments (as the recipe asks)"
    )


def test_kernels_that_are_asked_for_run_or_are_missed_by_name(install):
    install("causal_conv1d", "fla")
    with pytest.raises(CapabilityError) as raised:
        chosen("kernels")
    assert str(raised.value) == (
        "model.recurrence: kernels has none for the scan: "
        "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined cannot be imported (No module "
        "named 'mamba_ssm.ops.triton.ssd_combined'); wanted: mamba-ssm 2.2 or newer; "
        "use auto or torch"
    )
    choice = chosen("kernels", kinds=("convolution", "delta_rule"))
    assert names(choice) == ("causal_conv1d", "fla", "segments")
    assert choice.delta_rule.reason == "as the recipe asks"
    with pytest.raises(CapabilityError, match=r"for the delta rule: fla needs bfloat16 or float16"):
        chosen("kernels", dtype=torch.float32, kinds=("convolution", "delta_rule"))
    with pytest.raises(CapabilityError, match=r"for the convolution, the scan: causal_conv1d need"):
        chosen("kernels", device=CPU, kinds=("scan", "convolution"))


def test_nothing_is_asked_for_where_no_layer_carries_state():
    assert names(chosen(device=CPU, kinds=())) == ("segments",) * 3
    for requested in ("torch", "kernels"):
        with pytest.raises(CapabilityError, match=rf"model\.recurrence: {requested}, but no layer"):
            chosen(requested, device=CPU, kinds=())


def test_float32_is_not_for_the_delta_rules_kernel(install):
    install("fla")
    choice = chosen(dtype=torch.float32)
    assert choice.delta_rule.function is segment_delta_rule
    assert "fla needs bfloat16 or float16, the model computes in torch.float32" in (
        choice.delta_rule.reason
    )
    assert choice.convolution.name == "fla"


@pytest.mark.parametrize(
    ("triton", "capability", "tilelang", "runs"),
    [
        ("3.6.0", (9, 0), False, False),
        ("3.4.0+git1", (9, 0), False, False),
        ("3.7.1", (9, 0), False, True),
        ("3.3.1", (9, 0), False, True),
        ("3.6.0", (9, 0), True, True),
        ("3.6.0", (10, 0), False, True),
        ("3.6.0", (8, 0), False, True),
    ],
    ids=str,
)
def test_the_rules_kernel_is_not_for_hopper_gpus_where_its_package_refuses_them(
    install, monkeypatch, triton, capability, tilelang, runs
):
    install("fla")
    there = choose.importlib.import_module
    monkeypatch.setattr(
        choose.importlib,
        "import_module",
        lambda name: SimpleNamespace(__version__=triton) if name == "triton" else there(name),
    )
    monkeypatch.setattr(choose, "find_spec", lambda name: name if tilelang else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choice = chosen()
    assert choice.convolution.name == "fla"
    assert choice.delta_rule.name == ("fla" if runs else "segments")
    if not runs:
        assert f"on Hopper GPUs with Triton {triton}, which computes it wrong" in (
            choice.delta_rule.reason
        )
        assert "Expected Triton 3.7.1 or newer, or tilelang" in choice.delta_rule.reason
        with pytest.raises(CapabilityError, match="none for the delta rule: fla refuses its rule"):
            chosen("kernels", kinds=("delta_rule",))


def test_a_kernel_that_counts_on_the_host_is_not_for_captured_rows(install):
    install("fla")
    choice = chosen(fixed_shape=True)
    assert choice.convolution.name == "fixed"
    assert "fla counts chunks on the host" in choice.convolution.reason
    assert choice.delta_rule.name == "fla"


def test_a_package_that_is_too_old_is_named(install):
    install("causal_conv1d", "fla", "mamba_ssm", function=lambda x, cu_seqlens=None: x)
    choice = chosen()
    assert names(choice) == ("segments",) * 3
    assert "chunk_gated_delta_rule has no chunk_indices; wanted: flash-linear-attention 0.6 or" in (
        choice.delta_rule.reason
    )


@pytest.mark.parametrize(
    ("packages", "low", "full"),
    [
        ((), (), ()),
        (("fla",), ("convolution", "delta_rule"), ("convolution",)),
        (("mamba_ssm", "causal_conv1d"), ("convolution", "scan"), ("convolution", "scan")),
    ],
    ids=str,
)
def test_a_forecast_finds_the_packages_that_the_choice_takes(
    install, monkeypatch, packages, low, full
):
    monkeypatch.setattr(choose, "find_spec", lambda name: name if name in packages else None)
    assert packaged_kinds(torch.bfloat16) == low
    assert packaged_kinds(torch.float32) == full
    install(*packages)
    for dtype, kinds in ((torch.bfloat16, low), (torch.float32, full)):
        choice = chosen(dtype=dtype)
        assert [k for k in KINDS if getattr(choice, k).name != "segments"] == list(kinds)
