"""What vLLM calls in each of its processes at start, by the entry point of this package."""


def register() -> None:
    """Makes the connector known by its name, so that no module path is needed. Imports nothing else."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KvConnector", "kv_connector.vllm", "KvConnector")
