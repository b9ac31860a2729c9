"""The connector for vLLM, loaded by name:

    --kv-transfer-config '{"kv_connector": "KvConnector", "kv_connector_module_path": "kv_connector.vllm",
                           "kv_role": "kv_producer"}'

and `kv_consumer` on the decode side. The package's README has the whole way from `pip install` to two servers and a proxy.
"""

from . import versions

versions.check()

from .._vllm_plugin import register  # noqa: E402
from .connector import KvConnector  # noqa: E402  (the check gives a better message than a failed import)

# Where the entry point was not loaded: a MultiConnector looks for its parts by name.
register()

__all__ = ["KvConnector"]
