"""The optimizers at home in other people's loops: one module per client, which alone imports that client.

`lightning`, `huggingface` (Trainer), `accelerate`, `avalanche` and `infty` (PILOT, PyCIL); see docs/integrations.
Without them a loop needs nothing but ``step(closure)`` or ``passes()``, or `MicroBatches` where it accumulates
gradients before it steps.
"""

from cflat.integrations._micro_batches import MicroBatches

__all__ = ["MicroBatches"]
