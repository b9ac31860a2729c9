"""A connector that claims to have loaded everything and loads nothing: what a check of tokens must notice."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class NoLoadConnector(KVConnectorBase_V1, SupportsHMA):
    def start_load_kv(self, forward_context, **kwargs): ...
    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def wait_for_save(self): ...
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return max(0, request.num_prompt_tokens - 1 - num_computed_tokens), False
        return 0, False

    def request_finished_all_groups(self, request, block_ids):
        asked = (request.kv_transfer_params or {}).get("do_remote_decode")
        return False, dict(do_remote_prefill=True) if asked else None
