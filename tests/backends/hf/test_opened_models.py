"""Two ranks (gloo) that shard a model read what they hold of it, and nothing more."""

from __future__ import annotations

import json
import shutil

import pytest
from support import layouts, opened_models
from support.families import tiny_family_folder
from support.wide import write_wide_model

pytestmark = pytest.mark.soak
MIB = 1 << 20


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found; real processes, since their memory is measured."""
    folder = tmp_path_factory.mktemp("opened")
    models = folder / "models"
    for name in {model for model, _, _ in opened_models.CASES.values()}:
        made = tiny_family_folder(name, tmp_path_factory.mktemp(name))
        shutil.copytree(made, models / name)
    write_wide_model(models / "wide", width=512, layers=16)
    layouts.torchrun(opened_models.__file__, 2, str(folder))
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", opened_models.CASES)
def test_shards_are_those_of_the_whole_model_bit_for_bit(found, case):
    for rank in found:
        assert rank[case]["different"] == []
        assert rank[case]["same_facts"]
        assert rank[case]["compared"] > 30


def test_what_is_tied_stays_tied(found):
    names = [["lm_head.weight", "model.language_model.embed_tokens.weight"]]
    assert [[sorted(group) for group in rank["tied"]["tied"]] for rank in found] == [names] * 2


def test_where_whole_weights_are_needed_a_line_says_so(found):
    for rank in found:
        for case in opened_models.CASES:
            lines = rank[case]["lines"]
            if case != "adapters with magnitudes":
                assert lines == []
                continue
            (line,) = lines
            assert line == (
                "every process loads the whole model in float32 on its host: DoRA begins with the "
                "norms of its weights"
            )


def test_a_file_that_goes_after_the_model_was_opened_is_named_by_its_parameter(found):
    for rank in found:
        assert rank["lost"].startswith("model.path: model.model.")
        assert rank["lost"].endswith("cannot be read: the disk is gone")


def test_a_rank_needs_one_tensor_beyond_its_shards(found):
    """The negative control loads the whole model, as every rank did before."""
    for rank in found:
        ours, control = rank["by shards"], rank["whole"]
        print("\n" + ", ".join(f"{key} {value / MIB:.1f} MiB" for key, value in ours.items()))
        print(f"whole: peak {control['peak'] / MIB:.1f} MiB")
        assert ours["share"] == pytest.approx(ours["whole"] / 2, rel=0.01)
        bound = ours["share"] + ours["largest"] + 8 * MIB
        assert ours["peak"] < bound
        assert control["peak"] > ours["whole"] > 1.5 * bound
