"""Figures as data, and the two ways to draw them; no torch here."""

from cflat.figures.figure import Bars, Curve, FigureData, Heatmap, Panel

__all__ = ["Bars", "Curve", "FigureData", "Heatmap", "Panel"]
