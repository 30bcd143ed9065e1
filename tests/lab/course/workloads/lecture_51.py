"""Sends each request where the fewest are unfinished, times how long requests have taken there."""

from nanovllm.simulate.fleet import RoundRobin


class MyRouter(RoundRobin):
    def __init__(self, num_replicas):
        super().__init__(num_replicas)
        self.loads = [0] * num_replicas
        self.unfinished = [0] * num_replicas
        self.looked = [0] * num_replicas
        self.seconds = [1.0] * num_replicas  # of all requests
        self.finished = [1] * num_replicas

    def choose(self, request, now):
        def expected(replica):
            time = self.seconds[replica] / self.finished[replica]
            return (self.loads[replica] + 1) * time

        return min(range(self.num_replicas), key=expected)

    def set_load(self, replica, engine, now):
        unfinished = engine.num_waiting + engine.num_running
        self.seconds[replica] += (now - self.looked[replica]) / 1e12 * self.unfinished[replica]
        self.finished[replica] += unfinished < self.unfinished[replica]
        self.unfinished[replica] = unfinished
        self.looked[replica] = now
        self.loads[replica] = 4 * engine.num_waiting + engine.num_running
