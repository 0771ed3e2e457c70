"""Experiments: what a run is configured by, where its results go, and how runs are compared."""
