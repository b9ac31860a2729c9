#!/usr/bin/env python3
"""Fill an offline model cache with local stand-ins, so that tests which name a
public model run with no network (HF_HUB_OFFLINE=1, HF_HOME=<out>).

Each stand-in has the public model's name and a config of the same family, but
tiny random weights and this harness's own tokenizer. A test that needs the real
model's text will fail; a test of engine or connector mechanics will not notice.

  python fake_hub.py OUT
  HF_HOME=OUT HF_HUB_OFFLINE=1 python -m pytest ...
"""

import argparse, json, os, sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import make_model  # noqa: E402

REV = "0" * 39 + "1"


def opt(hidden, layers, heads, ffn, proj):
    # Real OPT sizes (the tests derive KV shapes from them); the weights are random.
    return dict(
        architectures=["OPTForCausalLM"],
        model_type="opt",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=ffn,
        word_embed_proj_dim=proj,
        max_position_embeddings=2048,
        vocab_size=50272,
        do_layer_norm_before=(proj == hidden),
        activation_function="relu",
        dropout=0.1,
        attention_dropout=0.0,
        activation_dropout=0.0,
        init_std=0.02,
        layerdrop=0.0,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=1,
        torch_dtype="float16",
        use_cache=True,
    )


def opt_weights(c, seed=7):
    rng = np.random.default_rng(seed)
    h, f = c["hidden_size"], c["ffn_dim"]

    def t(*shape):
        return (rng.standard_normal(shape, dtype=np.float32) * np.float32(0.05)).astype(np.float16)

    w = {
        "model.decoder.embed_tokens.weight": t(c["vocab_size"], c["word_embed_proj_dim"]),
        "model.decoder.embed_positions.weight": t(c["max_position_embeddings"] + 2, h),
        "model.decoder.final_layer_norm.weight": np.ones(h, np.float16),
        "model.decoder.final_layer_norm.bias": np.zeros(h, np.float16),
    }
    for n in range(c["num_hidden_layers"]):
        p = f"model.decoder.layers.{n}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            w[p + f"self_attn.{name}.weight"], w[p + f"self_attn.{name}.bias"] = t(h, h), t(h)
        w[p + "fc1.weight"], w[p + "fc1.bias"] = t(f, h), t(f)
        w[p + "fc2.weight"], w[p + "fc2.bias"] = t(h, f), t(h)
        for ln in ("self_attn_layer_norm", "final_layer_norm"):
            w[p + ln + ".weight"], w[p + ln + ".bias"] = np.ones(h, np.float16), np.zeros(h, np.float16)
    return w


def gemma3(a):
    c = make_model.config(a)
    c.update(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        sliding_window=512,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=a.head_dim,
        rope_local_base_freq=10000.0,
        rope_theta=1000000.0,
        sliding_window_pattern=6,
        layer_types=["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(a.layers)],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=True,
    )
    return c


def gemma3_weights(a):
    w = make_model.weights(a)
    w.pop("lm_head.weight")
    for n in range(a.layers):
        p = f"model.layers.{n}."
        for name, size in (
            ("pre_feedforward_layernorm", a.hidden),
            ("post_feedforward_layernorm", a.hidden),
            ("self_attn.q_norm", a.head_dim),
            ("self_attn.k_norm", a.head_dim),
        ):
            w[p + name + ".weight"] = np.zeros(size, np.float32)
    for k in w:
        if "norm" in k:
            w[k] = np.zeros_like(w[k])  # Gemma norms multiply by (1 + w)
    return w


def put(out, name, cfg, weights=None, vocab=512):
    from safetensors.numpy import save_file

    root = os.path.join(out, "hub", "models--" + name.replace("/", "--"))
    snap = os.path.join(root, "snapshots", REV)
    os.makedirs(snap, exist_ok=True)
    os.makedirs(os.path.join(root, "refs"), exist_ok=True)
    with open(os.path.join(root, "refs", "main"), "w") as f:
        f.write(REV)
    make_model.make_tokenizer(snap, vocab, ["hi hi hi"] * 500)  # some tests count "hi" as one token
    with open(os.path.join(snap, "config.json"), "w") as f:
        json.dump(cfg, f, indent=1)
    with open(os.path.join(snap, "generation_config.json"), "w") as f:
        json.dump({k: cfg[k] for k in ("bos_token_id", "eos_token_id")}, f)
    if weights is not None:
        save_file(weights, os.path.join(snap, "model.safetensors"), metadata={"format": "pt"})
    print(name)


def args(arch, **kw):
    d = dict(
        arch=arch,
        seed=20240607,
        dtype="bfloat16",
        layers=4,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        vocab=512,
        max_len=40960,
        qk_gain=1.5,
        o_gain=2.0,
    )
    d.update(kw)
    return argparse.Namespace(**d)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    a = ap.parse_args()
    c = opt(768, 12, 12, 3072, 768)
    put(a.out, "facebook/opt-125m", c, opt_weights(c))
    put(a.out, "facebook/opt-350m", opt(1024, 24, 16, 4096, 512))  # config only
    q = args("qwen3", head_dim=128)
    put(a.out, "Qwen/Qwen3-0.6B", make_model.config(q), make_model.weights(q))
    m = args("llama")
    put(a.out, "meta-llama/Llama-3.2-1B-Instruct", make_model.config(m), make_model.weights(m))
    g = args("llama", layers=12, head_dim=256, max_len=32768)
    put(a.out, "google/gemma-3-1b-it", gemma3(g), gemma3_weights(g))


if __name__ == "__main__":
    main()
