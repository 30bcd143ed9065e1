"""Second part of lecture 23: stages that take equally long.

A pipeline is as fast as its slowest stage. Layers are not equal: the embedding and the output head
count with the first and the last, some have experts, some a sliding window. Counted are the time
units of the slowest stage, for three models on 2, 4 and 8 stages.
"""

from nanovllm.distributed.pipeline_parallel import layer_range


def layers_per_stage(costs: list[int], stages: int) -> list[int]:
    """Return how many layers each stage has, in order.

    Args:
        costs: the time units of each layer.
    """
    return [len(layer_range(len(costs), stages, stage)) for stage in range(stages)]
