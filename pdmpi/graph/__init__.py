"""The model as data: layers, the tensors between them, tied parameters. No torch."""

from pdmpi.graph.graph import Layer, LayerGraph, Ref, TensorSpec

__all__ = ["Layer", "LayerGraph", "Ref", "TensorSpec"]
