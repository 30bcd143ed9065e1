"""Predicts how a fleet of engines serves a workload: the engine's own scheduler, memory and routers
on a virtual clock. Only the time of a model's step is computed instead of measured."""
