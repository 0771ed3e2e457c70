"""Hugging Face Trainer, the real one, on a tiny random GPT-2: each run equals the loop by hand bit for bit."""

from __future__ import annotations

import by_hand
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import cflat
from cflat.integrations.huggingface import FlatSteps, FlatTrainer
from faults import differences

CONFIG = {"vocab_size": 40, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}


def gpt():
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(**CONFIG, bos_token_id=0, eos_token_id=0))


def texts(num=24):
    generator = torch.Generator().manual_seed(5)
    return [{"input_ids": row, "labels": row} for row in torch.randint(1, 40, (num, 10), generator=generator)]


def adam(row, model, **settings):
    return row.make(torch.optim.AdamW(model.parameters(), lr=2e-3), model=model, **settings)


def trainer_for(folder, row, cls=FlatTrainer, data=None, **options):
    model = gpt()
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True, seed=3, logging_steps=1, dataloader_pin_memory=False,
        **{"save_strategy": "no", "num_train_epochs": 1, "max_grad_norm": 0.0, **options},
    )  # fmt: skip
    optimizer = adam(row, model)
    return cls(model, arguments, train_dataset=data or texts(), optimizers=(optimizer, None)), model, optimizer


def hand_written(row, trainer, accumulate=1, bf16=False, max_norm=None):
    """The trainer lends its data loader and its count of tokens per step, by which it divides; the loop is ours."""
    model = gpt()
    model.config.use_cache = trainer.model.config.use_cache  # switched off by trainers: attention rounds otherwise
    flat = adam(row, model, options=cflat.StepOptions(max_norm=max_norm))
    torch.manual_seed(3)
    batches = list(zip(trainer.get_train_dataloader(), trainer.counts, strict=True))
    steps = by_hand.windows(batches, accumulate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(flat, lambda step: max(0.0, 1 - step / len(steps)))
    model.train()
    torch.manual_seed(77)

    for micro_batches in steps:

        def closure(micro_batches=micro_batches):
            for batch, num_tokens in micro_batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = model(**batch, num_items_in_batch=num_tokens).loss
                loss.backward()

        flat.step(closure)
        scheduler.step()
    return model, flat


class _Seeded:
    """Draw the same dropout as the loop by hand, whatever the trainer has drawn for its data."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not hasattr(self, "counts"):
            torch.manual_seed(77)
            self.counts = []
        self.counts.append(num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)


class Seeded(_Seeded, FlatTrainer):
    pass


@pytest.mark.parametrize("row", by_hand.ROWS, ids=str)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_training_equals_the_loop_by_hand(row, accumulate, bf16, tmp_path):
    """With 6 batches and 4 micro-batches a step, the last step has two."""
    trainer, model, flat = trainer_for(tmp_path, row, Seeded, gradient_accumulation_steps=accumulate, bf16=bf16)
    trainer.train()
    expected, twin = hand_written(row, trainer, accumulate, bf16)
    assert trainer.state.global_step == twin.telemetry.steps
    assert not differences(dict(model.state_dict()), dict(expected.state_dict()))
    assert not differences(flat.state_dict()["wrapper"], twin.state_dict()["wrapper"])
    assert not differences(flat.state_dict()["state"], twin.state_dict()["state"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_max_grad_norm_clips_the_direction(accumulate, tmp_path):
    row = by_hand.ROWS[2]
    trainer, model, _ = trainer_for(tmp_path, row, Seeded, gradient_accumulation_steps=accumulate, max_grad_norm=0.5)
    trainer.train()
    expected, _ = hand_written(row, trainer, accumulate, max_norm=0.5)
    assert not differences(dict(model.state_dict()), dict(expected.state_dict()))
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert norms
    assert max(norms) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("row", by_hand.ROWS, ids=str)
def test_a_run_resumes_to_the_same_weights(row, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    whole, model, flat = trainer_for(tmp_path / "whole", row, **options)
    whole.train()
    resumed, other, twin = trainer_for(tmp_path / "resumed", row, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert twin.telemetry.as_dict() == flat.telemetry.as_dict()
    assert not differences(dict(other.state_dict()), dict(model.state_dict()))


def test_a_trainer_of_ones_own_mixes_it_in(tmp_path):
    class Own(FlatSteps, Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            return 2 * super().compute_loss(model, inputs, **kwargs)

    trainer, _, flat = trainer_for(tmp_path, by_hand.ROWS[2], Own)
    trainer.train()
    assert (flat.telemetry.steps, flat.telemetry.evaluations) == (6, 24)


def test_what_cannot_work_is_refused(tmp_path):
    trainer, _, _ = trainer_for(tmp_path, by_hand.ROWS[1])
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="Use bf16=True"):
        trainer.train()
    trainer, _, _ = trainer_for(tmp_path, by_hand.ROWS[1], Trainer)
    with pytest.raises(cflat.ClosureError, match="needs a closure"):
        trainer.train()
    trainer, model, _ = trainer_for(tmp_path, by_hand.ROWS[1])
    trainer.optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(cflat.ClosureError, match="Expected an optimizer of cflat, got AcceleratedOptimizer"):
        trainer.train()
    trainer, _, flat = trainer_for(tmp_path, by_hand.ROWS[1], max_grad_norm=1.0)
    flat.options = cflat.StepOptions(max_norm=2.0)
    with pytest.raises(ValueError, match=r"max_grad_norm is 1.0 and StepOptions\(max_norm=...\) is 2.0"):
        trainer.train()
