"""MNIST-C and CIFAR-10-C made from the clean test sets, for those who do not have the published files.

Made and published sets have the same layout and distribution, but other random draws: results on a made set are to be
reported as such. Needs what ``pip install pathprox[experiments]`` brings.
"""

from pathprox.experiments.corruptions.cifar import CIFAR10_C, CIFAR10_C_EXTRA
from pathprox.experiments.corruptions.make import make_cifar10_c, make_mnist_c
from pathprox.experiments.corruptions.mnist import MNIST_C

__all__ = ["CIFAR10_C", "CIFAR10_C_EXTRA", "MNIST_C", "make_cifar10_c", "make_mnist_c"]
