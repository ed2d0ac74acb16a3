"""Records decode steps and replays them for similar steps: as CUDA graphs, or as lists of calls on the CPU."""

from hybridmem.memory.recorded.model import RecordedModel, run_recorded

__all__ = ["RecordedModel", "run_recorded"]
