"""Pushes against a stand-in of the hub's client that keeps its signatures."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import CommitOperationDelete, HfApi, ModelInfo
from support.carded import a_run
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.errors import VlmpackError
from vlmpack.run.card import RUN_KEY
from vlmpack.run.export import Exported
from vlmpack.run.push import check_target, push_folder


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
    assert f"names run r2, and this is run {run.run_id()}" in command(another)
    assert "is public" in command(Hub(files=(), private=False))
    assert not exported
    assert "pushed: https://huggingface.co/o/n/commit/1" in command(another, "--replace")
    assert exported == [run.path]
    assert "pushed" in command(Hub(files=(), private=False), "--public")
