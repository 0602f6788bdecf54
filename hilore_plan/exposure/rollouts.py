"""Rollouts from a JSONL file: what calibration reads instead of sampling its own.

One JSON object per line, blank lines are skipped:

    {"prompt": "2 + 2 =", "completion": " 4", "reward": 1.0, "group_id": "a"}

`prompt` and `completion` are text, or chat messages (`[{"role": "user", "content": "..."}]`). Either every line has an
`advantage`, which is then taken as it is, or every line has a `reward` (null: nobody could score it) and a `group_id`.
`logps`, optional, are the log-probs of the completion's tokens when it was sampled. Other keys are left alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from hilore_plan.errors import FileError, UsageError

ScaleRewards = Literal["group", "batch", "none"]
Text = str | tuple[dict[str, str], ...]

# TRL adds this to the standard deviation
_EPSILON = 1e-4
_FORM = 'a line is {"prompt": ..., "completion": ..., "advantage": ...} or {..., "reward": ..., "group_id": ...}'


@dataclass(frozen=True)
class Rollout:
    """One completion. `line` is where it stands in the file, from 1; `logps` has one value per completion token."""

    prompt: Text
    completion: Text
    advantage: float
    reward: float | None = None
    group_id: str | int | None = None
    logps: tuple[float, ...] | None = None
    line: int = 0


def read_rollouts(path: str | Path, scale_rewards: ScaleRewards = "group") -> tuple[Rollout, ...]:
    """The rollouts in a file, in its order, with advantages.

    Args:
        path: a JSONL file; see above.
        scale_rewards: as TRL's; see `group_advantages`. Without effect where the file has advantages.

    Raises:
        FileError: the file cannot be read, has no rollouts, or a line is not as it must be: the error names the line.
        UsageError: an unknown `scale_rewards`.
    """
    rows = list(_rows(Path(path)))
    if not rows:
        raise FileError(f"{path} has no rollouts", _FORM)
    if all("advantage" in row for _, row in rows):
        return tuple(_rollout(path, line, row, _number(path, line, row, "advantage")) for line, row in rows)
    return _with_group_advantages(path, rows, scale_rewards)


def group_advantages(
    rewards: Sequence[float | None], groups: Sequence[str | int], scale_rewards: ScaleRewards = "group"
) -> tuple[float, ...]:
    """Advantages as GRPO and TRL define them: (reward - mean) / (std + 1e-4), the mean over the group.

    The standard deviation is the unbiased one, over the group (`group`), over all rewards (`batch`), or left out
    (`none`). A reward of None counts nowhere and has the advantage 0, as has the only reward of a group. Equal rewards
    give exactly 0, whatever rounding would make of their mean: 0 is what says that a row carries no signal.

    Raises:
        UsageError: an unknown `scale_rewards`.
    """
    if scale_rewards not in get_args(ScaleRewards):
        raise UsageError(f"scale_rewards={scale_rewards!r} is unknown", f"use {', '.join(get_args(ScaleRewards))}")
    members: dict[str | int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).extend([] if reward is None else [reward])
    means = {group: _mean(values) for group, values in members.items()}
    everything = [reward for reward in rewards if reward is not None]
    scales = {group: _scale(everything if scale_rewards == "batch" else its) for group, its in members.items()}
    return tuple(
        0.0 if reward is None else (reward - means[group]) / (1 if scale_rewards == "none" else scales[group])
        for reward, group in zip(rewards, groups, strict=True)
    )


def _mean(values: list[float]) -> float:
    if not values or min(values) == max(values):
        return values[0] if values else 0.0
    return math.fsum(values) / len(values)


def _scale(values: list[float]) -> float:
    """The unbiased standard deviation and TRL's epsilon."""
    if len(values) < 2:
        return _EPSILON
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) + _EPSILON


def _with_group_advantages(
    path: str | Path, rows: list[tuple[int, dict[str, Any]]], scale_rewards: ScaleRewards
) -> tuple[Rollout, ...]:
    for line, row in rows:
        if missing := {"reward", "group_id"} - row.keys():
            other = ", though it has an advantage, which other lines lack" if "advantage" in row else ""
            raise _fault(path, line, f"no {' and no '.join(sorted(missing))}{other}")
    found = [_rollout(path, line, row, 0.0) for line, row in rows]
    groups = [rollout.group_id for rollout in found if rollout.group_id is not None]
    advantages = group_advantages([rollout.reward for rollout in found], groups, scale_rewards)
    return tuple(replace(rollout, advantage=value) for rollout, value in zip(found, advantages, strict=True))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with their line numbers."""
    try:
        lines = path.read_bytes().splitlines()  # of bytes: text has separators that end no line of JSON
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}", "give a JSONL file of rollouts") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _row(path, number, line)


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise _fault(path, number, f"not JSON ({str(error)[:80]})") from error
    if not isinstance(row, dict):
        raise _fault(path, number, "not a JSON object")
    return row


def _rollout(path: str | Path, line: int, row: dict[str, Any], advantage: float) -> Rollout:
    logps = row.get("logps")
    if logps is not None and not (isinstance(logps, list) and all(map(_is_number, logps))):
        raise _fault(path, line, "`logps` is not a list of finite numbers")
    return Rollout(
        prompt=_text(path, line, row, "prompt"),
        completion=_text(path, line, row, "completion"),
        advantage=advantage,
        reward=None if row.get("reward") is None else _number(path, line, row, "reward"),
        group_id=_group(path, line, row),
        logps=None if logps is None else tuple(map(float, logps)),
        line=line,
    )


def _text(path: str | Path, line: int, row: dict[str, Any], key: str) -> Text:
    value = row.get(key)
    if isinstance(value, str) and (value or key == "prompt"):
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return tuple(value)
    raise _fault(path, line, f"`{key}` is neither text nor a list of messages with role and content")


def _group(path: str | Path, line: int, row: dict[str, Any]) -> str | int | None:
    value = row.get("group_id")
    if isinstance(value, bool) or not isinstance(value, (str, int, type(None))):
        raise _fault(path, line, "`group_id` is neither text nor a whole number")
    if value is None and "advantage" not in row:
        raise _fault(path, line, "`group_id` is null")
    return value


def _number(path: str | Path, line: int, row: dict[str, Any], key: str) -> float:
    if not _is_number(row[key]):
        raise _fault(path, line, f"`{key}` is not a finite number")
    return float(row[key])


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond what a float holds
        return False


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _fault(path: str | Path, line: int, what: str) -> FileError:
    return FileError(f"{path}, line {line}: {what}", _FORM)
