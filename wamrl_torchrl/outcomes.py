"""Outcomes of an evaluation: kept in a file as episodes end, so that it can be interrupted, and summed up."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDictBase

from wamrl_torchrl import schema
from wamrl_torchrl.data.analysis import Rate
from wamrl_torchrl.files import replace_file

T = TypeVar("T")

#: Task, init state and env seed: what an episode of the deterministic policy is.
Condition = tuple[int, int, int]


class EpisodeOutcome(NamedTuple):
    """How one episode ended."""

    task_id: int
    init_state_id: int
    env_seed: int
    success: bool
    steps: int  # executed actions

    @property
    def condition(self) -> Condition:
        """What the episode started from."""
        return self[:3]

    @classmethod
    def of(cls, episode: TensorDictBase) -> EpisodeOutcome:
        """Outcome of a whole episode: records [T] in order."""
        first, last = episode[0], episode[-1]
        return cls(
            task_id=int(first.get(schema.TASK_ID)),
            init_state_id=int(first.get(schema.INIT_STATE_ID)),
            env_seed=int(first.get(schema.ENV_SEED)),
            success=bool(last.get(("next", schema.SUCCESS))),
            steps=int(episode.get(("next", schema.EXECUTED_MASK)).sum()),
        )


def episode_outcomes(records: TensorDictBase) -> list[EpisodeOutcome]:
    """Outcomes of whole episodes, flat records [M] of one episode after the other, in the order of their conditions."""
    lengths = (records.get(("next", "done")).squeeze(-1).nonzero().squeeze(-1) + 1).diff(prepend=torch.zeros(1).long())
    return sorted(EpisodeOutcome.of(episode) for episode in records.split(lengths.tolist()))


class Result(NamedTuple):
    """What several episodes come to."""

    rate: Rate
    mean_steps: float  # executed actions of the successes, NaN without one

    @classmethod
    def of(cls, outcomes: Iterable[EpisodeOutcome]) -> Result:
        """Sum up ``outcomes``."""
        outcomes = list(outcomes)
        steps = [outcome.steps for outcome in outcomes if outcome.success]
        return cls(Rate(len(steps), len(outcomes)), sum(steps) / len(steps) if steps else math.nan)

    def to_json(self) -> dict[str, Any]:
        """As plain values; the interval is Wilson's at 95 %."""
        mean = None if math.isnan(self.mean_steps) else self.mean_steps
        k, n = self.rate
        return {"k": k, "n": n, "interval": list(self.rate.interval()), "mean_steps_of_successes": mean}


def task_results(outcomes: Iterable[EpisodeOutcome]) -> dict[int, Result]:
    """Results by task, in the order in which the tasks first appear."""
    by_task: dict[int, list[EpisodeOutcome]] = {}
    for outcome in outcomes:
        by_task.setdefault(outcome.task_id, []).append(outcome)
    return {task: Result.of(episodes) for task, episodes in by_task.items()}


def _outcome(entry: dict[str, Any]) -> EpisodeOutcome:
    return EpisodeOutcome(**entry)


class OutcomeJournal:
    """A file of JSON lines that outcomes are appended to: the description of the evaluation, then one episode each.

    It is opened by one process at a time and closed by :meth:`close` or as a context manager. What a crash left of a
    half-written last line is cut off; that episode counts as not run.

    Args:
        path: the file; made if it does not exist.
        description: all that the outcomes depend on, JSON-able, by group and name.

    Raises:
        ValueError: the file belongs to an evaluation with another description (the message names what differs), or a
            line of it cannot be read.
        RuntimeError: another process has it open.
    """

    def __init__(self, path: Path, description: dict[str, dict[str, Any]]) -> None:
        self.path = path
        header: dict[str, dict[str, Any]] = json.loads(json.dumps(description))  # tuples read back as lists
        if not path.exists():
            replace_file(path, lambda new: new.write_text(json.dumps(header) + "\n", encoding="utf-8"))
        self._file = path.open("rb+")
        try:
            self._lock()
            self._outcomes = self._read(header)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"{self.path} is in use by another evaluation: choose another directory") from error

    def _read(self, description: dict[str, dict[str, Any]]) -> dict[Condition, EpisodeOutcome]:
        content = self._file.read()
        complete = content[: content.rfind(b"\n") + 1]
        lines = complete.splitlines()
        if not lines:
            raise ValueError(f"{self.path} does not say which evaluation it belongs to; remove it")
        self._check(self._parse(1, lines[0], dict), description)
        outcomes = [self._parse(number, line, _outcome) for number, line in enumerate(lines[1:], 2)]
        self._file.seek(len(complete))
        self._file.truncate()
        return {outcome.condition: outcome for outcome in outcomes}

    def _parse(self, number: int, line: bytes, make: Callable[[dict[str, Any]], T]) -> T:
        try:
            return make(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of {self.path} is damaged ({error}); remove the file") from error

    def _check(self, found: dict[str, Any], wanted: dict[str, dict[str, Any]]) -> None:
        changes = []
        for group, values in wanted.items():
            there = found.get(group, {})
            different = [name for name in {**values, **there} if there.get(name) != values.get(name)]
            changes += [f"{name}: {there.get(name)} there, {values.get(name)} here" for name in different]
        if changes:
            raise ValueError(
                f"{self.path} holds outcomes of another evaluation ({'; '.join(changes)}): choose another "
                "logger.directory, or remove the file to start again"
            )

    def __len__(self) -> int:
        return len(self._outcomes)

    def __contains__(self, condition: object) -> bool:
        return condition in self._outcomes

    def __getitem__(self, condition: Condition) -> EpisodeOutcome:
        return self._outcomes[condition]

    def add(self, outcome: EpisodeOutcome) -> None:
        """Append an outcome; it is in the file when this returns."""
        self._file.write(json.dumps(outcome._asdict()).encode() + b"\n")
        self._file.flush()
        self._outcomes[outcome.condition] = outcome

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> OutcomeJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
