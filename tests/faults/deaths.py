"""Deaths of real runs, and what must be true after each: resumed, audited, equal, nothing left.

A setting says what is trained and by how many processes, and its twin is the same run unbroken. A
chain is one run that dies several times and then ends.
"""

from __future__ import annotations

import io
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from support.checkpoints import stored_tensors
from support.fault_server import Fault, FaultServer, SeededFaults
from support.forked import run_ranks
from support.pairs import raw_pairs, write_pairs
from support.recipes import changed, copy_samples, rows, run_settings, write_recipe
from support.record_data import write_records
from support.shards import ROOT

from vlmpack.build.look import open_train
from vlmpack.proof.audit import audit_run
from vlmpack.training.record import SampleName, read_launches, standing_batches
from vlmpack.training.run_dir import RunDir

INTERVAL = 2
"""Steps between checkpoints."""
STEPS_PER_DEATH = 9
SHARDS, PADDING = 6, 3_000_000
"""So many samples less than a tenth of a megabyte, and what is beside them in a store's shards."""
WAIT_SECONDS = 240
ORPHAN_SECONDS = 10
DETECT_SECONDS = 90
"""For processes that notice by themselves that another one died."""
MARK = "VLMPACK_FAULT_RUN"
EXACT = ("step", "epoch", "loss", "grad_norm", "num_tokens", "num_label_tokens", "num_samples")
COUNTS = ("step", "epoch", "num_tokens", "num_label_tokens", "num_samples")


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    engine: str
    source: str
    processes: int
    asynchronous: bool
    objective: str = "sft"
    mixed: tuple[int, ...] = ()
    """Processes of the launches in turn, where they change."""

    def __str__(self) -> str:
        saves = "async" if self.asynchronous else "sync"
        worlds = "-".join(map(str, self.mixed or (self.processes,)))
        also = "" if self.objective == "sft" else f"-{self.objective}"
        return f"{self.engine}-{self.source}-{worlds}-{saves}{also}"

    @property
    def is_exact(self) -> bool:
        """Whether the unbroken run is met bit for bit, and not to 1e-5."""
        return self.engine == "hf" and not self.mixed


COVERING = (
    Setting("hf", "shards", 1, asynchronous=False),
    Setting("mcore", "shards", 2, asynchronous=True),
    Setting("hf", "jsonl", 2, asynchronous=True),
    Setting("mcore", "jsonl", 1, asynchronous=False),
    Setting("hf", "parquet", 1, asynchronous=True),
    Setting("mcore", "parquet", 2, asynchronous=False),
    Setting("hf", "store", 2, asynchronous=False),
    Setting("mcore", "store", 1, asynchronous=True),
)
"""Every pair of engine, source, number of processes and kind of save is in one of them."""

BEYOND = (
    Setting("hf", "store", 4, asynchronous=True, objective="dpo"),
    Setting("hf", "parquet", 4, asynchronous=True, mixed=(4, 2, 4)),
    Setting("mcore", "store", 4, asynchronous=False, mixed=(4, 2, 4)),
    Setting("hf", "shards", 2, asynchronous=True, objective="dpo"),
    Setting("mcore", "shards", 1, asynchronous=True, objective="dpo", mixed=(1, 2)),
)
"""More ranks, other numbers of them, preferences."""


def write_source(folder: Path, setting: Setting) -> str:
    """The training data of a setting; its address, of a bucket `data` where it is a store."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    if setting.source not in ("shards", "store"):
        kind = "jsonl" if setting.source == "jsonl" else "parquet of bytes"
        return write_records(data, kind, range(42))
    for number in range(SHARDS):
        path = data / f"s-{number}.tar"
        if setting.objective == "dpo":
            write_pairs(path, raw_pairs(number))
        else:
            source = ROOT / f"assets/digits/train-00000{number % 4}.tar"
            copy_samples(source, path, 7, skip=7 * (number // 4))
        if setting.source == "store":
            with tarfile.open(path, "a") as tar:  # no sample's: it makes the shard as large
                entry = tarfile.TarInfo("__padding__")
                entry.size = PADDING
                tar.addfile(entry, io.BytesIO(random.Random(number).randbytes(PADDING)))
    where = f"s-{{0..{SHARDS - 1}}}.tar"
    return f"s3://data/{where}" if setting.source == "store" else f"{data}/{where}"


def settings_of(
    folder: Path, setting: Setting, address: str, endpoint: str | None, steps: int
) -> dict[str, Any]:
    """Its recipe. A long run at another rate would learn its samples by heart, and then one sum in
    another order changes the loss by percents."""
    values = changed(
        run_settings(folder),
        model__backend=setting.engine,
        data__train=[{"path": address, "name": "digits"}],
        data__num_workers=1,
        training__global_batch_size=8,
        training__micro_batch_size=2,
        training__max_steps=steps,
        checkpoint__interval_steps=INTERVAL,
        checkpoint__keep=2,
        checkpoint__asynchronous=setting.asynchronous,
        optim__schedule="constant",
        optim__lr=2e-5,
        parallelism__timeout_seconds=60,
        parallelism__step_timeout_seconds=60,
    )
    if setting.objective == "dpo":
        values = changed(values, objective__name="dpo")
    if endpoint is not None:
        # A cache of half of the data, so that blocks go while others are read.
        values = changed(
            values,
            data__storage__endpoint=endpoint,
            data__storage__region="us-east-1",
            data__storage__anonymous=True,
            data__storage__allow_private=True,
            data__storage__read_timeout_seconds=2.0,
            data__cache={"directory": str(folder / "cache"), "max_bytes": 8 << 20},
        )
    return values


@contextmanager
def served(folder: Path, setting: Setting) -> Iterator[str | None]:
    """The endpoint of a store that fails one request in ten; None for local files."""
    if setting.source != "store":
        yield None
        return
    kinds = (Fault("status"), Fault("truncate"), Fault("reset"), Fault("short"))
    with FaultServer(folder, seeded=SeededFaults(3, 0.1, kinds, attempts=2)) as server:
        yield server.url


@dataclass
class Launched:
    """The processes of one launch, which have a mark in their environment."""

    ranks: list[subprocess.Popen[bytes]]
    """Or torchrun alone."""
    mark: str
    log: Path
    launcher: bool

    def alive(self) -> list[psutil.Process]:
        """All that run, loader processes and launchers among them."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if (
                    process.status() != psutil.STATUS_ZOMBIE
                    and process.environ().get(MARK) == self.mark
                ):
                    found.append(process)
        return found

    def trainers(self) -> list[psutil.Process]:
        """The processes that train."""
        found = []
        if not self.launcher:
            return [psutil.Process(rank.pid) for rank in self.ranks if rank.poll() is None]
        for process in self.alive():
            with suppress(psutil.Error):
                line = process.cmdline()
                if "finetune" in line and "torch.distributed.run" not in line:
                    found.append(process)
        return found

    def loaders(self) -> list[psutil.Process]:
        """The processes that read, and the one that forks them; without Python's own tracker, which
        removes what the others leave."""
        others = {process.pid for process in (*self.trainers(), *self.ranks)}
        found = []
        for process in self.alive():
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if process.pid not in others and "forkserver" in line:
                    found.append(process)
        return found

    def codes(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]

    def end(self) -> None:
        """Kill what is left, whatever it is."""
        for process in self.alive():
            with suppress(psutil.Error):
                process.kill()
        for rank in self.ranks:
            rank.wait()


def launch(recipe: Path, processes: int, log: Path, *, launcher: bool) -> Launched:
    """torchrun, or each rank by itself with the variables that a launcher sets."""
    mark = uuid.uuid4().hex
    shared = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: mark}
    head, ranks = [sys.executable], [{}]
    if launcher:
        head += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    elif processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    with log.open("ab") as output:
        started = [
            subprocess.Popen(
                [*head, "-m", "vlmpack", "finetune", str(recipe)],
                cwd=ROOT,
                env=os.environ | shared | rank,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # Where the tests run in the background SIGINT is ignored, and children inherit it.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            for rank in ranks
        ]
    return Launched(started, mark, log, launcher)


Kill = Callable[[Launched, random.Random], None]


def _signal_all(number: int) -> Kill:
    def kill(run: Launched, draw: random.Random) -> None:
        trainers = run.trainers()
        for process in draw.sample(trainers, len(trainers)):
            with suppress(psutil.Error):
                process.send_signal(number)
            time.sleep(draw.random() * 0.01)

    return kill


def _one_rank(run: Launched, draw: random.Random) -> None:
    draw.choice(run.trainers()).kill()


def _stopped(run: Launched, draw: random.Random) -> None:
    """STOP for two seconds, CONT, which changes nothing; then as above."""
    victim = draw.choice(run.trainers())
    victim.suspend()
    time.sleep(2)
    victim.resume()
    time.sleep(0.5 * draw.random())
    _signal_all(signal.SIGKILL)(run, draw)


def _launcher(number: int) -> Kill:
    def kill(run: Launched, _: random.Random) -> None:
        run.ranks[0].send_signal(number)

    return kill


def _loader(run: Launched, draw: random.Random) -> None:
    if loaders := run.loaders():
        with suppress(psutil.Error):
            draw.choice(loaders).kill()


def _memory(run: Launched, draw: random.Random) -> None:
    """No more memory for one process: what it asks for next is refused."""
    victim = draw.choice(run.trainers())
    with suppress(psutil.Error, ProcessLookupError):
        size = victim.memory_info().vms
        resource.prlimit(victim.pid, resource.RLIMIT_AS, (size, size))


@dataclass(frozen=True)
class Death:
    """A way to die."""

    name: str
    kill: Kill
    launcher: bool = False
    least: int = 1
    """Processes that it takes."""
    saves: bool = False
    """Whether the run saves a checkpoint before it ends."""
    may_survive: bool = False
    """Whether the run may go on unharmed; then it is killed."""


DEATHS = (
    Death("kill -9", _signal_all(signal.SIGKILL)),
    Death("kill -9 of one rank", _one_rank, least=2),
    Death("TERM", _signal_all(signal.SIGTERM), saves=True),
    Death("INT", _signal_all(signal.SIGINT)),
    Death("STOP and CONT, then kill -9", _stopped),
    Death("kill -9 of the launcher", _launcher(signal.SIGKILL), launcher=True, saves=True),
    Death("TERM to the launcher", _launcher(signal.SIGTERM), launcher=True, saves=True),
    Death("kill -9 of a loader", _loader, may_survive=True),
    Death("out of memory", _memory, may_survive=True),
)


def checkpoints(run_dir: RunDir) -> list[int]:
    """Steps of the finished ones."""
    found = run_dir.checkpoints.glob("step-*/COMPLETE")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def recorded(run_dir: RunDir) -> list[tuple[int, int, list[tuple[SampleName, ...]]]]:
    """(batch, epoch, rows) of every batch that all replicas recorded."""
    return [
        (
            record.batch,
            next(iter(record.steps.values())).epoch,
            sorted(row for step in record.steps.values() for row in step.bins if row),
        )
        for record in standing_batches(run_dir.samples, read_launches(run_dir.samples))
        if not record.missing_ranks
    ]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def mapped(processes: Iterable[int]) -> set[str]:
    """Names in shared memory that some of these processes have mapped. By inode, since glibc maps a
    semaphore under another name before it gives it its own."""
    inodes = set()
    for number in processes:
        with suppress(OSError):
            lines = Path(f"/proc/{number}/maps").read_text(errors="replace").splitlines()
            inodes |= {line.split()[4] for line in lines if "/dev/shm/" in line}
    found = set()
    for name in shared_memory():
        with suppress(OSError):
            if str(Path("/dev/shm", name).stat().st_ino) in inodes:
                found.add(name)
    return found


@dataclass
class Outcome:
    """What one death led to."""

    setting: str
    death: str
    step: int
    """Steps that were trained when it came."""
    saved: int
    """The newest checkpoint afterwards."""
    seconds: float
    """From the death until no process was left."""
    codes: list[int | None]
    survived: bool = False
    run: int = 0
    """Number of the run that died."""
    problems: list[str] = field(default_factory=list)


class Chain:
    """One run that dies several times.

    Args:
        folder: an empty one.
        deaths: how many it will die at most; its length follows.
    """

    def __init__(self, folder: Path, setting: Setting, deaths: int, seed: int) -> None:
        self.setting, self.folder = setting, folder
        self.steps = STEPS_PER_DEATH * deaths + 4
        self.draw = random.Random(f"{setting}|{seed}")
        self.address = write_source(folder, setting)
        self.log = folder / "log"
        self.twin = RunDir(folder / "twin")
        self.run_dir = RunDir(folder / f"run-{seed}")

    def recipe(self, endpoint: str | None, run_dir: RunDir) -> Path:
        values = settings_of(self.folder, self.setting, self.address, endpoint, self.steps)
        values = changed(values, run_dir=str(run_dir.path))
        return write_recipe(self.folder / f"{run_dir.path.name}.json", values)

    def unbroken(self, endpoint: str | None, run_dir: RunDir, processes: int) -> None:
        """Train to the end, in forked processes."""
        recipe = self.recipe(endpoint, run_dir)
        done = run_ranks(["-m", "vlmpack", "finetune", recipe], processes, timeout=WAIT_SECONDS)
        assert done.returncode == 0, done.stderr[-4000:]

    def die(self, endpoint: str | None, death: Death, processes: int) -> Outcome | None:
        """One launch that dies; what is wrong afterwards is in `problems`. None: it was done."""
        recipe = self.recipe(endpoint, self.run_dir)
        first = len(recorded(self.run_dir))
        wanted = first + self.draw.randint(1, STEPS_PER_DEATH - 4)
        launcher = death.launcher or (processes > 1 and self.draw.random() < 0.4)
        run = launch(recipe, processes, self.log, launcher=launcher)
        try:
            self._wait(run, wanted)
            time.sleep(self.draw.random() * 0.3)
            begun = time.monotonic()
            if not run.trainers():
                return None
            own = mapped(process.pid for process in run.alive())  # other programs have some too
            death.kill(run, self.draw)
            survived = self._wait_for_the_end(run, death, wanted)
            seconds = time.monotonic() - begun
            left = run.alive()
            codes = run.codes()
            limit = time.monotonic() + ORPHAN_SECONDS
            while (memory := own & shared_memory()) and time.monotonic() < limit:
                time.sleep(0.2)  # Python's tracker removes what others left once they are gone
        finally:
            run.end()
        found = Outcome(
            setting=str(self.setting),
            death=death.name,
            step=len(recorded(self.run_dir)),
            saved=(checkpoints(self.run_dir) or [0])[-1],
            seconds=seconds,
            codes=codes,
            survived=survived,
        )
        found.problems = self._problems(found, death, left, memory, launcher)
        return found

    def _wait(self, run: Launched, wanted: int) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(self._rows()) < wanted:
            said = self.log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline, f"no step: {said}"
            assert not any(run.codes()), f"{run.codes()}: {said}"
            if 0 in run.codes():
                return
            time.sleep(0.02)

    def _rows(self) -> list[Any]:
        path = self.run_dir.metrics
        return rows(self.run_dir.path, "step") if path.is_file() else []

    def _wait_for_the_end(self, run: Launched, death: Death, wanted: int) -> bool:
        """Until the processes have gone; whether the run had to be killed, unharmed."""
        deadline = time.monotonic() + DETECT_SECONDS
        while run.alive() and time.monotonic() < deadline:
            run.codes()  # so that none of them is waited for
            if death.may_survive and len(self._rows()) > wanted + 3:
                break
            time.sleep(0.05)
        if death.may_survive and run.alive() and None in run.codes():
            _signal_all(signal.SIGKILL)(run, self.draw)
            for rank in run.ranks:
                with suppress(subprocess.TimeoutExpired):
                    rank.wait(DETECT_SECONDS)
            limit = time.monotonic() + ORPHAN_SECONDS
            while run.alive() and time.monotonic() < limit:
                time.sleep(0.05)
            return True
        return False

    def _problems(
        self,
        found: Outcome,
        death: Death,
        left: list[psutil.Process],
        memory: set[str],
        launcher: bool,
    ) -> list[str]:
        problems = []
        if left:
            problems.append(f"still running after {found.seconds:.0f} s: {left}")
        if memory:
            problems.append(f"left in shared memory: {sorted(memory)}")
        if death.saves and found.saved != found.step:
            problems.append(f"{death.name}: step {found.step}, saved {found.saved}")
        if death.name == "TERM" and not launcher and set(found.codes) != {75}:
            problems.append(f"exit codes {found.codes}, not 75")
        behind = INTERVAL * (2 if self.setting.asynchronous else 1)
        if found.step - found.saved > behind:
            problems.append(f"{found.step - found.saved} steps are lost, more than {behind}")
        audit = audit_run(self.run_dir, open_train(self.run_dir.path)[0])
        problems.extend(audit.problems)
        ours, theirs = recorded(self.run_dir), recorded(self.twin)
        if ours != theirs[: len(ours)]:
            problems.append("other samples than the unbroken run's")
        return problems

    def end(self, endpoint: str | None, processes: int) -> list[str]:
        """The last launch, and in what it differs from the unbroken run."""
        self.unbroken(endpoint, self.run_dir, processes)
        problems = list(audit_run(self.run_dir, open_train(self.run_dir.path)[0]).problems)
        if recorded(self.run_dir) != recorded(self.twin):
            problems.append("other samples than the unbroken run's")
        columns = EXACT if self.setting.is_exact else COUNTS
        ours, theirs = (rows(run.path, *columns) for run in (self.run_dir, self.twin))
        if ours != theirs:
            at = next(
                (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours)
            )
            problems.append(f"rows differ from step {at + 1} on: {ours[at : at + 1]}")
        losses = [np.array(rows(run.path, "loss")) for run in (self.run_dir, self.twin)]
        if losses[0].shape == losses[1].shape:
            worst = float(np.abs(losses[0] / losses[1] - 1).max())
            if worst > 1e-5:
                problems.append(f"a loss is {worst:.1e} away")
        if self.setting.is_exact:
            mine, other = (
                stored_tensors(run.checkpoints / f"step-{self.steps:08d}")
                for run in (self.run_dir, self.twin)
            )
            if mine.keys() != other.keys():
                problems.append("other tensors")
            else:
                problems += [
                    f"{key} differs" for key in other if not bool((mine[key] == other[key]).all())
                ][:3]
        return problems


def fitting(setting: Setting, processes: int) -> list[Death]:
    """The ways in which a launch of so many processes can die."""
    return [death for death in DEATHS if processes >= max(death.least, 2 if death.launcher else 1)]


def run_chain(
    folder: Path, setting: Setting, deaths: list[Death | None], seed: int
) -> Iterator[Outcome]:
    """A chain of deaths and its end; None stands for one by lot. The end's problems are those of a
    last outcome without a death."""
    chain = Chain(folder, setting, len(deaths), seed)
    worlds = setting.mixed or (setting.processes,)
    with served(folder, setting) as endpoint:
        if not chain.twin.result.is_file():
            shutil.rmtree(chain.twin.path, ignore_errors=True)
            chain.unbroken(endpoint, chain.twin, worlds[0] if setting.is_exact else 1)
        for number, death in enumerate(deaths):
            processes = worlds[number % len(worlds)]
            chosen = death or chain.draw.choice(fitting(setting, processes))
            outcome = chain.die(endpoint, chosen, processes)
            if outcome is None:
                break
            yield outcome
        problems = chain.end(endpoint, worlds[len(deaths) % len(worlds)])
    yield Outcome(str(setting), "", chain.steps, chain.steps, 0.0, [0], problems=problems)
