"""Compresses all orders as one stream, so that each refers to those before it."""

import pickle
import zlib


class Encoder:
    def __init__(self):
        self.stream = zlib.compressobj(9)

    def encode(self, plan):
        order = self.stream.compress(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL))
        return order + self.stream.flush(zlib.Z_SYNC_FLUSH)


class Decoder:
    def __init__(self):
        self.stream = zlib.decompressobj()

    def decode(self, order):
        return pickle.loads(self.stream.decompress(order))
