"""Channel statistics that inputs and backbones share."""

# Of CIFAR-100, as in PyCIL and PILOT.
CIFAR_MEAN, CIFAR_STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
