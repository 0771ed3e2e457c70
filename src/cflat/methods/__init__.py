"""Continual-learning methods: one file each, registered by itself."""

from cflat._registry import import_modules
from cflat.methods._base import Extract, Loss, Method, ParamGroup, Phase, Replay, Seen, StreamInfo
from cflat.methods._catalog import MethodSpec, create_method, get_method_spec, list_methods, register_method

__all__ = [
    "Extract", "Loss", "Method", "MethodSpec", "ParamGroup", "Phase", "Replay", "Seen", "StreamInfo",
    "create_method", "get_method_spec", "list_methods", "register_method",
]  # fmt: skip

# Last: the files of the methods import the names above from this package.
import_modules(__name__, __path__)
