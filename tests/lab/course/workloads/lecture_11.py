"""Keeps the blocks of conversations that have come back."""

from nanovllm.core.block_pool import BlockPool


class MyPool(BlockPool):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.kept = set()

    def get_new_blocks(self, count):
        ids = super().get_new_blocks(count)
        self.kept.difference_update(ids)
        return ids

    def touch(self, block_ids):
        super().touch(block_ids)
        self.kept.update(block_ids)

    def free_blocks(self, block_ids):
        block_ids = list(block_ids)
        if self.kept.intersection(block_ids):
            self.kept.update(block_ids)
        super().free_blocks(block_ids)
        for block_id in list(self.free_block_queue):
            if block_id in self.kept:
                self.free_block_queue.move_to_end(block_id)
