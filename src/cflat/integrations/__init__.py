"""The optimizers at home in other people's loops: one module per client, which alone imports that client.

`lightning`, `huggingface` (Trainer), `accelerate`, `avalanche` and `infty` (PILOT, PyCIL); see docs/integrations.
Without them a loop needs nothing but ``step(closure)`` or ``passes()``.
"""
