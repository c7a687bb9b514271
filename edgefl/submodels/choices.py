"""Submodels as objects, with their options: ``OutputSide(cut=3)``, ``Width(gamma=0.5)``."""

from __future__ import annotations

from edgefl.contract.choice import SubmodelChoice, built_upon
from edgefl.submodels.early_exit.fit import early_exit
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.output_side.submodel import output_side
from edgefl.submodels.structured.submodel import importance_structured
from edgefl.submodels.width.submodel import width

OutputSide = built_upon(SubmodelChoice, "output_side", "OutputSide", output_side)
Width = built_upon(SubmodelChoice, "width", "Width", width)
Importance = built_upon(SubmodelChoice, "importance", "Importance", importance)
ImportanceStructured = built_upon(
    SubmodelChoice, "importance_structured", "ImportanceStructured", importance_structured
)
EarlyExit = built_upon(SubmodelChoice, "early_exit", "EarlyExit", early_exit)
