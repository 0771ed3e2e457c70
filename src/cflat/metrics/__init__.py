"""Metrics of a continual learner: all accuracies follow from one matrix of counts."""

from cflat.metrics.accuracy import HEADLINES, METRICS, AccuracyMatrix, Metric, metric_title
from cflat.metrics.paired import PairedDifference, Spread, paired_difference, spread

__all__ = [
    "HEADLINES", "METRICS", "AccuracyMatrix", "Metric", "PairedDifference", "Spread", "metric_title",
    "paired_difference", "spread",
]  # fmt: skip
