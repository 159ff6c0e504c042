"""Layers that stand beside attention."""
