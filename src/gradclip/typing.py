"""Types for annotations in your own code. Importing them imports no framework.

| what | names |
|---|---|
| arguments | `Threshold`, `Thresholds`, `NamedThresholds`, `Parameters`, `Where`, `UnitAxis`, `AxisName`, `Mask`, ... |
| words | `Ord`, `Policy`, `Integers`, `RuleName`, `Relation`, `Unit`, `Method`, `OnMistake` |
| what attaching returns | `StepClipping`, `EngineClipping`, `UpdateClipping`, `ClippedInBackward`, `StepGuard` |
| records of a `Monitor` | `Step`, `Counts`, `Columns`, `Layers`, `LayerTable`, `LayerOfSpike`, `Advice`, `Candidate` |
| records of other calls | `Trial`, `Example`, `LayerOfExample`, `SensitivityCase`, `Plan`, `PlannedLeaf` |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradclip._src.annotations import (
    AxisName,
    Dataclass,
    Dtype,
    HasDtype,
    HasGrad,
    HasItemsize,
    Integers,
    Mask,
    Meshes,
    Method,
    NamedThresholds,
    Node,
    OnMistake,
    Ord,
    Parameters,
    Policy,
    ProcessGroups,
    Relation,
    RuleName,
    Scalar,
    Several,
    StepPolicy,
    SumDtype,
    Threshold,
    Thresholds,
    Tree,
    Unit,
    UnitAxis,
    Where,
    WideDtype,
)

if TYPE_CHECKING:
    from gradclip._src.explained import Example, LayerOfExample
    from gradclip._src.guard.step import StepGuard
    from gradclip._src.monitor.advice import Advice, Candidate
    from gradclip._src.monitor.records import Columns, Counts, LayerOfSpike, Layers, LayerTable, Step
    from gradclip._src.private.audit.self_test import SensitivityCase
    from gradclip._src.private.ghost.plan import Plan, PlannedLeaf
    from gradclip._src.step.engine import EngineClipping
    from gradclip._src.step.handle import StepClipping
    from gradclip._src.step.in_backward import ClippedInBackward
    from gradclip._src.step.update import UpdateClipping
    from gradclip._src.thresholds.following import FollowingRule
    from gradclip._src.thresholds.search.trials import Trial

__all__ = [
    "Advice",
    "AxisName",
    "Candidate",
    "ClippedInBackward",
    "Columns",
    "Counts",
    "Dataclass",
    "Dtype",
    "EngineClipping",
    "Example",
    "FollowingRule",
    "HasDtype",
    "HasGrad",
    "HasItemsize",
    "Integers",
    "LayerOfExample",
    "LayerOfSpike",
    "LayerTable",
    "Layers",
    "Mask",
    "Meshes",
    "Method",
    "NamedThresholds",
    "Node",
    "OnMistake",
    "Ord",
    "Parameters",
    "Plan",
    "PlannedLeaf",
    "Policy",
    "ProcessGroups",
    "Relation",
    "RuleName",
    "Scalar",
    "SensitivityCase",
    "Several",
    "Step",
    "StepClipping",
    "StepGuard",
    "StepPolicy",
    "SumDtype",
    "Threshold",
    "Thresholds",
    "Tree",
    "Trial",
    "Unit",
    "UnitAxis",
    "UpdateClipping",
    "Where",
    "WideDtype",
]

_WHEN_USED = {
    "Advice": "gradclip._src.monitor.advice",
    "Candidate": "gradclip._src.monitor.advice",
    "ClippedInBackward": "gradclip._src.step.in_backward",
    "Columns": "gradclip._src.monitor.records",
    "Counts": "gradclip._src.monitor.records",
    "EngineClipping": "gradclip._src.step.engine",
    "Example": "gradclip._src.explained",
    "FollowingRule": "gradclip._src.thresholds.following",
    "LayerOfExample": "gradclip._src.explained",
    "LayerOfSpike": "gradclip._src.monitor.records",
    "LayerTable": "gradclip._src.monitor.records",
    "Layers": "gradclip._src.monitor.records",
    "Plan": "gradclip._src.private.ghost.plan",
    "PlannedLeaf": "gradclip._src.private.ghost.plan",
    "SensitivityCase": "gradclip._src.private.audit.self_test",
    "Step": "gradclip._src.monitor.records",
    "StepClipping": "gradclip._src.step.handle",
    "StepGuard": "gradclip._src.guard.step",
    "Trial": "gradclip._src.thresholds.search.trials",
    "UpdateClipping": "gradclip._src.step.update",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import what stands in other parts of gradclip on first access."""
        if name not in _WHEN_USED:
            raise AttributeError(f"module 'gradclip.typing' has no attribute {name!r}", name=name)
        found = globals()[name] = getattr(import_module(_WHEN_USED[name]), name)
        return found


def __dir__() -> list[str]:
    return __all__
