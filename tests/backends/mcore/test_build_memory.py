"""An engine is built from slices: a rank's host needs its share of the model and about one tensor.

Two processes at TP 2, real ones, since their memory is measured.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import built_memory
from support.layouts import torchrun
from support.wide import write_wide_model

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak counter"
    ),
]

MIB = 1 << 20


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    write_wide_model(folder / "model", width=512, layers=16)
    torchrun(built_memory.__file__, 2, str(folder))
    return json.loads((folder / "found.json").read_text())


def test_a_rank_needs_one_tensor_beyond_its_share(found):
    """The control is the safetensors library, whose maps hold all pages that were read."""
    for rank in found:
        ours, control = rank["by boxes"], rank["mapped"]
        for how, numbers in rank.items():
            parts = (f"{name} {value / MIB:.1f}" for name, value in numbers.items())
            print(f"\n{how}, MiB: {', '.join(parts)}")
        assert ours["share"] < 0.55 * ours["whole"]
        bound = ours["share"] + ours["largest"] + 8 * MIB
        assert ours["peak"] < bound
        assert control["peak"] > 1.5 * bound
