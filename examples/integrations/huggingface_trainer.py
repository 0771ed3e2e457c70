"""Hugging Face Trainer: a tiny random BERT; accumulation and clipping through the usual arguments.

python examples/integrations/huggingface_trainer.py
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import cflat
from cflat.integrations.huggingface import FlatTrainer

torch.manual_seed(0)
config = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
)
model = BertForSequenceClassification(config)
texts = [{"input_ids": ids, "labels": ids[0] % 2} for ids in torch.randint(1, 50, (64, 12))]
optimizer = cflat.CFlatTurbo(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model, rho=0.05)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_grad_norm=1.0, num_train_epochs=2,
        use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = FlatTrainer(model, arguments, train_dataset=texts, optimizers=(optimizer, None))
    optimizer.start_task(0, num_tasks=2)
    trainer.train()
telemetry = optimizer.telemetry
print(f"{telemetry.steps} steps, {telemetry.evaluations_per_step:.2f} evaluations each")
