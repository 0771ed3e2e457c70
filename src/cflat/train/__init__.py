"""One trainer for every method and every optimizer."""

from cflat.train.loop import Inputs, OptimizerChoice, RunResult, StateNotSaved, TrainingInterrupted, run_stream
from cflat.train.observer import Observer
from cflat.train.runtime import Runtime
from cflat.train.settings import BaseSettings, RuntimeSettings, TrainSettings

__all__ = [
    "BaseSettings",
    "Inputs",
    "Observer",
    "OptimizerChoice",
    "RunResult",
    "Runtime",
    "RuntimeSettings",
    "StateNotSaved",
    "TrainSettings",
    "TrainingInterrupted",
    "run_stream",
]
