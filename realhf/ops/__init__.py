"""Numeric functions in plain torch, each kernel next to its reference implementation. No communication."""
