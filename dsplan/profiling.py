"""`with dsplan.profiling.profile("section"):` names a part of a script in traces and in the times that are printed."""

from strategies.engine.telemetry import profile

__all__ = ["profile"]
