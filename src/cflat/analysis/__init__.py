"""What training does to the loss around the weights: gradient dynamics, sharpness, curvature, slices.

Everything here takes callables and parameters, never trainers, so that it works in any loop.
"""
