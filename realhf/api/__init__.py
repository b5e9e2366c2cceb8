"""Level 1: the data types shared by all packages: frozen, torch-free and JSON-serializable."""

from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy

__all__ = ["MFC", "DeviceMesh", "Graph", "InterfaceSpec", "Kind", "Layout", "ParallelStrategy"]
