"""Toy engines that load nothing, compute on their inputs, and can be set to record, to block or to raise.

Results depend only on their weights and on each row, so they must be bit-equal with any executor.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.roles import Reads, Role
from flowrl.core.operators.session import State
from flowrl.data.metrics import Metrics
from flowrl.errors import EngineError, SyncError
from flowrl.protocols.backend import Backend
from flowrl.protocols.protocols import Checkpointed, Critic, Rollout, Sampled, Scorer, Sleeper, Trainer
from flowrl.records import Receipt, Sequences
from flowrl.run.training.job import Job
from flowrl.sync.digest import weights_digest

T = TypeVar("T")


class Desk:
    """A folder through which a test controls engines in other processes."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def events(self) -> list[dict[str, Any]]:
        """The events of engines, in order."""
        log = self.folder / "events.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def record(self, role: str, rank: int, what: str, **more: Any) -> None:
        """Record an event."""
        line = json.dumps({"role": role, "rank": rank, "what": what, "time": time.time(), **more}) + "\n"
        with (self.folder / "events.jsonl").open("a") as log:  # a single write is atomic
            log.write(line)

    def block(self, call: str) -> None:
        """The next `call` (``"actor.update"``, of one rank ``"actor[1].update"``) reports its process id, then waits
        forever."""
        os.mkfifo(self.folder / f"{call}.block")

    def blocked(self, call: str) -> int:
        """Wait until a call blocks; returns its process id."""
        return int((self.folder / f"{call}.block").read_text())

    def hold(self, call: str) -> None:
        """The next `call` waits until it is released."""
        os.mkfifo(self.folder / f"{call}.hold")

    def release(self, call: str) -> None:
        """Wait until a call blocks, and release it."""
        (self.folder / f"{call}.hold").write_text("")

    def fail(self, call: str, error: type[Exception] = ValueError) -> None:
        """The next `call` raises."""
        (self.folder / f"{call}.fail").write_text(error.__name__)

    def meet(self, calls: Sequence[str]) -> None:
        """From now on, each of these calls waits until all have started."""
        for call in calls:
            (self.folder / f"{call}.meet").write_text(" ".join(calls))
            for other in calls:
                os.mkfifo(self.folder / f"{call}-from-{other}")

    def enter(self, role: str, rank: int, method: str) -> None:
        """Called by an engine at the start of a call."""
        call = f"{role}.{method}"
        if (fault := self.folder / f"{call}.fail").exists():
            error = {"ValueError": ValueError, "EngineError": EngineError}[fault.read_text()]
            fault.unlink()
            raise error(f"{call} was set to fail")
        for name in (call, f"{role}[{rank}].{method}"):
            self._block(self.folder / f"{name}.block")
        if (gate := self.folder / f"{call}.hold").exists():
            gate.read_text()  # until a writer opens it
            gate.unlink()
        if (meeting := self.folder / f"{call}.meet").exists():
            self._meet(call, meeting.read_text().split())

    def _block(self, fifo: Path) -> None:
        """Report this process's id through the pipe and wait forever, if the pipe exists."""
        if fifo.exists():
            writer = os.open(fifo, os.O_WRONLY)  # until a reader opens it
            fifo.unlink()
            os.write(writer, str(os.getpid()).encode())
            os.close(writer)
            threading.Event().wait()

    def _meet(self, call: str, calls: list[str]) -> None:
        """Write a byte to every other call, and read one of each: only concurrent calls get through."""
        others = [other for other in calls if other != call]
        waiting = {os.open(self.folder / f"{call}-from-{other}", os.O_RDWR): other for other in others}
        outgoing = [os.open(self.folder / f"{other}-from-{call}", os.O_RDWR) for other in others]
        for pipe in outgoing:
            os.write(pipe, b".")
        pipes = {*waiting, *outgoing}
        while waiting:
            ready = select.select(list(waiting), [], [], 60)[0]
            if not ready:
                raise TimeoutError(f"{call} waited for {list(waiting.values())}, which did not start")
            for pipe in ready:
                os.read(pipe, 1)
                del waiting[pipe]
        for pipe in pipes:  # each call has opened all its pipes before it wrote
            os.close(pipe)


def kill_blocked(desk: Desk, call: str) -> threading.Thread:
    """SIGKILL the process that makes this call, during the call."""
    desk.block(call)
    thread = threading.Thread(target=lambda: os.kill(desk.blocked(call), signal.SIGKILL))
    thread.start()
    return thread


class Toy(Backend):
    """Base of toy backends.

    Args:
        desk: folder of the `Desk`.
        folder: of a tokenizer.
        ranks, slots_per_rank, memory, collective, loses_weights_asleep: see `Backend`.
    """

    desk: str
    folder: str = ""
    ranks: int = 1
    slots_per_rank: int = 1
    memory: float | None = None
    collective: bool = True
    loses_weights_asleep: bool = False


class ToyEngine:
    """Base of toy engines: sleep, wake, and refuse to work asleep."""

    def __init__(self, role: str, spec: Toy, context: Any) -> None:
        self.role, self.spec, self.desk = role, spec, Desk(spec.desk)
        self.rank, self.ranks = context.rank, context.world_size
        self.asleep = False
        self.w = torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64)
        gpus, grouped = os.environ.get("CUDA_VISIBLE_DEVICES"), dist.is_initialized()
        self.desk.record(role, self.rank, "build", gpus=gpus, grouped=grouped)

    def _enter(self, method: str, **more: Any) -> None:
        self.desk.record(self.role, self.rank, method, **more)
        assert not self.asleep, f"{self.role}.{method} was called asleep"
        self.desk.enter(self.role, self.rank, method)

    def sleep(self) -> None:
        self.desk.record(self.role, self.rank, "sleep")
        self.desk.enter(self.role, self.rank, "sleep")
        self.asleep = True

    def wake(self) -> None:
        self.desk.record(self.role, self.rank, "wake")
        self.desk.enter(self.role, self.rank, "wake")
        self.asleep = False

    def _scored(self, batch: Any) -> Tensor:
        width = batch.response_mask.shape[1]
        tokens = batch.input_ids[:, batch.input_ids.shape[1] - width :].double()
        context = (batch.input_ids * batch.attention_mask).sum(1, keepdim=True).double()
        scored = -(((tokens * self.w[0] + context * self.w[1]) * self.w[2]) % 3.0)
        return torch.where(batch.response_mask, scored, 0.0).float()


class ToyScorerEngine(ToyEngine):
    def log_probs(self, batch: Any) -> Tensor:
        self._enter("log_probs", rows=len(batch.input_ids), width=batch.input_ids.shape[1])
        return self._scored(batch)


class ToyLearner(ToyEngine):
    version = 0

    def update(self, batch: Any, mini_batches: Sequence[Any], loss: Any) -> Metrics:
        """Moves the weights by sums over the rows of all ranks; each rank reports its own rows."""
        self._enter("update", rows=len(batch.input_ids), width=batch.input_ids.shape[1])
        metrics = Metrics()
        signal = batch.advantages if hasattr(batch, "advantages") else batch.returns - batch.values
        for rows, weights, _ in mini_batches:
            own: list[float] = (signal[rows].double() * weights.double()).sum(1).tolist()
            gathered = [own] * self.ranks
            if self.ranks > 1:
                dist.all_gather_object(gathered, own)
            total = torch.tensor(
                math.fsum(itertools.chain.from_iterable(gathered)), dtype=torch.float64
            )  # in any order
            self.w += 0.01 * torch.tanh(total) * torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
            metrics.sum(f"{self.role}/trained", len(rows))
            metrics.mean(f"{self.role}/tokens", batch.response_mask[rows].sum(), len(rows))
        self.version += 1
        return metrics

    def save_checkpoint(self, folder: str) -> None:
        self._enter("save_checkpoint")
        Path(folder).mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            torch.save({"w": self.w, "version": self.version}, Path(folder) / "state.pt")

    def load_checkpoint(self, folder: str) -> None:
        self._enter("load_checkpoint")
        state = torch.load(Path(folder) / "state.pt")
        self.w, self.version = state["w"], state["version"]


class ToyTrainerEngine(ToyLearner):
    def log_probs(self, batch: Any) -> Tensor:
        self._enter("log_probs", rows=len(batch.input_ids), width=batch.input_ids.shape[1])
        return self._scored(batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self._enter("weights")
        yield "first", self.w[:2]
        yield "second", self.w[2:].float()

    def save_pretrained(self, folder: str) -> None:
        self._enter("save_pretrained")
        if self.rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save(dict(self.weights()), Path(folder) / "weights.pt")


class ToyCriticEngine(ToyLearner):
    def values(self, batch: Any) -> Tensor:
        self._enter("values", rows=len(batch.input_ids), width=batch.input_ids.shape[1])
        return self._scored(batch)


class ToyTokenizer:
    """Decodes as a `ChatTokenizer` of bytes, without the slow import of transformers.

    Args:
        folder: of a byte tokenizer.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        words: dict[str, int] = json.loads(Path(folder, "tokenizer.json").read_text())["model"]["vocab"]
        self._words = {i: {"Ġ": " ", "Ċ": "\n"}.get(word, word) for word, i in words.items()}

    def decode(self, ids: Sequence[int], ends: Sequence[int]) -> str:
        return "".join(self._words[i] for i in ids)


class ToyRolloutEngine(ToyEngine):
    receipt: Receipt | None = None

    def __init__(self, role: str, spec: Toy, context: Any) -> None:
        super().__init__(role, spec, context)
        self.tokenizer = ToyTokenizer(spec.folder)

    def generate(
        self, prompts: Tensor, prompt_mask: Tensor, row_ids: Sequence[str], sampling: Any, key: Any
    ) -> Sampled:
        try:
            self._enter("generate", rows=len(prompts), width=prompts.shape[1])
        except EngineError:
            self.receipt = None  # until the next sync
            raise
        assert self.receipt is not None
        draws = key.uniforms(row_ids, sampling.max_new_tokens + 1)
        lengths = 1 + (draws[:, 0] * sampling.max_new_tokens).long()
        width = int(lengths.max()) if len(lengths) else 0
        mask = torch.arange(width) < lengths[:, None]
        shift = float(self.w.sum())
        tokens = 10 + ((draws[:, 1 : width + 1] * 37 + shift * 11) % 60).long()
        versions = torch.where(mask, self.receipt.version, -1)
        return Sampled(tokens * mask, mask, torch.where(mask, -draws[:, 1 : width + 1], 0.0).float(), versions)

    def sleep(self) -> None:
        super().sleep()
        if self.spec.loses_weights_asleep:
            self.receipt, self.w = None, torch.full_like(self.w, torch.nan)

    def sync(self, source: Any) -> Receipt:
        self._enter("sync")
        self.receipt = None
        weights = {name: tensor.clone() for name, tensor in source.weights()}
        if set(weights) != {"first", "second"}:
            raise SyncError(f"the weights are {sorted(weights)}")
        self.w = torch.cat([weights["first"], weights["second"].double()])
        size = sum(tensor.nbytes for tensor in weights.values())
        self.receipt = Receipt(source.version, weights_digest(weights.items()), size, 0.0, "copy")
        return self.receipt


class ToyTrainer(Toy):
    serves = (Trainer, Checkpointed, Sleeper)

    def build(self, context: Any) -> ToyTrainerEngine:
        return ToyTrainerEngine("actor", self, context)


class ToyScorer(Toy):
    serves = (Scorer, Sleeper)

    def build(self, context: Any) -> ToyScorerEngine:
        return ToyScorerEngine("ref", self, context)


class ToyCritic(Toy):
    serves = (Critic, Checkpointed, Sleeper)

    def build(self, context: Any) -> ToyCriticEngine:
        return ToyCriticEngine("critic", self, context)


class ToyRollout(Toy):
    serves = (Rollout, Sleeper)

    def build(self, context: Any) -> ToyRolloutEngine:
        return ToyRolloutEngine("rollout", self, context)


class GroupScore(Operator):
    """Reference log-probs minus the mean of each group."""

    granularity: ClassVar[Granularity] = "group"
    ref: Reads[Scorer] = Role("ref")

    def __call__(self, rollout: Sequences, uid: c.Uid) -> c.RefLogProbs:
        scores = self.ref.log_probs(rollout)
        out = scores.clone()
        for group in sorted(set(uid)):
            rows_of_group = [i for i, name in enumerate(uid) if name == group]
            out[rows_of_group] -= scores[rows_of_group].sum(1).mean()
        return out.masked_fill(~rollout.response_mask, 0.0)


class Blind(GroupScore):
    """Needs complete groups, but does not read the group of each row."""

    def __call__(self, rollout: Sequences) -> c.RefLogProbs:
        return self.ref.log_probs(rollout)


class Counting(Operator):
    """Has state, which the ranks of its role could not share."""

    granularity: ClassVar[Granularity] = "row"
    ref: Reads[Scorer] = Role("ref")
    rows = State(lambda self: 0)

    def __call__(self, rollout: Sequences) -> c.RefLogProbs:
        self.rows.value += len(rollout.input_ids)
        return self.ref.log_probs(rollout)


class Both(Operator):
    """Uses two roles, which may be in different processes."""

    granularity: ClassVar[Granularity] = "row"
    ref: Reads[Scorer] = Role("ref")
    judge: Reads[Scorer] = Role("judge")

    def __call__(self, rollout: Sequences) -> c.RefLogProbs:
        return 0.5 * (self.ref.log_probs(rollout) + self.judge.log_probs(rollout))


class Spoils(Operator):
    """Writes NaN on the sampled tokens of the prompts that end with a token."""

    granularity: ClassVar[Granularity] = "row"
    last: int
    ref: Reads[Scorer] = Role("ref")

    def __call__(self, rollout: Sequences, ref_log_prob: c.RefLogProbs) -> c.RefLogProbs:
        mine = rollout.input_ids[:, -rollout.response_mask.shape[1] - 1] == self.last
        return ref_log_prob.masked_fill(mine[:, None] & rollout.response_mask, float("nan"))


class Picky(Spoils):
    """Refuses NaN."""

    def __call__(self, rollout: Sequences, ref_log_prob: c.RefLogProbs) -> c.RefLogProbs:
        if ref_log_prob.isnan().any():
            raise ValueError("found NaN")
        return ref_log_prob


def toy_job(graph: Any, desk: Path, folder: str, ranks: dict[str, int] | None = None, place: Any = None) -> Job:
    """A graph bound to toy backends, with so many ranks per role."""
    desk.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, Any] = {
        "actor": ToyTrainer,
        "ref": ToyScorer,
        "judge": ToyScorer,
        "critic": ToyCritic,
        "rollout": ToyRollout,
    }
    bindings: dict[str, Any] = {
        role: kinds[role](desk=str(desk), folder=folder, ranks=(ranks or {}).get(role, 1)) for role in graph.roles()
    }
    return graph.bind(place=place, **bindings)


def without_placement(metrics: Mapping[str, T]) -> dict[str, T]:
    """Metrics without those that depend on placement: the transport of weights, and cache hits."""
    return {key: value for key, value in metrics.items() if not key.startswith(("sync/by/", "throughput/"))}


def assert_same_numbers(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Metrics are equal bit for bit, except ``kl/ref``, which ranks sum over their rows in float32."""
    found, expected = without_placement(found), without_placement(expected)
    rounded = {"kl/ref"} & expected.keys()
    assert {key: found[key] for key in rounded} == pytest.approx({key: expected[key] for key in rounded}, rel=1e-6)
    assert {**found, **{key: expected[key] for key in rounded}} == expected
