"""The capability table: its rows, and that each is true of the code that it is about."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module, metadata, util
from pathlib import Path

import pytest
from support.families import VISION_FAMILIES, model_type_of, tiny_family_folder
from typer.testing import CliRunner

from vlmpack.capabilities import refused
from vlmpack.capabilities.folder import read_config
from vlmpack.capabilities.limits import ENGINES, FEATURES, NO_EXPERTS, NOT_ON_MCORE, ONLY_ON_MCORE
from vlmpack.capabilities.refused import IMAGES, SWEPT, TEXT, refusal, registered
from vlmpack.capabilities.served import SERVED, ServedModel, generic_line, model_types, nearest
from vlmpack.capabilities.table import (
    END,
    START,
    capabilities,
    markdown,
    narrowed,
    row_of,
    text_table,
    why_not,
    with_block,
)
from vlmpack.capabilities.versions import RANGES, TESTED, installed_versions, version_limit
from vlmpack.cli.app import app
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError
from vlmpack.families.base import Family
from vlmpack.families.registry import served_family

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(util.find_spec("transformers").origin).parent / "models"
PACKED = ("in_batch", "online", "offline")


def cells(model_type, versions=TESTED):
    (row,) = (row for row in capabilities(versions) if row.model_type == model_type)
    return row.cells


@pytest.mark.parametrize("model_type", SERVED)
def test_a_line_names_the_file_that_serves_its_model_type_and_its_bounds_on_images(model_type):
    family = served_family(model_type)
    assert model_type in family.model_types
    assert SERVED[model_type].pixel_knobs == family.pixel_knobs


@pytest.mark.cases(quick=("qwen2_5_vl", "qwen3_vl", "llava", "gemma3"), slow="internvl")
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_smaller_images_cost_less_unless_the_line_says_whole_tiles(name, tmp_path):
    """A recipe may shrink images until a sample fits only where that takes tokens away."""
    encoder = Encoder(tiny_family_folder(name, tmp_path))
    sizes = [(600, 400), (150, 100), (30, 20), (15, 10)]
    counts = [encoder.layouts([size])[0].num_tokens for size in sizes]
    if SERVED[model_type_of(name)].whole_tiles:
        assert max(counts) <= 2 * min(counts), "counts follow from the size after all"
    else:
        assert counts[0] > 2 * counts[-1]


def test_every_family_has_a_line_for_each_of_its_model_types():
    files = {path.stem for path in (ROOT / "vlmpack" / "families").glob("*.py")}
    served = set()
    for name in files - {"__init__"}:
        values = vars(import_module(f"vlmpack.families.{name}")).values()
        families = [value for value in values if isinstance(value, Family)]
        served |= {model_type for family in families for model_type in family.model_types}
    assert served == set(SERVED) == set(model_types())
    assert [row.model_type for row in capabilities(TESTED)] == list(SERVED)


def test_mcore_runs_what_it_has_an_entry_for():
    from vlmpack.backends.mcore.weights import FAMILIES

    on_mcore = {name for name, model in SERVED.items() if "mcore" in model.engines}
    assert on_mcore == set(FAMILIES)
    assert len(on_mcore) >= 7


def test_every_model_type_is_one_of_transformers():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert set(SWEPT) | set(SERVED) <= set(CONFIG_MAPPING_NAMES)


def test_every_class_with_images_has_one_word_and_those_that_are_refused_a_reason():
    assert IMAGES.keys() == registered("image-text-to-text")
    assert TEXT.keys() <= registered("text") and not TEXT.keys() & IMAGES.keys()
    for name, word in SWEPT.items():
        assert (word.word == "served") is (name in SERVED), name
        assert (word.word == "refused") is bool(word.reason), name
    trained = [name for name, word in IMAGES.items() if word.word != "refused"]
    assert len(trained) >= 45
    assert sum(word.word == "proven" for word in TEXT.values()) >= 30


def test_a_line_in_served_has_the_last_word(monkeypatch):
    assert IMAGES["lighton_ocr"].word == "proven" and IMAGES["blip"].reason
    for name in ("lighton_ocr", "blip"):
        monkeypatch.setitem(SERVED, name, SERVED["llava"])
        assert refused.words_in("swept.json")[name] == refused.Swept("served")


def test_a_mixture_of_experts_is_said_to_be_one():
    experts = {name for name in SERVED if why_not(SERVED[name], "mcore", "EP", TESTED) is None}
    assert experts == {
        *("qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("nemotron_h", "nemotron_h_omni"),
    }
    assert cells("qwen3_vl")["mcore"]["EP"] is NO_EXPERTS


def test_what_works_with_the_tested_versions():
    dense = cells("qwen2_5_vl")
    on_hf = [name for name in FEATURES if dense["hf"][name] is None]
    assert on_hf == [*PACKED, "CP", "LoRA", "DPO", "CUDA graphs"]
    assert [name for name in FEATURES if dense["mcore"][name] is None] == [
        *PACKED,
        *("CP", "TP", "SP", "PP", "LoRA", "DPO", "CUDA graphs"),
    ]
    for engine in ENGINES:
        assert all(limit is None or limit.reason for limit in dense[engine].values())


def test_without_packages_the_cells_say_which(monkeypatch):
    without = cells("qwen2_vl", TESTED | {"megatron-core": None, "peft": None})
    assert without["hf"]["online"] is None
    assert "needs peft, which is not installed" in str(without["hf"]["LoRA"])
    for name in (*PACKED, "CP", "TP", "SP", "PP"):
        assert "pip install 'megatron-core>=0.16.1,<0.20'" in str(without["mcore"][name])
    old = cells("qwen2_vl", TESTED | {"transformers": "5.16.2"})
    assert "needs transformers >= 5.17 and < 6, found 5.16.2" in str(old["hf"]["in_batch"])


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.16.1", True), ("0.19.9", True), ("0.16.1rc0+cu", True), ("0.16", False), ("0.20", False)],
)
def test_versions_are_compared_by_numbers(version, fits):
    assert (version_limit("megatron-core", version) is None) is fits


def test_an_engine_that_lacks_a_family_says_so():
    model = ServedModel(title="New", family="new")
    assert why_not(model, "mcore", "online", TESTED) is NOT_ON_MCORE
    assert why_not(model, "hf", "online", TESTED) is None
    for engine in ENGINES:
        assert why_not(model, engine, "TP", TESTED) is ONLY_ON_MCORE


def test_every_family_shares_rows_on_hf():
    for name in SERVED:
        assert why_not(SERVED[name], "hf", "CP", TESTED) is None
    for name in ("gemma3", "gemma4", "deepseek_v3", "llava_onevision"):
        assert why_not(SERVED[name], "mcore", "CP", TESTED) is not None
    assert why_not(generic_line("cohere2"), "hf", "CP", TESTED) is None


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified", "gemma4_text"])
def test_a_family_whose_layers_are_not_megatrons_is_refused_with_that_reason(name):
    for engine, feature in (("mcore", "online"), ("mcore", "PP"), ("hf", "TP")):
        limit = why_not(SERVED[name], engine, feature, TESTED)
        assert "heads of two sizes, sliding windows, norms behind attention and MLP" in str(limit)
        assert "weight map" not in str(limit)
    assert why_not(SERVED[name], "hf", "online", TESTED) is None


def test_the_ranges_are_those_of_the_project_file():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    asked = {*project["dependencies"], *project["optional-dependencies"]["mcore"]}
    for name, wanted in RANGES.items():
        assert f"{name}>={wanted.lowest},<{wanted.below}" in asked


def test_the_installed_versions_are_looked_up():
    versions = installed_versions()
    assert versions["transformers"] == metadata.version("transformers")
    assert set(versions) == set(TESTED) == set(RANGES)
    code = (
        "import sys; from vlmpack.capabilities.table import capabilities; "
        "from vlmpack.capabilities.versions import installed_versions as v; capabilities(v())"
    )
    check = "; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'peft')))"
    subprocess.run([sys.executable, "-c", code + check], check=True)


@pytest.mark.parametrize(
    ("model_type", "near"),
    [
        ("qwen2_5_v", "qwen2_5_vl"),
        ("Qwen2.5-VL", "qwen2_5_vl"),
        ("qwen3_vl_moe_text", "qwen3_vl_moe"),
        ("zebra", None),
        ("mistral_3", "mistral3"),
    ],
)
def test_the_nearest_model_type(model_type, near):
    assert nearest(model_type) == near
    message = refusal({"model_type": model_type})
    assert f"no family of this version serves model_type '{model_type}'" in message
    assert "`vlmpack families`" in message
    assert ("did you mean" in message) is (near is not None)


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"text_config": {}}])
def test_a_config_without_a_model_type(config):
    assert refusal(config) == (
        "config.json has no model_type; `vlmpack families` lists those that can be trained"
    )


@pytest.mark.parametrize("name", [name for name in SWEPT if SWEPT[name].word == "refused"])
def test_a_class_that_the_sweep_refused_is_named_with_its_reason(name):
    message = refusal({"model_type": name})
    assert message == f"model_type '{name}' cannot be trained: {SWEPT[name].reason}"


@pytest.mark.parametrize("name", [name for name in SWEPT if SWEPT[name].word == "proven"])
def test_a_class_that_the_sweep_proved_is_left_to_verify(name):
    assert refusal({"model_type": name, "layer_types": ["any"]}) is None


def test_a_class_that_is_newer_than_the_sweep_is_left_to_verify(monkeypatch):
    from vlmpack.capabilities import refused

    monkeypatch.setattr(refused, "SWEPT", {})
    for name in ("llama4", "mamba"):
        assert refusal({"model_type": name}) is None


@pytest.mark.parametrize("where", [None, "text_config", "llm_config"])
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "of kind linear_attention"),
        ({"layer_types": ["conv", "full_attention"]}, "of kind conv"),
        ({"layers_block_type": ["attention", "mamba"]}, "of kind mamba"),
        ({"layer_types": ["chunked_attention"]}, "of kind chunked_attention"),
    ],
)
def test_layers_are_refused_by_rule_in_a_served_model(where, values, reason):
    config = {"model_type": "qwen3"} | (values if where is None else {where: values})
    message = refusal(config)
    assert message.startswith("the model (model_type 'qwen3') cannot be trained: ")
    assert reason in message


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_nextn_predict_layers": 1},
        {"text_config": {"mtp_num_hidden_layers": 2}},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"vision_config": {"layer_types": ["window_attention"], "num_mtp_layers": 1}},
    ],
)
def test_what_can_be_packed_passes_the_rules(values):
    assert refusal({"model_type": "qwen3"} | values) is None


def test_a_class_that_takes_any_language_model_passes_the_tested_ones(monkeypatch):
    from vlmpack.capabilities import refused

    model = ServedModel(title="Any", family="any", decoders=("qwen2", "llama"))
    monkeypatch.setattr(refused, "SERVED", {"any": model})
    assert refusal({"model_type": "any", "text_config": {"model_type": "llama"}}) is None
    assert refusal({"model_type": "any"}) is None
    message = refusal({"model_type": "any", "text_config": {"model_type": "gpt_oss"}})
    assert (
        "language model of model_type 'gpt_oss' is not served, with qwen2, llama it is" in message
    )


@pytest.mark.parametrize("model_type", [name for name in SERVED if SERVED[name].prediction])
def test_what_is_said_to_be_kept_is_passed_over_on_load(model_type):
    """By the patterns in the sources of transformers' classes."""
    source = "".join(
        path.read_text(encoding="utf-8")
        for path in (MODELS / model_type.removesuffix("_text")).glob("modeling_*.py")
    )
    lists = re.findall(r"_keys_to_ignore_on_load_unexpected = \[(.*?)\]", source)
    patterns = re.findall(r'r?"(.*?)"', ",".join(lists))
    for part in SERVED[model_type].prediction.split(" or "):
        assert any(re.search(pattern, f"{part}.norm.weight") for pattern in patterns), part


def test_models_with_prediction_layers_are_said_to_keep_them(tiny_folder, tmp_path):
    kept = [model for model in SERVED.values() if model.prediction]
    assert len(kept) >= 3
    words = " ".join(CliRunner().invoke(app, ["families"]).stdout.split())
    assert "multi-token prediction is kept, not trained" in words
    for model in kept:
        assert f"{model.title} ({model.prediction})" in words
    config = json.loads((tiny_folder / "config.json").read_text(encoding="utf-8"))
    for count in (0, 1):
        (tmp_path / "config.json").write_text(json.dumps({**config, "mtp_num_layers": count}))
        shown = CliRunner().invoke(app, ["families", str(tmp_path)]).stdout
        said = "multi-token prediction (mtp_num_layers 1): kept, not trained"
        assert (said in shown) is (count > 0)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba", "zamba", "minimax"])
def test_layers_that_are_told_no_boundaries(name):
    """Neither spelling reaches the recurrence: where it is called, no boundaries are passed."""
    source = (MODELS / name / f"modeling_{name}.py").read_text()
    calls = re.findall(r"= mamba_selective_scan\((.*?)\n +\)", source, re.DOTALL)
    assert name == "minimax" or calls
    assert not any("kwargs" in call or "seq_idx" in call for call in calls)
    assert "cu_seqlens" not in source


@pytest.mark.slow
def test_a_gated_delta_net_cannot_be_reset_by_torch_code():
    """Without its kernels transformers refuses boundaries; without boundaries the state leaks."""
    if util.find_spec("fla") is not None:
        pytest.skip("flash-linear-attention is installed")
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 8, 2, 4)] * 3 + [(1, 8, 2)] * 2
    q, k, v, g, beta = (torch.randn(shape, generator=draw) for shape in shapes)
    values = {"g": -g.abs(), "beta": beta.sigmoid()}
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        torch_chunk_gated_delta_rule(q, k, v, **values, cu_seqlens=torch.tensor([0, 4, 8]))
    together = torch_chunk_gated_delta_rule(q, k, v, **values)[0][:, 4:]
    rest = {name: value[:, 4:] for name, value in values.items()}
    alone = torch_chunk_gated_delta_rule(q[:, 4:], k[:, 4:], v[:, 4:], **rest)[0]
    assert (together - alone).abs().max() > 1e-2


def test_the_page_has_the_table():
    """`make families` writes it."""
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    result = CliRunner().invoke(app, ["families", "--markdown"])
    assert result.exit_code == 0
    assert f"{START}\n{result.stdout}{END}" in page
    assert result.stdout == markdown(text_table(capabilities(TESTED)), TESTED)


def test_the_table_is_written_between_the_marks(tmp_path):
    file = tmp_path / "page.md"
    file.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    assert CliRunner().invoke(app, ["families", "--into", str(file)]).exit_code == 0
    text = file.read_text()
    assert text.startswith(f"before\n{START}\n| family | model_type | in_batch |")
    assert text.endswith(f"{END}\nafter\n")
    assert "\nold\n" not in text
    assert with_block("no marks", "table") is None
    file.write_text("no marks")
    result = CliRunner().invoke(app, ["families", "--into", str(file)])
    assert START in str(result.exception)


def test_the_table_in_markdown_is_not_of_one_folder(tiny_folder):
    for options in (["--markdown"], ["--into", "page.md"]):
        result = CliRunner().invoke(app, ["families", str(tiny_folder), *options])
        assert "leave the folder out" in str(result.exception)
    assert "--markdown" not in CliRunner().invoke(app, ["families", "--help"]).stdout


def test_an_id_of_the_hub_is_told_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hint = "hf download Qwen/Qwen2.5-VL-3B-Instruct --local-dir "
    for folder in ("Qwen/Qwen2.5-VL-3B-Instruct", f"{tmp_path}/Qwen/Qwen2.5-VL-3B-Instruct"):
        with pytest.raises(
            ModelError, match="is not a folder.*; expected .*" + hint + folder + "$"
        ):
            read_config(Path(folder))
    (tmp_path / "weights").mkdir()
    for made in (False, True):
        if made:
            (tmp_path / "models").mkdir()
        hint = r"hf download ORG/x --local-dir models/x, with its owner there for ORG$"
        with pytest.raises(ModelError, match=hint):
            read_config(Path("models/x"))
    for folder in ("weights/x", "x", "a/b/c", "/a/b"):
        with pytest.raises(ModelError, match=r"processor files\)$"):
            read_config(Path(folder))


def test_the_command_lists_every_family_and_reason(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # so that no name is folded
    text = CliRunner().invoke(app, ["families"]).stdout
    words = " ".join(text.split())
    for model_type, model in SERVED.items():
        line = rf"^{re.escape(model.title)} +{model_type} +(both|hf)"
        assert re.search(line, text, re.MULTILINE)
    for part in ("needs model.backend: mcore", "has no weight map to megatron-core", "qwen3_next"):
        assert part in words


def test_at_80_columns_every_cell_of_the_table_is_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, ["families"]).stdout.split("\n\n")[0].splitlines()
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in "".join(lines), "nothing is cut"
    whole = text_table(capabilities(installed_versions()))
    narrow = narrowed(whole)
    heads = [name.split("\n") for name in narrow.columns]
    for wide, row in zip(whole.rows, narrow.rows, strict=True):
        for name, cell in zip(whole.columns, wide, strict=True):
            assert [row[place] for place, names in enumerate(heads) if name in names] == [cell]
        shown = next(line for line in lines if f" {row[1]} " in line).split(f" {row[1]} ")[1]
        assert shown.split() == list(row[2:])
    assert len(heads) < len(whole.columns)
    for name in " ".join(whole.columns).split():
        assert re.search(rf"(^| ){re.escape(name)}( |$)", "\n".join(lines), re.MULTILINE), name


def test_the_command_shows_one_model(tiny_folder, tmp_path):
    text = CliRunner().invoke(app, ["families", str(tiny_folder)]).stdout
    assert "Qwen2.5-VL (model_type qwen2_5_vl)" in text
    assert re.search(r"^TP +no: needs model.backend: mcore +yes", text, re.MULTILINE)
    assert re.search(r"^CP +yes +yes", text, re.MULTILINE)
    assert "Qwen3-Next" not in text
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lfm2_vl"}))
    result = CliRunner().invoke(app, ["families", str(tmp_path)])
    assert "model_type 'lfm2_vl' cannot be trained: transformers has" in str(result.exception)


def test_a_run_folder_that_is_taken_for_a_model_names_its_export(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    asked = ["generate", "What is it?", "--model", str(run)]
    plain = CliRunner().invoke(app, asked)
    assert plain.exit_code != 0 and "export" not in str(plain.exception)
    assert "has no config.json" in str(plain.exception)
    (run / "export").mkdir()
    (run / "export" / "config.json").write_text("{}")
    found = CliRunner().invoke(app, asked)
    assert found.exit_code != 0
    assert f"{run} has no config.json" in str(found.exception)
    assert f"a run's model is in its folder export: {run / 'export'}" in str(found.exception)


def test_pairs_train_where_a_family_of_ours_serves():
    assert cells("qwen2_5_vl")["mcore"]["DPO"] is None
    assert "no weight map" in str(cells("gemma3")["mcore"]["DPO"])
    for other in ("janus", "granitemoehybrid"):
        limit = str(row_of(other, TESTED).cells["hf"]["DPO"])
        assert "two answers of a pair share them" in limit
        assert "use objective.name: sft, or a model that a family of ours serves" in limit
