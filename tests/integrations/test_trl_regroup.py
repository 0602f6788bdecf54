"""Regrouping in TRL's trainer: on a stand-in that hands out micro-batches as it does, and in the real one."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plans
import pytest
import torch
from integrations.test_launcher import save_plan
from models import FAMILIES
from setups.trl_runs import MARKS, Setup, make_model, make_sft, make_uneven_grpo, parameters_of
from tolerances import OTHER_ORDER_FP32

import hilore_plan
from hilore_plan.errors import RefusedError
from hilore_plan.exposure.losses import LOSS_TYPES
from hilore_plan.integrations.launcher import launch
from hilore_plan.integrations.trl import attach_to
from hilore_plan.integrations.trl_micro_batches import completion_lengths, joined, picked
from hilore_plan.integrations.trl_regroup import Counts, Settings, regroup_steps, settings_for

Inputs = dict[str, Any]
PROMPT, WIDTH, ROWS = 3, 9, 2


# --- windows: which micro-batches share their rows ---


class GRPOTrainer:
    """What regrouping touches of TRL's trainer, which generates, buffers and hands out as TRL 1.16 does."""

    __module__ = "trl.trainer.grpo_trainer"

    def __init__(self, steps_per_generation: int, accumulation: int, iterations: int = 1, **arguments: Any) -> None:
        settings = {"loss_type": "grpo", "beta": 0.0, "max_completion_length": WIDTH, **arguments}
        self.args = SimpleNamespace(steps_per_generation=steps_per_generation, **settings)
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(num_processes=1, sync_gradients=False)
        self.current_gradient_accumulation_steps = accumulation
        self.num_iterations = iterations
        self.generations = 0
        self.used: list[tuple[int, list[int]]] = []
        self._accumulation = accumulation
        self._buffered_inputs: list[Inputs] | None = None
        self._step = 0
        self._optimizer_step = 0

    def compute_loss(self, model: Any, inputs: Inputs) -> None:
        """As in TRL."""

    def _compute_loss(self, model: Any, inputs: Inputs) -> None:
        """As in TRL."""

    def _prepare_inputs(self, batch: Any) -> Inputs:
        if not self.model.training:
            return batch
        count = self.args.steps_per_generation
        if self._step % (count * self.num_iterations) == 0 or self._buffered_inputs is None:
            self._buffered_inputs = [make_inputs(self.generations * count + number) for number in range(count)]
            self.generations += 1
        return self._buffered_inputs[self._step % count]

    def epoch(self, steps: int) -> None:
        """Micro-batches of one epoch; its last optimizer step may have fewer."""
        for first in range(0, steps, self._accumulation):
            self.current_gradient_accumulation_steps = min(self._accumulation, steps - first)
            for number in range(self.current_gradient_accumulation_steps):
                self.accelerator.sync_gradients = number == self.current_gradient_accumulation_steps - 1
                inputs = self._prepare_inputs(None)
                self.used.append((self._optimizer_step, inputs["row"].tolist()))
                self._step += 1
            self._optimizer_step += 1

    def rows_of_steps(self) -> dict[int, list[int]]:
        """The rows that each optimizer step has seen."""
        found: dict[int, list[int]] = {}
        for step, rows in self.used:
            found[step] = sorted([*found.get(step, []), *rows])
        return found


def make_inputs(number: int) -> Inputs:
    """The micro-batch of that number: rows of any lengths, as wide as the longest of all may be."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    return {
        "row": torch.arange(ROWS) + number * ROWS,
        "prompt_ids": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.ones(ROWS, WIDTH, dtype=torch.long),
        "completion_mask": (torch.arange(WIDTH) < lengths[:, None]).long(),
        "advantages": torch.randn(ROWS, generator=generator),
        "num_items_in_batch": torch.tensor(17),
        "names": [f"{number}.{row}" for row in range(ROWS)],
        "nothing": None,
    }


# micro-batches per generation, accumulation, iterations, micro-batches per epoch
WINDOWS = [
    (4, 4, 1, [8]),
    (8, 4, 1, [16]),
    (8, 2, 2, [32]),
    (2, 4, 1, [8]),
    (2, 4, 2, [8]),
    (3, 2, 1, [12]),
    (3, 2, 2, [12]),
    (4, 1, 1, [4]),
    (4, 4, 1, [6, 6]),
    (4, 3, 2, [7, 7]),
]


@pytest.mark.parametrize(("per_generation", "accumulation", "iterations", "epochs"), WINDOWS)
def test_rows_stay_in_their_optimizer_step(
    per_generation: int, accumulation: int, iterations: int, epochs: Sequence[int]
) -> None:
    plain = GRPOTrainer(per_generation, accumulation, iterations)
    mine = GRPOTrainer(per_generation, accumulation, iterations)
    regrouping = regroup_steps(mine)
    for trainer in (plain, mine):
        for steps in epochs:
            trainer.epoch(steps)
    assert mine.rows_of_steps() == plain.rows_of_steps()
    assert [len(rows) for _, rows in mine.used] == [ROWS] * len(plain.used)
    half = len(plain.used) // 2
    for part in (slice(half), slice(half, None)):
        assert (mine.used[part] != plain.used[part]) == (accumulation > 1)
    assert regrouping.counts.tokens < regrouping.counts.tokens_before == len(plain.used) * ROWS * (PROMPT + WIDTH)
    regrouping.undo()
    assert "_prepare_inputs" not in vars(mine)


@pytest.mark.parametrize(("ranks", "equal"), [(1, False), (2, True)])
def test_on_several_ranks_micro_batches_keep_as_many_rows_as_others_gather_of(ranks: int, equal: bool) -> None:
    trainer = GRPOTrainer(4, 4, loss_type="dapo")
    trainer.accelerator.num_processes = ranks
    regroup_steps(trainer)
    trainer.epoch(8)
    assert ({len(rows) for _, rows in trainer.used} == {ROWS}) == equal


def test_what_is_left_of_a_generation_goes_with_it() -> None:
    trainer = GRPOTrainer(4, 4)
    regroup_steps(trainer)
    trainer._prepare_inputs(None)
    trainer._step, trainer._buffered_inputs = 1, None
    assert min(trainer._prepare_inputs(None)["row"].tolist()) >= 4 * ROWS


def test_each_micro_batch_is_cut_to_its_own_longest_completion() -> None:
    trainer = GRPOTrainer(4, 4)
    regroup_steps(trainer)
    for step in range(4):
        trainer.accelerator.sync_gradients = step == 3
        inputs = trainer._prepare_inputs(None)
        longest = int(inputs["completion_mask"].sum(1).max())
        assert inputs["completion_ids"].shape == inputs["completion_mask"].shape == (ROWS, longest)
        assert inputs["prompt_ids"].shape == (ROWS, PROMPT)
        assert inputs["names"] == [f"{row // ROWS}.{row % ROWS}" for row in inputs["row"].tolist()]
        assert inputs["num_items_in_batch"] == 17
        assert inputs["nothing"] is None
        trainer._step += 1
    assert all(batch["completion_ids"].shape == (ROWS, WIDTH) for batch in trainer._buffered_inputs or [])


def test_evaluation_is_left_alone_and_so_is_all_after_undo() -> None:
    trainer = GRPOTrainer(4, 4)
    regrouping = regroup_steps(GRPOTrainer)
    try:
        trainer.model.training = False
        assert trainer._prepare_inputs("as it is") == "as it is"
        trainer.model.training = True
        assert trainer._prepare_inputs(None)["completion_ids"].shape[1] <= WIDTH
        prepare = trainer._prepare_inputs
    finally:
        regrouping.undo()
    regrouping.undo()
    assert prepare(None)["completion_ids"].shape[1] == WIDTH  # a wrapper that somebody holds does nothing


# --- rows as tensors ---


def test_completions_are_as_wide_as_the_last_token_that_counts() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    assert completion_lengths({"completion_mask": mask}, 1) == [2, 3, 1, 5]
    assert completion_lengths({"completion_mask": mask}, 2) == [2, 4, 2, 5]


def test_what_is_per_token_is_cut_and_what_is_per_row_is_not() -> None:
    inputs = {
        "prompt_ids": torch.arange(6).reshape(2, 3),
        "completion_ids": torch.arange(6).reshape(2, 3),
        "old_per_token_logps": torch.randn(2, 3),
        "importance_sampling_ratio": torch.randn(2, 1),
        "advantages": torch.tensor([1.0, 2.0]),
    }
    found = picked(inputs, [1], 2)
    assert found["prompt_ids"].tolist() == [[3, 4, 5]]
    assert found["completion_ids"].tolist() == [[3, 4]]
    assert found["old_per_token_logps"].shape == (1, 2)
    assert found["importance_sampling_ratio"].shape == (1, 1)
    assert found["advantages"].tolist() == [2.0]


@pytest.mark.parametrize("more", [{"num_images": [1, 1]}, {"pixel_values": torch.zeros(5, 3)}])
def test_inputs_that_are_not_one_for_each_row_are_refused(more: Inputs) -> None:
    with pytest.raises(RefusedError, match=f"input {next(iter(more))} does not have one item for each row"):
        joined([{**make_inputs(0), **more}])


# --- what is refused ---


class GMPOTrainer(GRPOTrainer):
    """A subclass with another loss."""

    __module__ = "elsewhere"

    def _compute_loss(self, model: Any, inputs: Inputs) -> None:
        """Not as in TRL."""


BOTH = Settings(leave_out_silent=True)
REFUSED: list[tuple[Any, Settings, str]] = [
    (GRPOTrainer(1, 1, loss_type="bnpo"), Settings(), "bnpo divides by the tokens"),
    (GRPOTrainer(1, 1, top_entropy_quantile=0.5), Settings(), "top_entropy_quantile"),
    (GRPOTrainer(1, 1, entropy_coef=0.1), Settings(), "entropy bonus"),
    (GMPOTrainer(1, 1), Settings(), "GMPOTrainer has a loss of its own"),
    (GRPOTrainer(1, 1, beta=0.1), BOTH, "left out: beta=0.1"),
]


@pytest.mark.parametrize(("trainer", "settings", "why"), REFUSED, ids=[why for *_, why in REFUSED])
def test_what_would_change_the_gradient_is_refused_before_anything_is_generated(
    trainer: GRPOTrainer, settings: Settings, why: str
) -> None:
    regroup_steps(trainer, settings)
    with pytest.raises(RefusedError, match=why):
        trainer._prepare_inputs(None)
    assert trainer.generations == 0


def test_rows_are_not_left_out_on_several_ranks_or_of_advantages_centred_over_the_batch() -> None:
    trainer = GRPOTrainer(1, 1)
    regroup_steps(trainer, Settings(regroup=False, leave_out_silent=True))
    trainer.accelerator.num_processes = 2
    with pytest.raises(RefusedError, match="2 processes"):
        trainer._prepare_inputs(None)
    trainer.accelerator.num_processes = 1
    trainer.multi_objective_aggregation = "normalize_then_sum"  # type: ignore[attr-defined]
    with pytest.raises(RefusedError, match="centred over the batch"):
        trainer._prepare_inputs(None)
    trainer.multi_objective_aggregation = "sum_then_normalize"  # type: ignore[attr-defined]
    trainer._prepare_inputs(None)


def test_other_trainers_are_refused_by_name() -> None:
    class SFTTrainer:
        model = SimpleNamespace(training=True)

        def _prepare_inputs(self, inputs: Inputs) -> Inputs:
            return inputs

    with pytest.raises(RefusedError, match="object has no method _prepare_inputs"):
        regroup_steps(object)
    trainer = SFTTrainer()
    regroup_steps(trainer)
    with pytest.raises(RefusedError, match="SFTTrainer has no _buffered_inputs: only TRL's GRPOTrainer"):
        trainer._prepare_inputs({})


def test_settings_for_a_plan_come_from_its_buckets() -> None:
    import samples

    assert settings_for(samples.plan()) == Settings(saving=0.0)
    plan = samples.compressing_plan()
    slow = plan.entries[-1].predicted
    fast = plan.entries[0].model_copy(
        update={"predicted": slow.model_copy(update={"step_seconds": 0.75 * slow.step_seconds})}
    )
    plan = plan.model_copy(update={"entries": (fast, *plan.entries[1:])})
    assert settings_for(plan, leave_out_silent=True) == Settings(saving=pytest.approx(0.25), leave_out_silent=True)


# --- the real trainer ---


def trained(
    folder: Path, settings: Mapping[str, Any], how: Settings | None, plan: bool = False
) -> tuple[dict[str, torch.Tensor], Counts]:
    """How much training moves each parameter of a model in fp64, and what regrouping did."""
    common = {"optim": "sgd", "gradient_accumulation_steps": 4, "max_completion_length": 12, "max_grad_norm": 1e9}
    trainer = make_uneven_grpo(Setup({**common, **settings}, dtype=torch.float64), folder)
    before = parameters_of(trainer)
    regrouping = None if how is None else regroup_steps(trainer, how)
    attachment = attach_to(trainer, plans.make_plan(trainer.model)) if plan else None
    torch.manual_seed(1)
    trainer.train()
    for thing in (attachment, regrouping):
        if thing is not None:
            thing.undo()
    moved = {name: after - before[name] for name, after in parameters_of(trainer).items()}
    return moved, Counts() if regrouping is None else regrouping.counts


def off(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    difference = sum(float((got[name] - want[name]).square().sum()) for name in want)
    return math.sqrt(difference / sum(float(step.square().sum()) for step in want.values()))


LOSSES = [
    *({"loss_type": loss} for loss in LOSS_TYPES if loss != "bnpo"),
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
    {"loss_type": "dapo", "num_iterations": 2},
    {"loss_type": "dapo", "steps_per_generation": 8, "num_iterations": 2, "max_steps": 4},
    {"loss_type": "dr_grpo", "steps_per_generation": 2},
    {"loss_type": "sapo", "mask_truncated_completions": True, "pad_to_multiple_of": 4},
]


def test_a_command_in_which_no_rows_were_regrouped_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_plan(FAMILIES["llama"].build(), tmp_path / "plan.json")
    report = {"process": 1, "rank": 0, "trainers": ["Other"], "error": None, "runtimes": [{}], "text": "ran"}
    (tmp_path / "other.py").write_text(OTHER.format(report=json.dumps(report)))
    for words, told in (([], False), (["rows"], True), (["silent"], True)):
        assert launch(tmp_path / "plan.json", [sys.executable, str(tmp_path / "other.py")], regroup=words) == 0
        error = capfd.readouterr().err
        assert error.startswith("ran\n")
        assert ("no rows were regrouped or left out" in error) == told


OTHER = """
import os
from pathlib import Path
(Path(os.environ["HILORE_REPORT"]) / "report-1.json").write_text('{report}')
"""


class TestTheRealTrainer:
    pytestmark = MARKS

    @pytest.mark.parametrize("settings", LOSSES, ids=str)
    def test_takes_the_same_steps(self, tmp_path: Path, settings: Mapping[str, Any]) -> None:
        want, _ = trained(tmp_path, settings, None)
        got, counts = trained(tmp_path, settings, Settings() if settings.get("beta") else BOTH)
        assert off(got, want) < OTHER_ORDER_FP32
        assert counts.tokens < counts.tokens_before
        assert bool(counts.left_out) == (not settings.get("beta"))

    @pytest.mark.parametrize(("loss", "regroup"), [("bnpo", False), ("dapo", False), ("dapo", True), ("grpo", True)])
    def test_takes_the_same_steps_with_one_of_both(self, tmp_path: Path, loss: str, regroup: bool) -> None:
        want, _ = trained(tmp_path, {"loss_type": loss}, None)
        got, counts = trained(tmp_path, {"loss_type": loss}, Settings(regroup, leave_out_silent=not regroup))
        assert off(got, want) < OTHER_ORDER_FP32
        assert counts.tokens < counts.tokens_before

    def test_takes_the_same_steps_under_a_plan(self, tmp_path: Path) -> None:
        want, _ = trained(tmp_path, {}, BOTH)
        got, _ = trained(tmp_path, {}, BOTH, plan=True)
        assert all(torch.equal(got[name], want[name]) for name in want)

    def test_sft_is_refused(self, tmp_path: Path) -> None:
        trainer = make_sft(Setup(), tmp_path)
        regroup_steps(trainer)
        with pytest.raises(RefusedError, match="SFTTrainer has no _buffered_inputs"):
            trainer.train()

    @pytest.mark.parametrize("loss", ["dapo", "bnpo"])
    def test_is_regrouped_by_the_launcher(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], loss: str
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PACKAGE, TESTS]))
        save_plan(make_model(Setup(), tmp_path), tmp_path / "plan.json")
        (tmp_path / "train.py").write_text(TRAIN)
        command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path), loss]
        if loss == "bnpo":
            with pytest.raises(RefusedError, match="bnpo divides by the tokens"):
                launch(tmp_path / "plan.json", command, regroup=["rows"])
            assert "Traceback" not in capfd.readouterr().err
        else:
            assert launch(tmp_path / "plan.json", command, regroup=["rows", "silent"]) == 0
            lines = capfd.readouterr().err.splitlines()
            assert re.fullmatch(
                r"  [\d,]+ tokens trained, padding included: \d+% less than [\d,]+; \d+ rows .*", lines[-1]
            )


PACKAGE, TESTS = str(Path(hilore_plan.__file__).parents[1]), str(Path(__file__).parents[1])
TRAIN = """
import sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from setups.trl_runs import Setup, make_uneven_grpo
make_uneven_grpo(Setup({"loss_type": sys.argv[2]}), Path(sys.argv[1])).train()
"""
