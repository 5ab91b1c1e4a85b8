"""Pushes against a stand-in of the hub's client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from run.played_hub import Hub
from support.carded import a_run
from typer.testing import CliRunner

from vlmpack.activity import ACTIVITY
from vlmpack.cli.app import app
from vlmpack.cli.export import READING
from vlmpack.errors import VlmpackError
from vlmpack.run.card import RUN_KEY
from vlmpack.run.export import Chosen, Exported
from vlmpack.run.push import check_target, push_folder


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
        lambda: check_target("o/n", run="r1", adapter=False, api=hub),
    ):
        with pytest.raises(VlmpackError, match="that repository is public; --public pushes"):
            push()
    assert [name for name in hub.made() if name != "whoami"] == []
    check_target("o/n", run="r1", adapter=False, public=True, api=hub)
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
        check_target("o/n", run="r1", adapter=False, api=hub)
    assert hub.made() == ["whoami"]
    check_target("o/n", run="r1", adapter=True, replace=True, api=hub)
    push_folder(folder, "o/n", public=False, replace=True, api=hub)
    added, deleted = hub.committed()
    assert added == ["README.md", "config.json", "model.safetensors"]
    assert deleted == ["tokenizer.json"], "in the same commit"


def test_files_of_the_same_run_do_not_stay_beside_others(folder: Path) -> None:
    """Former shards of the model go in the commit that brings the new ones."""
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    hub = Hub(files=("config.json", *shards, "model.safetensors.index.json"))
    check_target("o/n", run="r1", adapter=False, api=hub)
    push_folder(folder, "o/n", public=False, api=hub)
    assert hub.committed()[1] == [*shards, "model.safetensors.index.json"]


ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("held", "adapter", "named"),
    [
        (ADAPTERS, False, "adapter_config.json, adapter_model.safetensors, which no folder of a"),
        (("config.json", "model.safetensors"), True, "config.json, model.safetensors, which no fo"),
        (("config.json", "notes.md"), False, "notes.md, which no folder of a whole model has; "),
        ((*ADAPTERS, "model-00001-of-00002.safetensors"), True, "model-00001-of-00002.safetensor"),
    ],
)
def test_files_of_another_kind_are_refused_before_anything_is_written(
    folder: Path, held: tuple[str, ...], adapter: bool, named: str
) -> None:
    """They are of the same run: what is asked for then, --replace, is asked for once."""
    hub = Hub(files=(*held, ".gitattributes", "README.md"))
    with pytest.raises(VlmpackError, match=f"the repository holds {named}"):
        check_target("o/n", run="r1", adapter=adapter, api=hub)
    check_target("o/n", run="r1", adapter=adapter, replace=True, api=hub)
    if adapter:
        (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(VlmpackError, match=f"holds {named}.* is whole: delete it, or give -o"):
        push_folder(folder, "o/n", public=False, api=hub)
    assert "create_commit" not in hub.made()


@pytest.mark.parametrize("fails", ["repo_exists", "create_repo", "create_commit"])
def test_a_refusal_of_the_hub_is_told(folder: Path, fails: str) -> None:
    with pytest.raises(
        VlmpackError, match=r"the hub cannot be reached \(ConnectionError: 503.*is whole"
    ):
        push_folder(folder, "o/n", public=False, api=Hub(fails=fails))
    assert (folder / "config.json").is_file()


def test_name_and_login_are_asked_first() -> None:
    for name in ("bare", "a/b/c", "-x/y", ""):
        with pytest.raises(VlmpackError, match="expected OWNER/NAME"):
            check_target(name, run="r1", adapter=False, api=Hub())
    hub = Hub()
    hub.whoami = raising(LocalTokenNotFoundError("no token found"))
    with pytest.raises(VlmpackError, match="no login that the hub takes"):
        check_target("o/n", run="r1", adapter=False, api=hub)
    with pytest.raises(VlmpackError, match=r"503 from the hub.*nothing was written"):
        check_target("o/n", run="r1", adapter=False, api=Hub(fails="repo_exists"))
    check_target("o/n", run="r1", adapter=False, api=Hub())


def raising(error: Exception) -> Any:
    def asked(*_: Any, **__: Any) -> Any:
        raise error

    return asked


def answer(status: int) -> Exception:
    """What huggingface_hub raises for an answer."""
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"{status} from the hub", response=response)


def no_route() -> Exception:
    """What its client raises where there is no network: nobody listens at port 9."""
    try:
        get_session().get("http://127.0.0.1:9", timeout=5)
    except Exception as error:
        return error
    raise AssertionError("somebody listens")


@pytest.mark.parametrize(
    ("error", "is_login"),
    [
        (lambda: answer(401), True),
        (lambda: answer(403), True),
        (lambda: LocalTokenNotFoundError("no token found"), True),
        (no_route, False),
        (lambda: OfflineModeIsEnabled("HF_HUB_OFFLINE=1"), False),
        (lambda: TimeoutError("timed out"), False),
        (lambda: answer(503), False),
        (lambda: answer(429), False),
    ],
    ids=["401", "403", "no token", "no route", "offline", "timeout", "503", "429"],
)
def test_no_network_is_not_no_login(error: Callable[[], Exception], is_login: bool) -> None:
    hub, fault = Hub(), error()
    hub.whoami = raising(fault)
    with pytest.raises(VlmpackError) as told:
        check_target("o/n", run="r1", adapter=False, api=hub)
    assert ("hf auth login" in str(told.value)) == is_login, str(told.value)
    assert ("the hub cannot be reached" in str(told.value)) != is_login
    hub = Hub()
    hub.repo_exists = raising(fault)
    with pytest.raises(VlmpackError) as told:
        check_target("o/n", run="r1", adapter=False, api=hub)
    assert ("the hub refused" in str(told.value)) == is_login


def test_long_words_of_the_hub_are_cut_between_words() -> None:
    hub = Hub()
    hub.whoami = lambda: (_ for _ in ()).throw(RuntimeError("no " + "token " * 60))
    with pytest.raises(VlmpackError, match=r"\(RuntimeError: no (token )+\.\.\.\); `hf"):
        check_target("o/n", run="r1", adapter=False, api=hub)


@pytest.fixture
def command(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`vlmpack export --push` of a run without a checkpoint, which writes `folder`: what it says.
    Beside it the run, and in which stage each export was written."""
    run, _ = a_run(tmp_path, steps=40)
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card.replace("r1", run.run_id()))
    exported: list[str] = []

    def write(chosen: Chosen) -> Exported:
        exported.append(ACTIVITY.stage)
        return Exported(folder, chosen.checkpoint, None, chosen.why)

    chosen = (run.checkpoints / "step-00000040", "the newest")
    monkeypatch.setattr("vlmpack.run.export._choose", lambda *_: chosen)
    monkeypatch.setattr("vlmpack.run.export.write_export", write)

    def command(hub: Hub, *options: str, of: Path | None = None) -> str:
        monkeypatch.setattr("vlmpack.run.push._api", lambda _: hub)
        done = CliRunner().invoke(app, ["export", str(of or run.path), *options])
        said = f"{done.output} {done.exception or ''}"
        return " ".join(said.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())

    return command, run, exported


def test_the_command_refuses_before_it_exports(command: Any) -> None:
    call, run, exported = command
    another, push = Hub(files=("config.json",), run="r2"), ("--push", "o/n")
    assert f"names run r2, and this is run {run.run_id()}" in call(another, *push)
    assert "is public" in call(Hub(files=(), private=False), *push)
    adapters = Hub(files=("adapter_config.json",), run=run.run_id())
    assert "holds adapter_config.json, which no folder of a whole" in call(adapters, *push)
    assert not exported
    assert "pushed: https://huggingface.co/o/n/commit/1" in call(another, *push, "--replace")
    assert "pushed" in call(adapters, *push, "--replace"), "the same folder, as nothing was written"
    assert len(exported) == 2
    assert "pushed" in call(Hub(files=(), private=False), *push, "--public")


def test_the_command_says_what_it_waits_for(command: Any) -> None:
    call, _, exported = command
    hub = Hub()
    assert "pushed" in call(hub, "--push", "o/n")
    assert hub.stages["whoami"] == "asking the hub" and exported == [READING]
    assert hub.stages["create_commit"] == "uploading to the hub"


def test_the_command_looks_for_the_run_before_it_asks_the_hub(command: Any, tmp_path: Path) -> None:
    call, run, exported = command
    hub, push = Hub(files=("config.json",), run="r2"), ("--push", "o/n")
    typo = tmp_path / "typo"
    assert f"{typo}: expected a run folder, found no folder" in call(hub, *push, of=typo)
    run.identity.unlink()
    assert "expected a run folder, found no identity.json in it" in call(hub, *push)
    assert hub.calls == [] and exported == []


def test_options_of_a_push_without_one_are_refused(command: Any) -> None:
    call, _, exported = command
    for options, named in (
        (("--public",), "--public"),
        (("--replace",), "--replace"),
        (("--public", "--replace"), "--public and --replace"),
    ):
        assert f"found {named} without --push; expected --push OWNER/NAME" in call(Hub(), *options)
    assert exported == []
