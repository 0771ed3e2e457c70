"""One trainer for every method and every optimizer."""

from cflat.train.checkpointer import StateNotSaved, TrainingInterrupted
from cflat.train.meter import Cost
from cflat.train.observer import EpochRecord, Observer, TaskRecord
from cflat.train.optimizers import OptimizerChoice
from cflat.train.runtime import Runtime
from cflat.train.settings import BaseSettings, RuntimeSettings, TrainSettings
from cflat.train.trainer import Inputs, RunResult, Trainer

__all__ = [
    "BaseSettings", "Cost", "EpochRecord", "Inputs", "Observer", "OptimizerChoice", "RunResult", "Runtime",
    "RuntimeSettings", "StateNotSaved", "TaskRecord", "TrainSettings", "Trainer", "TrainingInterrupted",
]  # fmt: skip
