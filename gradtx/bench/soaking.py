"""What each rank does in ``bench soak``: episodes of chains, with the laws checked throughout."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradtx as gx
from gradtx.bench import faults
from gradtx.bench.arguments import chain_from
from gradtx.bench.faults import Episode, Life, Moment
from gradtx.bench.ledger import PATHS, Leaves, Ledger, accounts_for_all, zeros
from gradtx.bench.ranks import PATIENCE
from gradtx.bench.resources import open_files, resident_bytes
from gradtx.core.stage import Kind
from gradtx.exchange.group import Group, find_group

EVERY = 10  # steps, after which law L2 is checked
RATE = 1e-3
_TEXT_NBYTES = 2048


class LawBroken(AssertionError):
    """A rank has found a law broken.

    Attributes:
        law: its name.
    """

    def __init__(self, law: str, text: str) -> None:
        super().__init__(f"{law}: {text}")
        self.law = law


@dataclass(frozen=True)
class Broken:
    """Where a law was broken.

    Attributes:
        chain: as code.
        step: of the chain, from 0.
        rank: the first one that has found it.
        text: the law, and what was found.
    """

    chain: str
    step: int
    rank: int
    text: str


@dataclass
class Counts:
    """What has happened to a chain so far, on all ranks.

    Attributes:
        steps: how many were made.
        bad: of those, how many were not finite on some rank.
        absent: leaves without a gradient.
        late: how often a rank came late.
        rescaled: how often the loss scale changed.
        results: how many there were to step with.
        checks: how often law L2 was checked.
        error: the largest error in it, as a share of what it tolerates.
    """

    steps: int = 0
    bad: int = 0
    absent: int = 0
    late: int = 0
    rescaled: int = 0
    results: int = 0
    checks: int = 0
    error: float = 0.0


@dataclass(frozen=True)
class Ended:
    """What one episode came to.

    Attributes:
        chain: which one.
        counts: what happened in it.
        resident: bytes of memory at its end, the most of all ranks; -1 if the system does not tell.
        files: open files at its end, the most of all ranks; -1 likewise.
    """

    chain: int
    counts: Counts
    resident: int
    files: int


@dataclass(frozen=True)
class Task:
    """What to soak.

    Attributes:
        chains: as code.
        seed: all that happens follows from it.
        folder: where each chain has a folder for the checkpoints of its ranks.
    """

    chains: tuple[str, ...]
    seed: int
    folder: Path

    def checkpoints(self, chain: int) -> Path:
        """Where the ranks of a chain save their states."""
        return self.folder / f"chain_{chain}"


def live(task: Task, number: int, life: Life) -> Generator[str | Ended | Broken, None, None]:
    """All that one process does, together with those of the other ranks.

    Args:
        task: what to soak.
        number: of the life.
        life: what to do.

    Yields:
        A text after each step, what came of each episode, and what was broken.
    """
    for place, episode in enumerate(life.episodes):
        if episode.anew and place:
            _meet_anew(task.folder / f"meeting_{number}_{place}")
        for message in soaked(task, episode):
            yield message
            if isinstance(message, Broken):
                return


def _meet_anew(where: Path) -> None:
    """The same ranks, in another process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", where.as_uri(), patience, world_size=size, rank=rank)


def soaked(task: Task, episode: Episode) -> Generator[str | Ended | Broken, None, None]:
    """One episode: a chain is loaded, makes some steps, and is saved.

    Yields:
        As `live`.
    """
    chain = task.chains[episode.chain]
    run = Run(task, episode.chain)
    try:
        for work, text in run.all_of(episode):
            broken = run.meet(work)
            if broken is not None:
                yield broken
                return
            if text:
                yield f"{chain}: step {run.number}"
        used = run.group.all_gather(_bytes_of(resident_bytes(), open_files()))
        run.save()
    except Exception as error:
        error.add_note(f"in step {run.number} of {chain} on rank {run.group.rank}: {task.seed=}")
        raise
    finally:
        run.close()
    told = torch.stack([each.clone().view(torch.int64) for each in used])
    yield Ended(episode.chain, run.counts, int(told[:, 0].max()), int(told[:, 1].max()))


def _bytes_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)


class Run:
    """A chain at work on this rank, from its checkpoint on, if there is one.

    Args:
        task: what to soak.
        chain: which chain.

    Attributes:
        group: the ranks.
        number: the next step of the chain.
        counts: what has happened.
    """

    def __init__(self, task: Task, chain: int) -> None:
        self._task, self._chain = task, chain
        self.group: Group = find_group(None)
        self.counts = Counts()
        tx = chain_from(task.chains[chain])
        kinds = {stage.kind: stage for stage in tx.stages}
        window = kinds.get(Kind.ACCUMULATE)
        self._window = 1 if window is None else int(window.hyperparameters["n"])
        self._delay = tx.delay
        self._ledger = Ledger(self._window, tx.delay)
        self._accounts = accounts_for_all(tx)
        self._before: dict[str, Any] | None = None
        self._parameters = faults.parameters(task.seed)
        self.number, saved = 0, self._loaded()
        if saved is not None:
            self.number = saved["number"]
            self._parameters = saved["parameters"]
            self._ledger.load_state_dict(saved["ledger"])
        # A Pipeline makes them those of rank 0.
        own = _digest(self._parameters)
        self._pipe = gx.Pipeline(tx, self._parameters, max_skips=None)
        self._apart = own != _digest(self._parameters)
        self._scaled = any(s.kind is Kind.UNSCALE and not s.stateful for s in tx.stages)
        if saved is not None:
            self._pipe.load_state_dict(torch.load(self._path("state"), weights_only=True))

    def _path(self, name: str) -> Path:
        return self._task.checkpoints(self._chain) / f"{name}_{self.group.rank}.pt"

    def _loaded(self) -> dict[str, Any] | None:
        path = self._path("run")
        found: dict[str, Any] | None = (
            torch.load(path, weights_only=True) if path.exists() else None
        )
        return found

    def save(self) -> None:
        """Writes this rank's checkpoint, aside first."""
        self._path("run").parent.mkdir(exist_ok=True)
        own = {
            "number": self.number,
            "parameters": self._parameters,
            "ledger": self._ledger.state_dict(),
        }
        for name, content in (("state", self._pipe.state_dict()), ("run", own)):
            aside = self._path(f"new_{name}")
            torch.save(content, aside)
            os.replace(aside, self._path(name))

    def close(self) -> None:
        """Ends what the pipeline has begun."""
        self._pipe.close()

    def all_of(self, episode: Episode) -> Iterator[tuple[Callable[[], None], bool]]:
        """What to do in an episode, one after the other, and whether it is a step."""
        yield self.check_loaded, False
        for _ in range(episode.steps):
            yield self.step, True
            if self.number % EVERY == 0:
                yield self.check_sums, False
        if episode.flush:
            yield self.flush, False
        yield self.check_sums, False

    def check_loaded(self) -> None:
        """Replicas are equal as they were saved.

        Raises:
            LawBroken: if this one has been made so only now.
        """
        if self._apart:
            raise LawBroken("L4", "its parameters are not those of rank 0 when they are loaded")

    def meet(self, work: Callable[[], None]) -> Broken | None:
        """Does something that may find a law broken, and hears whether any rank has.

        Args:
            work: what raises `LawBroken`, and then talks to no other rank any more.

        Returns:
            What was broken: the same on all ranks.
        """
        number, said = self.number, ""
        try:
            work()
        except LawBroken as error:
            said = str(error)
        told = _bytes_of(_digest(self._parameters), bool(said))
        answers = [x.clone().view(torch.int64).tolist() for x in self.group.all_gather(told)]
        digests = [digest for digest, _ in answers]
        if not any(broken for _, broken in answers):
            if len(set(digests)) == 1:
                return None
            apart = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            return self._broken(number, apart, "L4: its parameters are not those of rank 0")
        own = said.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES)
        texts = self.group.all_gather(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        rank = next(rank for rank, (_, broken) in enumerate(answers) if broken)
        text = texts[rank].numpy().tobytes().decode(errors="replace").strip()
        return self._broken(number, rank, text)

    def _broken(self, number: int, rank: int, text: str) -> Broken:
        return Broken(self._task.chains[self._chain], number, rank, text)

    def step(self) -> None:
        """One step, and what can be said of it.

        Raises:
            LawBroken: if a law is broken on this rank.
        """
        seed, ranks = (self._task.seed, self._chain), self.group.size
        happens = faults.moments(*seed, self.number, ranks)
        self._count(happens)
        if self._ledger.count == 0:
            self._before = self._moving() if self._is_bad_window() else None
        true = [faults.gradients(*seed, self.number, rank) for rank in range(ranks)]
        here = happens[self.group.rank]
        if here.late:
            time.sleep(here.late)
        scale = self._give(true[self.group.rank], here)
        self.number += 1
        report = self._pipe.sync(**scale)
        fed = [
            {path: None if path in x.absent else own[path] for path in own}
            for x, own in zip(happens, true, strict=True)
        ]
        due = self._ledger.add(fed, any(x.bad for x in happens))
        self._judge(report, due)
        if self._before is not None and self._ledger.count == 0:
            self._check_trace(self._before)

    def _count(self, happens: Any) -> None:
        counts = self.counts
        counts.steps += 1
        counts.bad += any(x.bad for x in happens)
        counts.absent += sum(len(x.absent) for x in happens)
        counts.late += sum(x.late > 0 for x in happens)

    def _is_bad_window(self) -> bool:
        """Whether any micro-step of the window that begins now is bad."""
        numbers = range(self.number, self.number + self._window)
        seed, ranks = (self._task.seed, self._chain), self.group.size
        return any(x.bad for n in numbers for x in faults.moments(*seed, n, ranks))

    def _give(self, true: Mapping[str, torch.Tensor], here: Moment) -> dict[str, float]:
        """Puts this rank's gradients where the pipeline finds them; what `sync` is to know."""
        own = self._pipe.state.loss_scale if not self._delay else None
        by, extra = 1.0 if own is None else float(own), {}
        if self._scaled:
            by = faults.loss_scale(self._task.seed, self._chain, self.number)
            extra = {"loss_scale": by}
            if self.number and by != faults.loss_scale(
                self._task.seed, self._chain, self.number - 1
            ):
                self.counts.rescaled += 1
        for path, parameter in self._parameters.items():
            gradient = None if path in here.absent else true[path] * by
            if gradient is not None and path == here.bad:
                gradient.view(-1)[gradient.numel() // 2] = here.value
            parameter.grad = gradient
        return extra

    def _judge(self, report: gx.SyncReport, due: bool | None) -> None:
        """What a step says of itself, beside what it ought to say; a result is taken."""
        if report.ready != (due is True):
            raise LawBroken("L5", f"{report} where the result is {_in_words(due)}")
        if not self._delay and report.skipped != (due is False):
            raise LawBroken("L5", f"{report} where the result is {_in_words(due)}")
        if report.ready:
            self._take()
        elif due is False and not self._delay:
            left = [path for path, p in self._parameters.items() if _is_something(p.grad)]
            if left:
                raise LawBroken("L5", f"after a bad step there is a gradient at {left[0]!r}")

    def _take(self) -> None:
        """Steps with a result."""
        results = {path: p.grad for path, p in self._parameters.items()}
        for path, result in results.items():
            if result is not None and not bool(result.isfinite().all()):
                raise LawBroken("L5", f"the result is not finite at {path!r}")
        self._ledger.take(results)
        self.counts.results += 1
        for path, result in results.items():
            if result is not None:
                self._parameters[path].sub_(result, alpha=RATE)

    def _moving(self) -> dict[str, Any]:
        """What a bad step may not move: all of the state but counters, queues and loss scales."""
        return {
            key: value
            for key, value in self._pipe.state_dict()["state"].items()
            if isinstance(value, torch.Tensor)
            and (value.ndim or value.is_floating_point())
            and ".queue." not in key
            and not key.endswith("loss_scale")
        }

    def _check_trace(self, before: Mapping[str, torch.Tensor]) -> None:
        for key, value in self._moving().items():
            if _digest({key: value}) != _digest({key: before[key]}):
                raise LawBroken("L5", f"a bad step has left a trace in the state, at {key!r}")

    def check_sums(self) -> None:
        """All that went in has come out, or is held back; and nothing that is not finite is kept.

        All ranks come here.

        Raises:
            LawBroken: if it is not so.
        """
        saved = self._pipe.state_dict()
        state = saved["state"]
        spoilt = [
            key
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and not bool(value.isfinite().all())
            and not (".queue." in key and not bool(state[_good_of(key)]))
        ]
        # Before anything is raised, as other ranks come here too.
        held = self._held(saved) if self._accounts else zeros()
        if spoilt:
            raise LawBroken("L5", f"the state is not finite at {spoilt[0]!r}")
        if self._ledger.count or not self._accounts:
            return
        error, where = self._ledger.error(held)
        self.counts.checks += 1
        self.counts.error = max(self.counts.error, error)
        if not error <= 1:
            raise LawBroken(
                "L2",
                f"results + mean residual are off by {error:.3g} times what rounding is granted, "
                f"at {where!r}",
            )

    def _held(self, saved: Mapping[str, Any]) -> Leaves:
        """By path, what residuals add to the mean over ranks, and what is queued."""
        residuals, queued = zeros(), zeros()
        for key, value in saved["state"].items():
            _, found, path = key.partition(".residual.")
            if found and path in residuals and key in saved["per_rank"]:
                residuals[path] += value.double()
            _, found, path = key.partition(".updates.")
            if (
                found
                and path in queued
                and ".queue." in key
                and bool(saved["state"][_good_of(key)])
            ):
                queued[path] += value.double()
        flat = torch.cat([residuals[path].reshape(-1) for path in PATHS])
        total = self.group.all_reduce(flat) / self.group.size
        parts = total.split([residuals[path].numel() for path in PATHS])
        return {
            path: part.reshape(queued[path].shape) + queued[path]
            for path, part in zip(PATHS, parts, strict=True)
        }

    def flush(self) -> None:
        """Brings out what is held back.

        Raises:
            LawBroken: as `step`.
        """
        due = self._ledger.close() if self._ledger.count else None
        for report in self._pipe.flush():
            if not report.ready:
                continue
            if due is not True and not self._ledger.flushed():
                raise LawBroken("L2", f"flush brings out a result more than was fed in: {report}")
            due = None
            self._take()
        if due is True or self._ledger.owes:
            raise LawBroken("L2", "flush does not bring out all results")
        self._ledger.flushed()


def _good_of(key: str) -> str:
    """The key that says whether a queued result is good."""
    return key.partition(".updates.")[0] + ".good"


def _in_words(due: bool | None) -> str:
    return {True: "due", False: "bad", None: "not due"}[due]


def _is_something(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool((gradient != 0).any())


def _digest(leaves: Mapping[str, torch.Tensor]) -> int:
    """32 bits of a hash over some tensors."""
    found = 0
    for path, leaf in leaves.items():
        found = zlib.crc32(path.encode(), found)
        data = leaf.detach().contiguous().view(-1).view(torch.uint8)
        found = zlib.crc32(data.numpy().tobytes(), found)
    return found
