"""What all ranks of an engine report of their KV transfers, as one report."""

from collections.abc import Sequence

from nanovllm.data.outputs import KVConnectorOutput


class OutputAggregator:
    """Combines the reports of all ranks: a transfer has ended when it has ended on every rank, and
    a block is invalid if it is invalid on any."""

    def __init__(self) -> None:
        self._reports: dict[str, list[KVConnectorOutput]] = {}  # request id -> of the ranks so far

    def add(self, outputs: Sequence[KVConnectorOutput]) -> KVConnectorOutput:
        """Take a report of each rank after a step; returns what is true of all ranks now."""
        together = KVConnectorOutput()
        for output in outputs:
            for request_id in output.finished_sending | output.finished_recving:
                reports = self._reports.setdefault(request_id, [])
                reports.append(output.of(request_id))
                if len(reports) == len(outputs):
                    for report in self._reports.pop(request_id):
                        together.add(report)
        return together
