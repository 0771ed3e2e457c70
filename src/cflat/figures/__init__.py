"""Figures as data, and the two ways to draw them; no torch here."""

from cflat.figures.model import Bars, Curve, FigureData, Heatmap, Panel

__all__ = ["Bars", "Curve", "FigureData", "Heatmap", "Panel"]
