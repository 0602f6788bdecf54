"""Files of rollouts: what is read, how advantages come about, and which line is at fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import ADVANTAGES

from hilore_plan.errors import FileError, UsageError
from hilore_plan.exposure.rollouts import Rollout, group_advantages, read_rollouts

ROW: dict[str, Any] = {"prompt": "p", "completion": "c", "reward": 1.0, "group_id": "a"}
CHAT = [{"role": "user", "content": "2 + 2?"}]


def write(path: Path, *rows: object) -> Path:
    file = path / "rollouts.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return file


def test_a_file_with_advantages(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"prompt": "", "completion": "c", "advantage": 0, "other": [1]},
        "",
        {"prompt": CHAT, "completion": CHAT, "advantage": -1.5, "reward": 2, "group_id": 7, "logps": [-1, -0.5]},
    )
    assert read_rollouts(file) == (
        Rollout("", "c", 0.0, line=1),
        Rollout(tuple(CHAT), tuple(CHAT), -1.5, 2.0, 7, (-1.0, -0.5), 3),
    )


def test_a_file_with_rewards(tmp_path: Path) -> None:
    rewards = [1.0, 0.0, None, 0.5, 0.5]
    file = write(tmp_path, *({**ROW, "reward": r, "group_id": g} for r, g in zip(rewards, "aaabb", strict=True)))
    found = read_rollouts(file)
    assert [rollout.reward for rollout in found] == rewards
    assert [rollout.advantage for rollout in found] == pytest.approx([0.70701, -0.70701, 0, 0, 0], abs=1e-5)
    assert [rollout.advantage for rollout in read_rollouts(file, "none")] == [0.5, -0.5, 0, 0, 0]


def trl_advantages(rewards: torch.Tensor, scale: str) -> torch.Tensor:
    """As TRL 1.16 has them, for groups of equal size, in fp64."""
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return centred.flatten()
    std = rewards.std() if scale == "batch" else rewards.std(1, keepdim=True)
    return (centred / (std + 1e-4)).flatten()


@given(st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=5))
def test_advantages_are_trls(groups: list[list[float]]) -> None:
    rewards = torch.tensor(groups, dtype=torch.float64)
    ids = [index for index, group in enumerate(groups) for _ in group]
    for scale in ("group", "batch", "none"):
        found = group_advantages(rewards.flatten().tolist(), ids, scale)  # type: ignore[arg-type]
        assert found == pytest.approx(trl_advantages(rewards, scale).tolist(), abs=ADVANTAGES)


@given(st.floats(-10, 10), st.integers(1, 9))
def test_equal_rewards_carry_exactly_no_signal(reward: float, count: int) -> None:
    for scale in ("group", "batch", "none"):
        found = group_advantages([reward] * count + [0.0, 1.0], ["a"] * count + ["b", "b"], scale)  # type: ignore[arg-type]
        assert found[:count] == (0.0,) * count


def test_members_of_a_group_need_not_be_neighbours() -> None:
    assert group_advantages([1.0, 5.0, 0.0, 5.0], ["a", "b", "a", "b"], "none") == (0.5, 0.0, -0.5, 0.0)
    assert group_advantages([None, None], ["a", "a"]) == (0.0, 0.0)
    with pytest.raises(UsageError, match="'rank'"):
        group_advantages([1.0], ["a"], "rank")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"prompt": NaN}', "no group_id"),
        ("[" * 100_000, "not JSON"),
        ({**ROW, "reward": float("nan")}, "`reward` is not a finite number"),
        ({**ROW, "reward": "1"}, "`reward` is not a finite number"),
        ({**ROW, "reward": True}, "`reward` is not a finite number"),
        ({**ROW, "reward": 10**400}, "`reward` is not a finite number"),
        ({**ROW, "group_id": None}, "`group_id` is null"),
        ({**ROW, "group_id": [1]}, "`group_id` is neither"),
        ({**ROW, "prompt": None}, "`prompt` is neither"),
        ({**ROW, "completion": ""}, "`completion` is neither"),
        ({**ROW, "completion": [{"role": "user"}]}, "`completion` is neither"),
        ({**ROW, "logps": [0.0, None]}, "`logps` is not"),
        ({**ROW, "logps": 1.0}, "`logps` is not"),
        ({"prompt": "p", "completion": "c", "group_id": "a"}, "no reward"),
        ({"prompt": "p", "completion": "c", "advantage": 1.0}, "no group_id and no reward, though it has an advantage"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_the_line(tmp_path: Path, row: object, what: str) -> None:
    file = write(tmp_path, ROW, "", row)
    with pytest.raises(FileError) as caught:
        read_rollouts(file)
    assert caught.value.message.startswith(f"{file}, line 3: {what}")
    assert "group_id" in caught.value.hint


def test_a_bad_advantage_names_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "p", "completion": "c", "advantage": None})
    with pytest.raises(FileError, match="line 1: `advantage` is not a finite number"):
        read_rollouts(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read"):
        read_rollouts(tmp_path / "missing")
    with pytest.raises(FileError, match="cannot read"):
        read_rollouts(tmp_path)
    with pytest.raises(FileError, match="has no rollouts"):
        read_rollouts(write(tmp_path, ""))
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(FileError, match="line 1: not JSON"):
        read_rollouts(tmp_path / "latin")


def test_line_separators_inside_text_end_no_line_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    row = {"prompt": "a\u2028b\u0085", "completion": "c", "advantage": 1}
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\r\n")
    assert read_rollouts(file)[0].prompt == row["prompt"]


def test_rollouts_load_without_torch() -> None:
    code = "import sys, hilore_plan.exposure.rollouts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
