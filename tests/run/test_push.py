"""Model cards, and pushes against a stand-in of the hub's client that keeps its signatures."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import CommitOperationDelete, HfApi, ModelInfo
from support.recipes import MINIMAL, changed
from support.recorded import write_record
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.data.loading.checked_lines import checked_line
from vlmpack.errors import VlmpackError
from vlmpack.proof.audit.findings import Audit, EpochCount
from vlmpack.recipe import dump_recipe, load_recipe
from vlmpack.run.card import RUN_KEY, card_of, run_key
from vlmpack.run.export import Exported
from vlmpack.run.push import check_target, push_folder
from vlmpack.training.run_dir import RunDir


class Hub:
    """Calls as huggingface_hub would take them, written down.

    Args:
        files: of the repository; None: there is none.
        fails: the call that does.
        private: whether its owner alone can read the repository.
        run: which run its card names; None for a card of no run.
    """

    def __init__(
        self,
        files: tuple[str, ...] | None = None,
        fails: str = "",
        *,
        private: bool = True,
        run: str | None = "r1",
    ) -> None:
        self.files, self.fails, self.private, self.run = files, fails, private, run
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(HfApi, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs).arguments
            self.calls.append((name, {k: v for k, v in bound.items() if k != "self"}))
            if name == self.fails:
                raise ConnectionError("503 from the hub")
            if name == "repo_exists":
                return self.files is not None
            if name == "repo_info":
                card = {"license": "mit"} | ({} if self.run is None else {RUN_KEY: self.run})
                files = [{"rfilename": each} for each in self.files or ()]
                return ModelInfo(
                    id="o/n", private=self.private, siblings=files, cardData=card, sha="c0"
                )
            return SimpleNamespace(commit_url="https://huggingface.co/o/n/commit/1")

        return call

    def made(self) -> list[str]:
        """What was changed on it, by name of the call."""
        return [name for name, _ in self.calls if name not in ("repo_exists", "repo_info")]

    def committed(self) -> tuple[list[str], list[str]]:
        """Names of the files that the one commit adds, and that it deletes."""
        [operations] = [
            given["operations"] for name, given in self.calls if name == "create_commit"
        ]
        kinds: tuple[list[str], list[str]] = ([], [])
        for each in operations:
            kinds[isinstance(each, CommitOperationDelete)].append(each.path_in_repo)
        return kinds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "export"
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        (made / name).write_text("{}")
    (made / "README.md").write_text(f'---\nbase_model: "b"\n{RUN_KEY}: "r1"\n---\n# a --- b\n')
    return made


def test_a_folder_is_one_commit_to_a_private_repository(folder: Path) -> None:
    names = ["README.md", "config.json", "model.safetensors"]
    hub = Hub()
    assert push_folder(folder, "o/n", public=False, api=hub).endswith("/commit/1")
    assert hub.made() == ["create_repo", "create_commit"] and hub.committed() == (names, [])
    assert dict(hub.calls)["create_repo"]["private"] is True
    assert dict(hub.calls)["create_commit"]["parent_commit"] is None
    public = Hub()
    push_folder(folder, "o/n", public=True, api=public)
    assert dict(public.calls)["create_repo"]["private"] is False
    again = Hub(files=(".gitattributes", "config.json"))
    push_folder(folder, "o/n", public=False, api=again)
    assert again.made() == ["create_commit"] and again.committed() == (names, [])
    assert dict(again.calls)["create_commit"]["parent_commit"] == "c0", "on what was looked at"
    empty = Hub(files=(".gitattributes", "README.md", "LICENSE"), run=None)
    push_folder(folder, "o/n", public=False, api=empty)
    assert empty.committed() == (names, [])


def test_a_public_repository_is_taken_where_it_is_asked_for_alone(folder: Path) -> None:
    hub = Hub(files=(), private=False)
    for push in (
        lambda: push_folder(folder, "o/n", public=False, api=hub),
        lambda: push_folder(folder, "o/n", public=False, replace=True, api=hub),
        lambda: check_target("o/n", api=hub),
    ):
        with pytest.raises(VlmpackError, match="that repository is public; --public pushes"):
            push()
    assert [name for name in hub.made() if name != "whoami"] == []
    check_target("o/n", public=True, api=hub)
    push_folder(folder, "o/n", public=True, api=hub)
    assert "create_repo" not in hub.made()


@pytest.mark.parametrize(("run", "said"), [("r2", "names run r2"), (None, "no run of vlmpack")])
def test_another_models_repository_stays_as_it_is(folder: Path, run: str | None, said: str) -> None:
    """Its files have the names of ours."""
    files = ("config.json", "model.safetensors", "tokenizer.json", "README.md", ".gitattributes")
    hub = Hub(files=files, run=run)
    refused = rf"another model \(config\.json, model\.safetensors, .*{said}.*this is run r1"
    with pytest.raises(VlmpackError, match=refused):
        push_folder(folder, "o/n", public=False, api=hub)
    with pytest.raises(VlmpackError, match=refused):
        check_target("o/n", run="r1", api=hub)
    assert hub.made() == ["whoami"]
    check_target("o/n", api=hub)
    push_folder(folder, "o/n", public=False, replace=True, api=hub)
    added, deleted = hub.committed()
    assert added == ["README.md", "config.json", "model.safetensors"]
    assert deleted == ["tokenizer.json"], "in the same commit"


def test_files_of_the_same_run_do_not_stay_beside_others(folder: Path) -> None:
    hub = Hub(files=("model-00001.safetensors", "config.json"))
    with pytest.raises(
        VlmpackError, match=r"holds model-00001\.safetensors, which this folder has not"
    ):
        push_folder(folder, "o/n", public=False, api=hub)
    assert hub.made() == []


@pytest.mark.parametrize("fails", ["repo_exists", "create_repo", "create_commit"])
def test_a_refusal_of_the_hub_is_told(folder: Path, fails: str) -> None:
    with pytest.raises(VlmpackError, match=r"the hub refused \(ConnectionError: 503.*is whole"):
        push_folder(folder, "o/n", public=False, api=Hub(fails=fails))
    assert (folder / "config.json").is_file()


def test_name_and_login_are_asked_first() -> None:
    for name in ("bare", "a/b/c", "-x/y", ""):
        with pytest.raises(VlmpackError, match="expected OWNER/NAME"):
            check_target(name, api=Hub())
    with pytest.raises(VlmpackError, match="no login that the hub takes"):
        check_target("o/n", api=Hub(fails="whoami"))
    with pytest.raises(VlmpackError, match=r"503 from the hub.*nothing was written"):
        check_target("o/n", api=Hub(fails="repo_exists"))
    check_target("o/n", api=Hub())


def test_the_command_refuses_before_it_exports(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = a_run(tmp_path, steps=40)
    exported: list[Path] = []

    def export_run(given: Path, **_: Any) -> Exported:
        exported.append(given)
        return Exported(folder, tmp_path, None, "the newest")

    monkeypatch.setattr("vlmpack.run.export.export_run", export_run)

    def command(hub: Hub, *options: str) -> str:
        monkeypatch.setattr("vlmpack.run.push._api", lambda _: hub)
        done = CliRunner().invoke(app, ["export", str(run.path), "--push", "o/n", *options])
        return " ".join(f"{done.output} {done.exception or ''}".split())

    another = Hub(files=("config.json",), run="r2")
    assert f"names run r2, and this is run {run_key(run)}" in command(another)
    assert "is public" in command(Hub(files=(), private=False))
    assert not exported
    assert "pushed: https://huggingface.co/o/n/commit/1" in command(another, "--replace")
    assert exported == [run.path]
    assert "pushed" in command(Hub(files=(), private=False), "--public")


def test_a_card_names_its_run_and_no_other(tmp_path: Path) -> None:
    """A longer one is the same; another seed, and other weights under the same path, are not."""
    run, recipe = a_run(tmp_path, steps=40)

    def named(identity: dict[str, Any], weights: dict[str, str]) -> str:
        run.identity.write_text(json.dumps(identity))
        run.model.write_text(json.dumps({"weights": weights}))
        card = card_of(run, *recipe, adapter=False, step=40)
        found = yaml.safe_load(card.split("---")[1])[RUN_KEY]
        assert found == run_key(run)
        return str(found)

    first = named({"training.max_steps": 5, "training.seed": 1}, {"a": "x"})
    assert named({"training.max_steps": 9, "training.seed": 1}, {"a": "x"}) == first
    assert named({"training.max_steps": 5, "training.seed": 2}, {"a": "x"}) != first
    assert named({"training.max_steps": 5, "training.seed": 1}, {"a": "y"}) != first


def a_run(root: Path, **result: Any) -> tuple[RunDir, Any]:
    secret = "https://${env:USER}:${env:PASSWORD}@host/a.tar"
    run = root / "first-run"
    (run / "verify").mkdir(parents=True)
    model = root / "models" / "Tiny-VL"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"vision_config": {}}))
    recipe = load_recipe(
        changed(MINIMAL, model__path=str(model), data__train=secret, run_dir=str(run))
    )
    (run / "result.json").write_text(json.dumps(result))
    return RunDir(run), (model, dump_recipe(recipe))


def test_a_card_says_what_was_found_and_what_was_not(tmp_path: Path) -> None:
    run, recipe = a_run(
        tmp_path,
        steps=40,
        real_tokens=41720,
        metrics_before={"anls": 0.25},
        metrics_after={"anls": 0.587},
        versions={"vlmpack": "0.1.0"},
    )
    card = card_of(run, *recipe, adapter=False, step=40)
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Tiny-VL" and front["library_name"] == "transformers"
    assert front["pipeline_tag"] == "image-text-to-text" and "vlmpack" in front["tags"]
    assert "| anls | 58.7% (before: 25.0%) |" in card and "| real tokens | 41,720 |" in card
    assert "Not verified with the run" in card
    assert str(tmp_path) not in card, "no path of this machine"
    assert "path: Tiny-VL" in card and "${env:PASSWORD}@host/a.tar" in card
    checks = [{"name": "loss", "status": "pass", "measured": 1e-7, "bound": 1e-6}]
    (run.path / "verify" / "verify.json").write_text(json.dumps({"checks": checks}))
    proven = card_of(run, *recipe, adapter=True, step=40)
    assert "| loss | pass | 1.0e-07 | 1.0e-06 |" in proven and "library_name: peft" in proven
    assert "--lora-modules" in proven and "lora" in yaml.safe_load(proven.split("---")[1])["tags"]


def test_a_card_has_the_figures_of_its_own_step_alone(tmp_path: Path) -> None:
    """Of six steps the third is the best and was evaluated, the fifth was not."""
    run, recipe = a_run(
        tmp_path,
        steps=6,
        real_tokens=600,
        best={"figure": "anls", "value": 0.9, "step": 3},
        exported_step=3,
        metrics_before={"anls": 0.25},
        metrics_after={"anls": 0.9},
        validation_after={"step": 6, "loss": 165.9},
    )
    counts = {"loss": 1.0, "num_samples": 4, "num_tokens": 100, "num_padded_slots": 150}
    rows = [{"step": step, "seconds": 2.0, **counts} for step in range(1, 7)]
    rows += [{"step": 3, "validation_loss": 27.4}, {"step": 6, "validation_loss": 165.9}]
    rows += [{"step": 1, "answers_anls": 0.3}, {"step": 3, "answers_anls": 0.9}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reason = {"class": "unreadable", "key": "k", "shard": "s", "reason": "r", "batch": 4}
    run.data_errors.write_bytes(checked_line(reason))

    def card(step: int) -> str:
        return card_of(run, *recipe, adapter=False, step=step)

    third, fifth, last = card(3), card(5), card(6)
    assert "of step 3 of 6, the best one by `anls`." in third
    for line in ("| optimizer steps | 3 |", "| real tokens | 300 |", "| samples | 12 |"):
        assert line in third
    assert "| real tokens a second | 50.0 |" in third and "| validation loss | 27.4000 |" in third
    assert "| anls | 90.0% (before: 25.0%) |" in third
    assert "of step 5 of 6." in fifth and "This step was not evaluated" in fifth
    assert "anls |" not in fifth and "validation loss |" not in fifth and "| 500 |" in fifth
    assert "of step 6, its last one." in last and "| real tokens | 600 |" in last
    assert "| validation loss | 165.9000 |" in last and "anls |" not in last
    assert "| anls | 30.0% (before: 25.0%) |" in card(1)
    said = [f"left out: {count} lines" in text for count, text in ((0, third), (1, fifth))]
    assert said == [True, True]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    assert "real tokens" not in card(3).split("## Proof")[0], "a sum over what is left is no count"


def test_a_card_has_the_audit_or_says_that_there_is_none(tmp_path: Path) -> None:
    run, recipe = a_run(tmp_path, steps=6)

    def card(step: int) -> str:
        return " ".join(card_of(run, *recipe, adapter=False, step=step).split())

    assert "Not audited (`vlmpack data audit RUN`, before the export)." in card(6)
    assert "The run has no record of samples." in card(6)
    write_record(run.samples, [["a", "b"], ["c", "d"], ["e", "f"]])
    assert "own record has 2 global batches up to this step, with 4 samples." in card(2)
    assert "own record has 3 global batches up to this step, with 6 samples." in card(6)
    audit = Audit(
        batches=3, launches=1, epochs=[EpochCount(0, planned=2787, trained=6, pending=2781)]
    )
    run.audit.write_text(json.dumps(audit.as_json()))
    proven = card(3)
    assert "Not audited" not in proven
    assert "of the run's first 3 global batches: proven, every draw" in proven
    assert (
        "| epoch | planned | trained |" in proven and "| 0 | 2,787 | 6 | 0 | 2,781 | 0 |" in proven
    )
    assert "were not looked at" not in proven and "up to step 6 were not looked at" in card(6)
    audit.fault(f"{tmp_path}/data/train.tar: k was trained twice")
    run.audit.write_text(json.dumps(audit.as_json()))
    said = "NOT PROVEN, 1 problem. The first: train.tar: k was trained twice"
    assert said in card(3) and str(tmp_path) not in card(3)
    (run.samples / "launches.jsonl").write_text("{}\n")
    run.audit.unlink()
    assert "record of samples cannot be read" in card(6) and str(tmp_path) not in card(6)


def test_a_run_that_is_not_at_its_end_says_so(tmp_path: Path) -> None:
    run, recipe = a_run(tmp_path)
    (run.path / "result.json").unlink()
    assert "it is not at its end" in card_of(run, *recipe, adapter=False, step=40)
