#!/usr/bin/env python3
"""Make a tiny, random-weight, fully local causal LM that real vLLM can serve.

No download: the tokenizer is a byte-level BPE trained on text that this script
makes up, and the weights come from numpy's PCG64 with a fixed seed, so two
calls with the same arguments write the same bytes (the printed digest says so)
and P and D hold identical weights even when each makes its own copy.

The weights are scaled up (attention logits with a std near 1) so that greedy
output depends on the whole KV cache: a test that loses, zeroes or swaps blocks
must give other tokens. `pd_run.py --negative-control` checks just that.
"""

import argparse, hashlib, json, os

import numpy as np


def corpus():
    rng = np.random.default_rng(1)
    words = (
        "the a one two three red green blue quick slow fox dog bird river stone "
        "tree house light night morning moves jumps reads writes sends holds keeps "
        "block cache token prefill decode transfer remote local memory layer head "
        "and or but then while under over near far 0 1 2 3 4 5 6 7 8 9 . , ; :"
    ).split()
    for _ in range(400):
        yield " ".join(rng.choice(words, size=24))


def make_tokenizer(out, vocab, extra=()):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        [*corpus(), *extra],
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=["<s>", "</s>"],
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", model_max_length=1 << 20)
    fast.save_pretrained(out)
    n = tok.get_vocab_size()
    assert n <= vocab, n


def config(a):
    c = dict(
        hidden_size=a.hidden,
        intermediate_size=a.hidden * 2,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        vocab_size=a.vocab,
        max_position_embeddings=a.max_len,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        hidden_act="silu",
        torch_dtype=a.dtype,
        use_cache=True,
        attention_bias=False,
        attention_dropout=0.0,
        initializer_range=0.02,
        rope_theta=10000.0,
    )
    if a.arch == "qwen3":
        c.update(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    else:
        c.update(architectures=["LlamaForCausalLM"], model_type="llama", mlp_bias=False)
    return c


def weights(a):
    rng = np.random.default_rng(a.seed)
    h, d, ff = a.hidden, a.head_dim, a.hidden * 2

    def lin(o, i, gain=1.0):
        return rng.standard_normal((o, i), dtype=np.float32) * np.float32(gain / np.sqrt(i))

    w = {"model.embed_tokens.weight": rng.standard_normal((a.vocab, h), dtype=np.float32)}
    for n in range(a.layers):
        p = f"model.layers.{n}."
        w[p + "self_attn.q_proj.weight"] = lin(a.heads * d, h, a.qk_gain)
        w[p + "self_attn.k_proj.weight"] = lin(a.kv_heads * d, h, a.qk_gain)
        w[p + "self_attn.v_proj.weight"] = lin(a.kv_heads * d, h)
        w[p + "self_attn.o_proj.weight"] = lin(h, a.heads * d, a.o_gain)
        if a.arch == "qwen3":
            w[p + "self_attn.q_norm.weight"] = np.ones(d, np.float32)
            w[p + "self_attn.k_norm.weight"] = np.ones(d, np.float32)
        w[p + "mlp.gate_proj.weight"] = lin(ff, h)
        w[p + "mlp.up_proj.weight"] = lin(ff, h)
        w[p + "mlp.down_proj.weight"] = lin(h, ff)
        w[p + "input_layernorm.weight"] = np.ones(h, np.float32)
        w[p + "post_attention_layernorm.weight"] = np.ones(h, np.float32)
    w["model.norm.weight"] = np.ones(h, np.float32)
    w["lm_head.weight"] = lin(a.vocab, h, 2.0)
    return w


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    ap.add_argument("--arch", choices=["llama", "qwen3"], default="llama")
    ap.add_argument("--seed", type=int, default=20240607)
    ap.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--hidden", type=int, default=256)
    ap.add_argument("--heads", type=int, default=4)
    ap.add_argument("--kv-heads", type=int, default=2)
    ap.add_argument("--head-dim", type=int, default=64)
    ap.add_argument("--vocab", type=int, default=512)
    ap.add_argument("--max-len", type=int, default=8192)
    ap.add_argument("--qk-gain", type=float, default=1.5)
    ap.add_argument("--o-gain", type=float, default=2.0)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    make_tokenizer(a.out, a.vocab)
    with open(os.path.join(a.out, "config.json"), "w") as f:
        json.dump(config(a), f, indent=1)
    with open(os.path.join(a.out, "generation_config.json"), "w") as f:
        json.dump(dict(bos_token_id=0, eos_token_id=1, do_sample=False), f)
    w = weights(a)
    path = os.path.join(a.out, "model.safetensors")
    if a.dtype == "float32":
        from safetensors.numpy import save_file

        save_file(w, path, metadata={"format": "pt"})
    else:
        import torch
        from safetensors.torch import save_file

        save_file(
            {k: torch.from_numpy(v).to(getattr(torch, a.dtype)).contiguous() for k, v in w.items()},
            path,
            metadata={"format": "pt"},
        )
    sha = hashlib.sha256(open(path, "rb").read()).hexdigest()
    nbytes = sum(v.size for v in w.values())
    elt = 4 if a.dtype == "float32" else 2
    print(
        f"{a.arch} {nbytes / 1e6:.2f}M parameters, {os.path.getsize(path) / 1e6:.1f} MB, "
        f"KV {2 * a.layers * a.kv_heads * a.head_dim * elt} bytes/token, sha256 {sha[:16]}"
    )


if __name__ == "__main__":
    main()
