"""Continual-learning methods: one file each, registered by itself."""

from cflat.methods._base import Extract, Loss, Method, ParamGroup, Phase, StreamInfo
from cflat.methods._catalog import MethodSpec, register_method
from cflat.methods.factory import create_method, get_method_spec, list_methods

__all__ = [
    "Extract",
    "Loss",
    "Method",
    "MethodSpec",
    "ParamGroup",
    "Phase",
    "StreamInfo",
    "create_method",
    "get_method_spec",
    "list_methods",
    "register_method",
]
