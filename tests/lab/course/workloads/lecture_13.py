"""Lets a short prompt overtake, by at most what its length is worth."""

from nanovllm.core.scheduler import Scheduler


class MyScheduler(Scheduler):
    def add_request(self, request):
        number = request.order[1]
        request.order = (number + request.num_tokens / K, number)
        super().add_request(request)


K = 16
