"""Avalanche: EWC on a stream of digits with C-Flat Turbo; the plugin is the only difference.

python examples/integrations/avalanche_stream.py
"""

import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.training import EWC
from avalanche.training.plugins import EvaluationPlugin
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import cflat
from cflat.integrations.avalanche import FlatPlugin

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
digits.targets = labels.tolist()
digits = as_classification_dataset(digits)
stream = nc_benchmark(digits, digits, n_experiences=5, task_labels=False, seed=0).train_stream

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = cflat.CFlatTurbo(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model=model)
strategy = EWC(
    model=model, optimizer=optimizer, criterion=torch.nn.CrossEntropyLoss(), ewc_lambda=1.0, train_mb_size=32,
    train_epochs=1, evaluator=EvaluationPlugin(), plugins=[FlatPlugin(num_tasks=5)],
)  # fmt: skip
for experience in stream:
    strategy.train(experience)
print(f"{optimizer.telemetry.steps} steps, {optimizer.telemetry.evaluations_per_step:.2f} evaluations each")
