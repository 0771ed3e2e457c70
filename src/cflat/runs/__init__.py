"""Runs: one configuration trained in a folder of its own, here or on a cluster."""
