"""Floor 1: the words of the project. Values are frozen, torch-free, printable, and JSON both ways."""

from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy

__all__ = ["MFC", "DeviceMesh", "Graph", "InterfaceSpec", "Kind", "Layout", "ParallelStrategy"]
