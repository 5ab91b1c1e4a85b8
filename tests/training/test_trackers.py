"""Experiment trackers: one run of theirs for one of ours, no secret in it, and training without
them. Stand-ins record what they are called with; real packages are used where installed.

A process with secrets where experiment trackers look by themselves.

    python test_trackers.py TRACKER RUN_DIR --api-key planted-argument

logs a point to one tracker in a clone whose remote has a token, and speaks on both streams.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState
from support.recipes import MINIMAL, changed, run_settings

import vlmpack
from vlmpack.errors import CapabilityError, RecipeError
from vlmpack.recipe import identity, load_recipe
from vlmpack.recipe.notes import check_trackers
from vlmpack.recipe.schema import LoggingSection
from vlmpack.training.trackers import (
    IDS_NAME,
    SWANLAB_KEEPS_BACK,
    WANDB_KEEPS_BACK,
    Trackers,
    TrackerThread,
    read_ids,
    require_trackers,
    sent_config,
)

REMOTE = "https://bob:planted-token@host.example/x.git"


def clone(folder: Path) -> Path:
    """A repository with one commit, as `git clone` with a token leaves it."""
    folder.mkdir()
    for arguments in (
        ("init", "-q"),
        ("remote", "add", "origin", REMOTE),
        ("-c", "user.name=bob", "-c", "user.email=b@c", "commit", "-q", "--allow-empty", "-m", "a"),
    ):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    return folder


def main(name: str, run_dir: str) -> None:
    PartialState()  # an engine has made it by then
    print("planted-before", flush=True)
    section = LoggingSection(trackers=(name,), project="digits", offline=True)  # type: ignore[arg-type]
    trackers = Trackers(section, Path(run_dir), {"training.seed": 3})
    print("planted-out", flush=True)
    print("planted-error", file=sys.stderr, flush=True)
    trackers.log({"loss": 1.0}, 1)
    trackers.close()
    kept = trackers.at_work
    sys.exit(0 if kept == [name] else "it was dropped")


SECTION = {"project": "digits", "tags": ("a", "b"), "group": "g", "offline": True}
TOKEN = "hf_" + "aB3" * 9
"""What looks like a token of the hub."""


def at_work(folder: Path, *trackers: Any) -> Trackers:
    """These trackers, started."""
    made = Trackers(LoggingSection(trackers=()), folder, {})
    made._trackers += [TrackerThread(one.name, lambda one=one: one) for one in trackers]
    return made


def test_an_unknown_tracker_is_dropped_with_a_message(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="vlmpack"):
        trackers = Trackers(
            LoggingSection.model_construct(trackers=("no-such-tracker",)), tmp_path, {"a": 1}
        )
    assert "no-such-tracker is off" in caplog.text
    trackers.log({"loss": 1.0}, 1)
    caplog.clear()
    trackers.close()
    assert "no-such-tracker has none of this run's figures from the start (acc" in caplog.text


def test_a_tracker_that_is_asked_for_and_absent_is_refused_by_launch_and_check():
    """The one that nobody has to ask for is not: a plain install has no tensorboard."""
    absent = load_recipe(changed(MINIMAL, logging__trackers=["tensorboard", "comet_ml", "aim"]))
    advice = "asks for comet_ml, aim, which is not installed here: pip install comet-ml aim, or"
    with pytest.raises(CapabilityError, match=advice):
        require_trackers(absent.logging)
    with pytest.raises(RecipeError, match=advice):
        check_trackers(absent.logging)
    for names in ([], ["tensorboard"]):
        fine = load_recipe(changed(MINIMAL, logging__trackers=names))
        require_trackers(fine.logging)
        check_trackers(fine.logging)


def test_a_tracker_that_fails_is_dropped_and_training_goes_on(tmp_path, caplog):
    class Failing:
        name = "failing"
        calls = 0

        def log(self, values, step):
            self.calls += 1
            raise ConnectionError("no route")

        def finish(self):
            raise AssertionError("was dropped")

    failing = Failing()
    trackers = at_work(tmp_path, failing)
    with caplog.at_level(logging.WARNING, logger="vlmpack"):
        for step in range(3):
            trackers.log({"loss": 1.0}, step)
        trackers.close()
    assert failing.calls == 1
    assert caplog.text.count("tracker failing failed") == 1
    assert "none of this run's figures from step 0 on (no route)" in caplog.text


def test_what_a_tracker_raises_is_told_without_secrets(tmp_path, caplog):
    class Failing:
        name = "failing"

        def log(self, values, step):
            raise ConnectionError("https://bob:planted@host/api?key=planted")

        def finish(self):
            raise ConnectionError("https://bob:planted@host/end?key=planted")

    trackers = at_work(tmp_path, Failing(), closing := Failing())
    closing.log = lambda values, step: None  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, logger="vlmpack"):
        trackers.log({"loss": 1.0}, 1)
        trackers.close()
    assert caplog.text.count("@host/api") == 2 and caplog.text.count("@host/end") == 1
    assert "planted" not in caplog.text


def test_trackers_see_finite_values_alone(tmp_path):
    class Recording:
        name = "recording"

        def __init__(self):
            self.seen = []

        def log(self, values, step):
            self.seen.append(values)

        def finish(self):
            pass

    trackers = at_work(tmp_path, recording := Recording())
    for absent in (float("nan"), None):
        trackers.log({"loss": absent, "fill": 0.5}, 1)
    trackers.close()
    assert recording.seen == [{"fill": 0.5}] * 2
    assert trackers.at_work == ["recording"], "it was dropped"


class Settings(dict[str, Any]):
    """SwanLab's, read back as a pydantic model is."""

    def model_dump(self) -> dict[str, Any]:
        return {"mode": "online", **self}


class Client(ModuleType):
    """A tracker's package: it writes down what it is called with."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int | None]] = []
        self.params: list[dict[str, Any]] = []
        self.uri: str | None = "before"
        self.config = SimpleNamespace(update=lambda values, **_: self.params.append(values))
        if name == "swanlab":
            self.config = type(
                "C", (dict,), {"update": lambda own, v, **_: self.params.append(v)}
            )()
        self.Settings: Any = lambda **options: Settings(options)
        names = SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
        self.utils = SimpleNamespace(validation=names)

    def init(self, **options: Any) -> Any:
        self.calls.append(options)
        return SimpleNamespace(log=self.log, finish=lambda: None)

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.logged.append((values, step))

    def finish(self, *_: Any) -> None: ...

    # MLflow's
    def search_experiments(self, **_: Any) -> list[Any]:
        return []

    def create_experiment(self, **options: Any) -> str:
        return str(options["name"])

    def start_run(self, **options: Any) -> Any:
        self.calls.append({**options, "at": self.uri})
        return SimpleNamespace(info=SimpleNamespace(run_id=options["run_id"] or "made-there"))

    def is_tracking_uri_set(self) -> bool:
        return self.uri is not None

    def get_tracking_uri(self) -> str | None:
        return self.uri

    def set_tracking_uri(self, uri: str | None) -> None:
        self.uri = uri
        os.environ["MLFLOW_TRACKING_URI"] = str(uri)  # as the real one, for its processes

    def log_params(self, values: dict[str, Any]) -> None:
        self.params.append(values)

    def log_metrics(self, values: dict[str, float], step: int | None = None) -> None:
        self.logged.append((values, step))

    def end_run(self) -> None: ...


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> dict[str, Client]:
    PartialState()  # an engine has made it by then
    found = {name: Client(name) for name in ("wandb", "mlflow", "swanlab")}
    for name, client in found.items():
        monkeypatch.setitem(sys.modules, name, client)
    return found


def two_launches(folder: Path, name: str) -> None:
    """A run, and the same run resumed."""
    for step in (1, 2):
        section = LoggingSection(trackers=(name,), **SECTION)  # type: ignore[arg-type]
        trackers = Trackers(section, folder, {"training.seed": 3})
        trackers.log({"loss": 1.0 / step}, step)
        trackers.close()
        assert trackers.at_work == [name]


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_resumed_run_is_the_same_run_of_the_tracker(
    tmp_path: Path, clients: dict[str, Client], name: str
) -> None:
    two_launches(tmp_path, name)
    client = clients[name]
    first, second = client.calls
    assert first["id"] == second["id"] == read_ids(tmp_path)[name] and len(first["id"]) == 21
    assert first["resume"] == "allow" and first["mode"] == "offline"
    assert (first["project"], first["group"], first["tags"]) == ("digits", "g", ["a", "b"])
    assert first["name" if name == "wandb" else "experiment_name"] == tmp_path.name
    assert [step for _, step in client.logged] == [1, 2]


def test_mlflow_goes_on_with_the_run_that_it_made(
    tmp_path: Path, clients: dict[str, Client]
) -> None:
    two_launches(tmp_path, "mlflow")
    client = clients["mlflow"]
    assert [call["run_id"] for call in client.calls] == [None, "made-there"]
    assert client.calls[0]["tags"] == {"a": "true", "b": "true", "group": "g"}
    assert {call["at"] for call in client.calls} == {(tmp_path / "tracking" / "mlflow").as_uri()}
    assert len(client.params) == 1, "MLflow refuses a parameter that changes"


@pytest.mark.parametrize("before", ["of the program", None])
def test_mlflow_is_as_it_was_once_the_run_is_over(
    tmp_path: Path,
    clients: dict[str, Client],
    monkeypatch: pytest.MonkeyPatch,
    before: str | None,
) -> None:
    """A program goes on after `finetune`, and logs to a server of its own perhaps."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://its-own")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    clients["mlflow"].uri = before
    two_launches(tmp_path, "mlflow")
    assert clients["mlflow"].uri == before
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://its-own"
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ


@pytest.mark.parametrize(
    ("name", "kept_back"), [("wandb", WANDB_KEEPS_BACK), ("swanlab", SWANLAB_KEEPS_BACK)]
)
def test_trackers_are_told_to_send_nothing_of_the_machine(
    tmp_path: Path, clients: dict[str, Client], name: str, kept_back: Any
) -> None:
    """By the names of their settings; what those do is seen below with the real packages."""
    two_launches(tmp_path, name)
    assert [call["settings"] for call in clients[name].calls] == [kept_back, kept_back]
    off = {"console": "off", "disable_git": True, "x_disable_meta": True} | {
        "x_save_requirements": False
    }
    if name == "wandb":
        assert off.items() <= kept_back.items()
    else:
        assert kept_back["terminal"] == {"proxy_type": "none"}
        assert not any(kept_back["probe"].values())
        assert {"runtime", "requirements", "git"} <= kept_back["probe"].keys()


def test_a_swanlab_that_cannot_be_told_so_is_off(
    tmp_path: Path, clients: dict[str, Client], caplog: Any
) -> None:
    """Its settings drop names that they do not know, where W&B's refuse them."""
    clients["swanlab"].Settings = lambda **options: Settings(probe=options["probe"])
    with caplog.at_level(logging.WARNING, logger="vlmpack"):
        trackers = Trackers(LoggingSection(trackers=("swanlab",), offline=True), tmp_path, {})
        trackers.close()
    assert clients["swanlab"].calls == [] == trackers.at_work
    assert "tracker swanlab is off: this SwanLab does not take terminal" in caplog.text


def test_ids_that_cannot_be_read_are_made_anew(tmp_path: Path, clients: dict[str, Client]) -> None:
    (tmp_path / IDS_NAME).write_text("{")
    two_launches(tmp_path, "wandb")
    assert json.loads((tmp_path / IDS_NAME).read_text())["wandb"] == clients["wandb"].calls[0]["id"]


def secret_recipe() -> Any:
    return load_recipe(
        changed(
            MINIMAL,
            data__train="https://${env:USER}:${env:PASSWORD}@host/a.tar?${env:SIGNATURE}",
            data__storage={"credentials": {"hf_token": "${env:HF_TOKEN}"}},
            data__chat_template_kwargs={"hint": f"see https://host/a?token={TOKEN}"},
        )
    )


def test_no_secret_is_in_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """References stay references, credentials are not sent, and addresses are without queries."""
    for name in ("USER", "PASSWORD", "SIGNATURE", "HF_TOKEN"):
        monkeypatch.setenv(name, f"planted-{name}")
    sent = json.dumps(sent_config(identity(secret_recipe())))
    assert "planted" not in sent and TOKEN not in sent and "credentials" not in sent
    assert "${env:PASSWORD}" in sent, "guard: the address is there"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_the_real_package_sends_nothing_that_it_finds(tmp_path: Path, name: str) -> None:
    """Secrets in a clone's remote, the command line and the console; the host and the folder."""
    pytest.importorskip(name, reason=f"{name} is not installed")
    folder, run = clone(tmp_path / "planted-clone"), tmp_path / "run"
    run.mkdir()
    done = subprocess.run(
        [sys.executable, __file__, name, str(run), "--api-key", "planted-argument"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "planted-out" in done.stdout and "planted-error" in done.stderr, "guard"
    files = [path for path in run.rglob("*") if path.is_file()]
    told = {path.relative_to(run): path.read_bytes() for path in files}
    assert any(b"loss" in content or "loss" in str(path) for path, content in told.items())
    assert [path for path, content in told.items() if b"planted" in content] == []
    host = socket.gethostname().encode()
    assert len(host) < 4 or [path for path, content in told.items() if host in content] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_the_real_package_keeps_one_run_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    for key in ("WANDB_API_KEY", "PLANTED", "MLFLOW_TRACKING_TOKEN", "SWANLAB_API_KEY"):
        monkeypatch.setenv(key, "planted-secret-in-the-environment")
    values = changed(
        run_settings(tmp_path),
        logging__trackers=[name],
        logging__offline=True,
        logging__interval_steps=1,
        logging__project="digits",
    )
    vlmpack.finetune(values, training__max_steps=2)
    first = read_ids(Path(values["run_dir"]))
    vlmpack.finetune(values, training__max_steps=4)
    assert read_ids(Path(values["run_dir"])) == first and set(first) == {name}
    files = [p for p in (Path(values["run_dir"]) / "tracking").rglob("*") if p.is_file()]
    assert any(first[name] in str(path) for path in files)
    assert not [p for p in files if b"planted-secret" in p.read_bytes()]
    if name == "mlflow":
        [losses] = [p for p in files if p.name == "loss"]
        steps = [line.split()[2] for line in losses.read_text().splitlines()]
        assert steps == ["1", "2", "3", "4"], "each step once"


if __name__ == "__main__":
    main(*sys.argv[1:3])
