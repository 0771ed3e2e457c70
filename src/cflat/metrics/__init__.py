"""Metrics of a continual learner: everything that is said about accuracy follows from one matrix of counts."""

from cflat.metrics.accuracy import METRICS, AccuracyMatrix, Metric

__all__ = ["METRICS", "AccuracyMatrix", "Metric"]
