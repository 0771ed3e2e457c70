"""One trainer for every method and every optimizer."""

from cflat.train.loop import RunResult, run_stream
from cflat.train.meters import Cost
from cflat.train.observer import Observer
from cflat.train.records import EpochRecord, TaskRecord
from cflat.train.runtime import Runtime
from cflat.train.settings import BaseSettings, RuntimeSettings, TrainSettings
from cflat.train.state import Inputs, OptimizerChoice, StateNotSaved, TrainingInterrupted

__all__ = [
    "BaseSettings", "Cost", "EpochRecord", "Inputs", "Observer", "OptimizerChoice", "RunResult", "Runtime",
    "RuntimeSettings", "StateNotSaved", "TaskRecord", "TrainSettings", "TrainingInterrupted", "run_stream",
]  # fmt: skip
