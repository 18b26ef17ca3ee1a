"""One rank of Megatron-core on the CPU: loads what Holdfast wrote, or saves torch_dist, and writes its logits. Run as a script.

RANK=0 WORLD_SIZE=2 python megatron_core_worker.py RENDEZVOUS_FILE JOBS.json
"""

import argparse
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


class NoTracker:
    def fork(self, *_):
        return nullcontext()


class WideTorch:
    """The torch module, where float32 is float64 and no tensor is made on CUDA."""

    float32 = torch.float64

    def ones(self, *shape, device=None, **more):
        return torch.ones(*shape, **more)

    def __getattr__(self, name):
        return getattr(torch, name)


def patch():
    """The places where Megatron-core 0.16.1 insists on CUDA or, for its rotary tables, on fp32."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
    from megatron.core.transformer import utils

    for module in (rotary_pos_embedding, yarn_rotary_pos_embedding, utils):
        module.torch = WideTorch()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    import megatron.core.tensor_parallel as tensor_parallel

    tensor_parallel.get_cuda_rng_tracker = lambda *_: NoTracker()


def build(job):
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = job["args"]
    llama = args["swiglu"]
    window = args["window_size"]
    config = TransformerConfig(
        num_layers=args["num_layers"], hidden_size=args["hidden_size"], num_attention_heads=args["num_attention_heads"],
        num_query_groups=args["num_query_groups"], ffn_hidden_size=args["ffn_hidden_size"], kv_channels=args["kv_channels"],
        layernorm_epsilon=args["layernorm_epsilon"], normalization=args["normalization"],
        add_bias_linear=args["add_bias_linear"], gated_linear_unit=llama,
        activation_func=torch.nn.functional.silu if llama else torch.nn.functional.gelu, bias_activation_fusion=False,
        use_cpu_initialization=True, bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float64, apply_rope_fusion=False,
        tensor_model_parallel_size=dist.get_world_size(), qk_layernorm=args["qk_layernorm"], add_qkv_bias=args["add_qkv_bias"],
        window_size=tuple(window) if window else None, window_attn_skip_freq=args["window_attn_skip_freq"],
    )  # fmt: skip
    for name, value in args.items():  # the model reads YaRN's from the configuration
        if name.startswith("yarn_"):
            setattr(config, name, value)
    sizes = {"vocab_size": args["padded_vocab_size"], "max_sequence_length": args["max_position_embeddings"]}
    if job["family"] == "bert":
        model = BertModel(
            config, num_tokentypes=2, transformer_layer_spec=bert_layer_local_spec, add_binary_head=True,
            share_embeddings_and_output_weights=True, **sizes,
        )  # fmt: skip
    else:
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization=args["normalization"], qk_layernorm=args["qk_layernorm"]),
            **sizes,
            position_embedding_type=args["position_embedding_type"], rotary_base=args["rotary_base"],
            rotary_percent=args["rotary_percent"], rope_scaling=args["use_rope_scaling"],
            rope_scaling_factor=args["rope_scaling_factor"],
            seq_len_interpolation_factor=args["rotary_seq_len_interpolation_factor"],
            share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        )  # fmt: skip
    return model.double().eval()


def logits_of(model, job):
    ids = torch.tensor(job["ids"])[None]
    tokens = ids.shape[1]
    with torch.no_grad():
        if job["family"] == "bert":
            logits, sentence = model(ids, torch.ones_like(ids), torch.zeros_like(ids))
        else:
            mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)
            logits, sentence = model(ids, torch.arange(tokens)[None], mask), None
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.contiguous())
    return torch.cat(parts, -1)[0].numpy(), None if sentence is None else sentence[0].numpy()


def load(model, job):
    """Strictly: nothing missing, nothing left over, except the empty _extra_state that only Megatron writes."""
    path = Path(job["folder"]) / f"release/mp_rank_{dist.get_rank():02d}/model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(path, weights_only=True)
    result = model.load_state_dict(state["model"], strict=False)
    missing = [name for name in result.missing_keys if not name.endswith("_extra_state")]
    assert not missing and not result.unexpected_keys, (missing, result.unexpected_keys)


def randomise(model, seed):
    """The same whole model on any number of ranks is not needed: each layout is compared with its own logits."""
    generator = torch.Generator().manual_seed(seed)
    rank = dist.get_rank()
    for parameter in model.parameters():
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
        if getattr(parameter, "tensor_model_parallel", False):
            value += 0.01 * rank
        parameter.data.copy_(value)


def save(model, job):
    from megatron.core import dist_checkpointing

    state = {
        **model.sharded_state_dict(),
        "args": argparse.Namespace(**job["args"]),
        "iteration": 5,
        "checkpoint_version": 3.0,
    }
    folder = Path(job["folder"]) / "iter_0000005"
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder))
    (Path(job["folder"]) / "latest_checkpointed_iteration.txt").write_text("5")


def main():
    patch()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(world, 1)
    for job in json.loads(Path(sys.argv[2]).read_text()):
        model = build(job)
        if job["do"] == "load":
            load(model, job)
        else:
            randomise(model, seed=len(job["folder"]))
            save(model, job)
        logits, sentence = logits_of(model, job)
        if rank == 0:
            np.save(job["logits"], logits)
            if sentence is not None:
                np.save(job["logits"].replace(".npy", ".sentence.npy"), sentence)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
