"""Megatron checkpoints of every epoch, written by torch from a known truth: the tests' own restatement of the layouts.

Nothing here uses Holdfast's code: rows are ordered with torch's reshape and stack, and files are written with torch.save.
"""

import argparse
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Spec:
    family: str = "gpt"
    layers: int = 4
    hidden: int = 16
    heads: int = 4
    ffn: int = 24
    positions: int = 12
    vocab: int = 101
    multiple: int = 8
    dtype: torch.dtype = torch.float16
    groups: int | None = None
    swiglu: bool = False
    seed: int = 0

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_groups(self) -> int:
        return self.groups or self.heads

    def padded(self, tp: int) -> int:
        step = self.multiple * tp
        return (self.vocab + step - 1) // step * step


def make_truth(spec: Spec, padded: int | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors under neutral names; matrices as [out, in]. The word table has padding rows if `padded` says so."""
    generator = torch.Generator().manual_seed(spec.seed)

    def normal(*shape, scale=0.3):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(spec.dtype)

    h, kv = spec.hidden, spec.kv_groups * spec.head
    t = {"word": normal(padded or spec.vocab, h)}
    llama = spec.swiglu
    if not llama:
        t["position"] = normal(spec.positions, h)
    if spec.family == "bert":
        t["tokentype"] = normal(2, h)
    for i in range(spec.layers):
        t[f"{i}.ln1.w"] = 1 + normal(h)
        t[f"{i}.q.w"], t[f"{i}.k.w"], t[f"{i}.v.w"] = normal(h, h), normal(kv, h), normal(kv, h)
        t[f"{i}.o.w"] = normal(h, h)
        t[f"{i}.ln2.w"] = 1 + normal(h)
        if llama:
            t[f"{i}.gate.w"], t[f"{i}.up.w"] = normal(spec.ffn, h), normal(spec.ffn, h)
        else:
            t[f"{i}.fc1.w"], t[f"{i}.fc1.b"] = normal(spec.ffn, h), normal(spec.ffn)
            t[f"{i}.fc2.b"], t[f"{i}.o.b"] = normal(h), normal(h)
            t[f"{i}.ln1.b"], t[f"{i}.ln2.b"] = normal(h), normal(h)
            t[f"{i}.q.b"], t[f"{i}.k.b"], t[f"{i}.v.b"] = normal(h), normal(kv), normal(kv)
        t[f"{i}.fc2.w"] = normal(h, spec.ffn)
    t["lnf.w"] = 1 + normal(h)
    if not llama:
        t["lnf.b"] = normal(h)
    if llama:
        t["head"] = normal(padded or spec.vocab, h)
    if spec.family == "bert":
        t["pooler.w"], t["pooler.b"] = normal(h, h), normal(h)
        t["lm.dense.w"], t["lm.dense.b"] = normal(h, h), normal(h)
        t["lm.ln.w"], t["lm.ln.b"] = 1 + normal(h), normal(h)
        t["lm.bias"] = normal(padded or spec.vocab)
        t["nsp.w"], t["nsp.b"] = normal(2, h), normal(2)
    return t


def as_huggingface(spec: Spec, t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The truth as the Hugging Face model of the family stores it, without padding."""
    if spec.swiglu:
        return _as_llama(spec, t)
    return _as_gpt2(spec, t) if spec.family == "gpt" else _as_megatron_bert(spec, t)


def _as_gpt2(spec, t):
    hf = {"transformer.wte.weight": t["word"][: spec.vocab], "transformer.wpe.weight": t["position"]}
    for i in range(spec.layers):
        p = f"transformer.h.{i}."
        for ours, theirs in (("ln1", "ln_1"), ("ln2", "ln_2")):
            hf[f"{p}{theirs}.weight"], hf[f"{p}{theirs}.bias"] = t[f"{i}.{ours}.w"], t[f"{i}.{ours}.b"]
        hf[f"{p}attn.c_attn.weight"] = torch.cat([t[f"{i}.{x}.w"] for x in "qkv"]).T
        hf[f"{p}attn.c_attn.bias"] = torch.cat([t[f"{i}.{x}.b"] for x in "qkv"])
        for ours, theirs in (("o", "attn.c_proj"), ("fc1", "mlp.c_fc"), ("fc2", "mlp.c_proj")):
            hf[f"{p}{theirs}.weight"], hf[f"{p}{theirs}.bias"] = t[f"{i}.{ours}.w"].T, t[f"{i}.{ours}.b"]
    hf["transformer.ln_f.weight"], hf["transformer.ln_f.bias"] = t["lnf.w"], t["lnf.b"]
    return hf


def _as_llama(spec, t):
    hf = {"model.embed_tokens.weight": t["word"][: spec.vocab], "lm_head.weight": t["head"][: spec.vocab]}
    hf["model.norm.weight"] = t["lnf.w"]
    names = (
        ("ln1", "input_layernorm"), ("ln2", "post_attention_layernorm"), ("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"),
        ("v", "self_attn.v_proj"), ("o", "self_attn.o_proj"), ("gate", "mlp.gate_proj"), ("up", "mlp.up_proj"),
        ("fc2", "mlp.down_proj"),
    )  # fmt: skip
    for i in range(spec.layers):
        for ours, theirs in names:
            hf[f"model.layers.{i}.{theirs}.weight"] = t[f"{i}.{ours}.w"]
    return hf


def _as_megatron_bert(spec, t):
    e = "bert.embeddings."
    hf = {
        f"{e}word_embeddings.weight": t["word"][: spec.vocab],
        f"{e}position_embeddings.weight": t["position"],
        f"{e}token_type_embeddings.weight": t["tokentype"],
        "bert.encoder.ln.weight": t["lnf.w"],
        "bert.encoder.ln.bias": t["lnf.b"],
        "cls.predictions.bias": t["lm.bias"][: spec.vocab],
    }
    names = (
        ("ln1", "attention.ln"), ("q", "attention.self.query"), ("k", "attention.self.key"), ("v", "attention.self.value"),
        ("o", "attention.output.dense"), ("ln2", "ln"), ("fc1", "intermediate.dense"), ("fc2", "output.dense"),
    )  # fmt: skip
    for i in range(spec.layers):
        for ours, theirs in names:
            for short, long in (("w", "weight"), ("b", "bias")):
                hf[f"bert.encoder.layer.{i}.{theirs}.{long}"] = t[f"{i}.{ours}.{short}"]
    for ours, theirs in (
        ("pooler", "bert.pooler.dense"), ("lm.dense", "cls.predictions.transform.dense"),
        ("lm.ln", "cls.predictions.transform.LayerNorm"), ("nsp", "cls.seq_relationship"),
    ):  # fmt: skip
        hf[f"{theirs}.weight"], hf[f"{theirs}.bias"] = t[f"{ours}.w"], t[f"{ours}.b"]
    return hf


def qkv_of_rank(spec, t, i, kind, version, tp, rank):
    """Query, key and value rows of one tensor rank in the order of a checkpoint version."""
    q, k, v = (t[f"{i}.{x}.{kind}"].chunk(tp)[rank] for x in "qkv")
    d, tail = spec.head, q.shape[1:]
    groups = spec.kv_groups // tp
    if version == 0:
        return torch.cat([q, k, v])
    if version == 1:
        return torch.stack([x.view(groups, d, *tail) for x in (q, k, v)], dim=2).reshape(-1, *tail)
    q = q.view(groups, -1, d, *tail)
    return torch.cat([q, k.view(groups, 1, d, *tail), v.view(groups, 1, d, *tail)], dim=1).reshape(-1, *tail)


LEGACY = {
    "qkv": "query_key_value",
    "o": "dense",
    "ln2": "post_attention_layernorm",
    "fc1": "dense_h_to_4h",
    "fc2": "dense_4h_to_h",
}
MCORE = {"qkv": "linear_qkv", "o": "linear_proj", "ln2": "pre_mlp_layernorm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


def layer_of_rank(spec, t, i, version, tp, rank, table, attention):
    """One layer's parameters of one rank, named below `layers.N.`."""
    found = {}
    for kind, long in (("w", "weight"), ("b", "bias")):
        if f"{i}.ln1.{kind}" not in t:
            continue
        found[f"input_layernorm.{long}"] = t[f"{i}.ln1.{kind}"]
        found[f"{table['ln2']}.{long}"] = t[f"{i}.ln2.{kind}"]
        found[f"{attention}.{table['qkv']}.{long}"] = qkv_of_rank(spec, t, i, kind, version, tp, rank)
        o, fc2 = t[f"{i}.o.{kind}"], t[f"{i}.fc2.{kind}"]
        found[f"{attention}.{table['o']}.{long}"] = o.chunk(tp, 1)[rank] if kind == "w" else o
        found[f"mlp.{table['fc2']}.{long}"] = fc2.chunk(tp, 1)[rank] if kind == "w" else fc2
        if spec.swiglu:
            parts = [t[f"{i}.{x}.{kind}"].chunk(tp)[rank] for x in ("gate", "up")]
            found[f"mlp.{table['fc1']}.{long}"] = torch.cat(parts)
        else:
            found[f"mlp.{table['fc1']}.{long}"] = t[f"{i}.fc1.{kind}"].chunk(tp)[rank]
    return found


def model_part(spec, t, layers, first, last, version, tp, rank, names, pp):
    """The `model` entry of one rank and chunk."""
    table, attention = (
        (MCORE, "self_attention")
        if names == "mcore"
        else (LEGACY, "self_attention" if names == "legacy" else "attention")
    )
    stack = OrderedDict()
    for local, i in enumerate(layers):
        for name, tensor in layer_of_rank(spec, t, i, version, tp, rank, table, attention).items():
            stack[f"layers.{local}.{name}"] = tensor.clone()
    if last:
        stack["final_layernorm.weight"] = t["lnf.w"]
        if "lnf.b" in t:
            stack["final_layernorm.bias"] = t["lnf.b"]
    word = t["word"].chunk(tp)[rank].clone()
    heads = {}
    if last and spec.family == "bert":
        heads = {
            "lm_head": {
                "bias": t["lm.bias"].chunk(tp)[rank].clone(), "dense.weight": t["lm.dense.w"], "dense.bias": t["lm.dense.b"],
                "layernorm.weight": t["lm.ln.w"], "layernorm.bias": t["lm.ln.b"],
            },
            "binary_head": {"weight": t["nsp.w"], "bias": t["nsp.b"]},
            "pooler": {"dense.weight": t["pooler.w"], "dense.bias": t["pooler.b"]},
        }  # fmt: skip
    if names == "mcore":
        return _mcore_part(spec, t, stack, heads, word, first, last, tp, rank, pp)
    language = {}
    if first:
        language["embedding"] = {"word_embeddings": {"weight": word}, "position_embeddings": {"weight": t["position"]}}
        if spec.family == "bert":
            language["embedding"]["tokentype_embeddings"] = {"weight": t["tokentype"]}
    language["encoder" if names == "legacy" else "transformer"] = stack
    if "pooler" in heads:
        language["pooler"] = heads.pop("pooler")
    model = {"language_model": language, **heads}
    if last and pp > 1:
        model["word_embeddings_for_head"] = {"weight": word.clone()}
    return model


def _mcore_part(spec, t, stack, heads, word, first, last, tp, rank, pp):
    prefix = "decoder" if spec.family == "gpt" else "encoder"
    flat = OrderedDict()
    if first:
        flat["embedding.word_embeddings.weight"] = word
        if "position" in t:
            flat["embedding.position_embeddings.weight"] = t["position"]
        if spec.family == "bert":
            flat["embedding.tokentype_embeddings.weight"] = t["tokentype"]
    flat.update({f"{prefix}.{name}": tensor for name, tensor in stack.items()})
    flat[f"{prefix}.layers.0.self_attention.core_attention._extra_state"] = None
    if heads:
        flat["output_layer.bias"] = heads["lm_head"].pop("bias")
        for name in ("lm_head", "binary_head", "pooler"):
            for key, tensor in heads[name].items():
                flat[f"{name}.{key.replace('layernorm', 'layer_norm')}"] = tensor
    if last and "head" in t:
        flat["output_layer.weight"] = t["head"].chunk(tp)[rank].clone()
    elif last and pp > 1:
        flat["output_layer.weight"] = word.clone()
    return flat


def make_args(spec: Spec, tp: int, pp: int, version: float, **more) -> argparse.Namespace:
    sizes = (
        {"model_parallel_size": tp}
        if version < 3
        else {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    )
    values = {
        "num_layers": spec.layers, "hidden_size": spec.hidden, "num_attention_heads": spec.heads, "ffn_hidden_size": spec.ffn,
        "max_position_embeddings": spec.positions, "padded_vocab_size": spec.padded(tp), "layernorm_epsilon": 1e-5,
        "make_vocab_size_divisible_by": spec.multiple, "params_dtype": spec.dtype, "bias_gelu_fusion": False,
        "openai_gelu": True, "hidden_dropout": 0.1, "attention_dropout": 0.1, **sizes,
    }  # fmt: skip
    if spec.swiglu:
        values |= {
            "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_base": 10000,
            "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0,
            "group_query_attention": spec.groups is not None, "num_query_groups": spec.groups or 1,
        }  # fmt: skip
    return argparse.Namespace(**(values | more))


def stages_of(spec: Spec, pp: int, vpp: int, uneven: tuple[int, ...] | None = None) -> list[list[range]]:
    """[stage][chunk] → the layers there, by Megatron's schedule."""
    if uneven:
        ends = [sum(uneven[: n + 1]) for n in range(pp)]
        return [[range(end - count, end)] for end, count in zip(ends, uneven, strict=True)]
    each = spec.layers // pp // vpp
    return [[range((v * pp + p) * each, (v * pp + p + 1) * each) for v in range(vpp)] for p in range(pp)]


def write_megatron(
    folder: Path, spec: Spec, t, version=3.0, tp=1, pp=1, vpp=1, names="legacy", args=True, zip_form=True, uneven=None,
    iteration=100, **more_args,
) -> Path:  # fmt: skip
    """A run folder with one iteration; returns it."""
    stages = stages_of(spec, pp, vpp, uneven)
    total = pp * vpp
    for p in range(pp):
        for rank in range(tp):
            state = {"iteration": iteration}
            if version:
                state["checkpoint_version"] = version
            if args:
                state["args"] = make_args(spec, tp, pp, version, **more_args)
            for v, layers in enumerate(stages[p]):
                index = v * pp + p
                part = model_part(spec, t, layers, index == 0, index == total - 1, version, tp, rank, names, pp)
                state["model" if vpp == 1 else f"model{v}"] = part
            name = f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{p:03d}"
            path = folder / f"iter_{iteration:07d}" / name / "model_optim_rng.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path, _use_new_zipfile_serialization=zip_form)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder
