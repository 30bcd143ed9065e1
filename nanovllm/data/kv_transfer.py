"""Records of engines that share KV, and of a request's KV. Clients and routers get both as
JSON."""

from typing import NotRequired, TypedDict


class ConnectorInformation(TypedDict):
    """How clients, routers and peers see an engine that shares KV.

    Attributes:
        engine_id: its name among all engines.
        kv_connector, kv_role: see `KVTransferConfig`.
        kv_host, kv_port: where consumers reach it; None if it is not a producer. Only engines that
            transfer KV to each other have these fields and the next.
        block_size: tokens per KV block.
    """

    engine_id: str
    kv_connector: str
    kv_role: str
    kv_host: NotRequired[str | None]
    kv_port: NotRequired[int | None]
    block_size: NotRequired[int]


class RemoteKV(TypedDict):
    """Where the KV of a finished prompt is: a producer's answer, which becomes `kv_transfer_params`
    of the request to a consumer. The names are vLLM's.

    Attributes:
        do_remote_prefill, do_remote_decode: see `TransferParams`.
        remote_engine_id: the producer.
        remote_request_id: under which the producer holds the blocks.
        remote_block_ids: the blocks of the prompt, in its order.
        remote_host, remote_port: where the consumer reaches the producer.
        remote_num_tokens: tokens of the prompt.
        tp_size: the producer's ranks of tensor parallelism.
        virtual_time: with device "sleep", when the producer had computed it: whole seconds, and
            picoseconds; see `executor.virtual_clock`.
    """

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: list[int]
    remote_host: str | None
    remote_port: int | None
    remote_num_tokens: int
    tp_size: int
    virtual_time: NotRequired[tuple[int, int]]
