"""Megatron's `args` ↔ Architecture: what a checkpoint states about its own function, and what its shapes show.

The invariant: a setting that changes the function and is not understood is refused, never ignored.
"""

from collections.abc import Mapping
from typing import Any, Literal

from holdfast.conversion.megatron.rope import rotary_args, rotary_fields
from holdfast.conversion.megatron.settings import refuse_setting
from holdfast.conversion.model import WORD_EMBEDDINGS, Architecture, padded_size, read_real, read_size
from holdfast.conversion.tensors import Tensor
from holdfast.system.errors import HoldfastError

TRUE_SIZES = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
HEADS_UNKNOWN = "the file has no args, and the shapes do not show the number of heads: give --num-attention-heads"
SAME_NAMES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "max_position_embeddings", "normalization", "norm_epsilon", "swiglu", "hidden_dropout",
    "untie_embeddings_and_output_weights", "attention_dropout", "make_vocab_size_divisible_by",
)  # fmt: skip
"""Fields of ModelConfig that are args of Megatron too."""


def architecture_from_args(
    args: Mapping[str, Any], tensors: Mapping[str, Tensor], model_type: Literal["gpt", "bert"], mcore: bool
) -> Architecture:
    """The architecture that `args` describe. Shapes are checked against it afterwards."""
    if args.get("normalization") not in (None, "LayerNorm", "RMSNorm"):
        refuse_setting("normalization", args.get("normalization"))
    swiglu, rows = args.get("swiglu") is True, tensors[WORD_EMBEDDINGS].shape[0]
    if args.get("gated_linear_unit") and not swiglu:
        refuse_setting("gated_linear_unit", args["gated_linear_unit"])
    if args.get("padded_vocab_size") not in (None, 0, rows):
        raise HoldfastError(f"args.padded_vocab_size is {args['padded_vocab_size']}, but the embedding has {rows} rows")
    # Megatron-core ignores openai_gelu; its fused GELU is the tanh form, and BERT's head never is.
    openai = args.get("openai_gelu") is True and not mcore
    tanh = openai or args.get("bias_gelu_fusion") is True or args.get("bias_activation_fusion") is True
    unbiased = args.get("add_bias_linear", True) is False
    first = f"{'decoder' if model_type == 'gpt' else 'encoder'}.layers.0."
    return Architecture(
        model_type=model_type,
        num_layers=_size(args, "num_layers" if args.get("num_layers") is not None else "encoder_num_layers"),
        **_widths(args),
        padded_vocab_size=rows,
        norm_epsilon=_real(args, "norm_epsilon", _real(args, "layernorm_epsilon", 1e-5)),
        swiglu=swiglu,
        openai_gelu=tanh and not swiglu,
        head_activation="gelu_tanh" if openai else "gelu",
        normalization="RMSNorm" if args.get("normalization") == "RMSNorm" else "LayerNorm",
        **rotary_fields(args),
        qk_layernorm=args.get("qk_layernorm") is True,
        window_size=_window(args),
        window_attn_skip_freq=_skip(args),
        untie_embeddings_and_output_weights=args.get("untie_embeddings_and_output_weights") is True,
        disable_bias_linear=unbiased,
        add_qkv_bias=unbiased and f"{first}self_attention.linear_qkv.bias" in tensors,
        **_bert_heads(tensors, model_type),
        hidden_dropout=_real(args, "hidden_dropout", 0.1),
        attention_dropout=_real(args, "attention_dropout", 0.1),
    )


def _widths(args: Mapping[str, Any]) -> dict[str, Any]:
    given = ["hidden_size", "num_attention_heads", "max_position_embeddings"]
    given += [name for name in ("kv_channels", "ffn_hidden_size", "make_vocab_size_divisible_by") if args.get(name)]
    if args.get("group_query_attention") is True and args.get("num_query_groups"):
        given.append("num_query_groups")
    found = {name: _size(args, name) for name in given}
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    return {"num_query_groups": heads, "kv_channels": hidden // heads, "ffn_hidden_size": 4 * hidden, **found}


def _window(args: Mapping[str, Any]) -> tuple[int, ...]:
    window = args.get("window_size")
    if window is None:
        return ()
    if not isinstance(window, tuple | list) or len(window) != 2 or window[1] != 0 or type(window[0]) is not int:
        refuse_setting("window_size", window)
    return () if window[0] < 0 else (window[0], 0)


def _skip(args: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without the window; without one the arg has no effect."""
    skip = args.get("window_attn_skip_freq")
    if skip is None or not _window(args):
        return ()
    if type(skip) is int and skip > 0:
        return (skip,)
    if not isinstance(skip, tuple | list) or len(skip) < 2 or not all(number in (0, 1) for number in skip):
        refuse_setting("window_attn_skip_freq", skip)
    return tuple(skip)


def _bert_heads(tensors: Mapping[str, Tensor], model_type: str) -> dict[str, Any]:
    if model_type == "gpt":
        return {}
    types = tensors["embedding.tokentype_embeddings.weight"].shape[0]
    return {"bert_no_binary_head": "binary_head.weight" not in tensors, "token_types": types}


def architecture_from_shapes(
    tensors: Mapping[str, Tensor], model_type: Literal["gpt", "bert"], heads: int | None
) -> tuple[Architecture, list[str]]:
    """The architecture of a file without `args` (all of them from before September 2020), and what had to be assumed."""
    stack = "decoder" if model_type == "gpt" else "encoder"
    layers = 1 + max((int(name.split(".")[2]) for name in tensors if name.startswith(f"{stack}.layers.")), default=-1)
    if "embedding.position_embeddings.weight" not in tensors or not layers:
        raise HoldfastError("a checkpoint without args must have position embeddings and layers")
    rows, hidden = tensors[WORD_EMBEDDINGS].matrix
    first = tensors.get(f"{stack}.layers.0.mlp.linear_fc1.weight")
    if first is None:
        raise HoldfastError(f"{stack}.layers.0.mlp.linear_fc1.weight is missing")
    notes = []
    if heads is None and (layers, hidden) == (24, 1024):
        heads = 16
        notes.append("no args in the file: 16 attention heads, as the 345M release has")
    if heads is None:
        raise HoldfastError(HEADS_UNKNOWN)
    if heads < 1 or hidden % heads:
        raise HoldfastError(f"--num-attention-heads {heads} does not divide the hidden size {hidden}")
    form = "tanh" if model_type == "gpt" else "exact"
    notes.append(f"no args in the file: {form} GELU, LayerNorm epsilon 1e-5 and dropout 0.1, as Megatron had then")
    architecture = Architecture(
        model_type=model_type,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=first.shape[0],
        max_position_embeddings=tensors["embedding.position_embeddings.weight"].shape[0],
        padded_vocab_size=rows,
        openai_gelu=model_type == "gpt",
        **_bert_heads(tensors, model_type),
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    return architecture, notes


def true_size_from_args(args: Mapping[str, Any], padded: int, tensor_parallel: int) -> tuple[int | None, str]:
    """The vocabulary without padding, if the checkpoint states it, or names a tokenizer of known size."""
    for name in ("true_vocab_size", "orig_vocab_size"):
        if type(args.get(name)) is int and 0 < args[name] <= padded:
            return args[name], f"args.{name}"
    multiple = args.get("make_vocab_size_divisible_by") or 128
    known = TRUE_SIZES.get(str(args.get("tokenizer_type")))
    if known is None or type(multiple) is not int or multiple <= 0:
        return None, ""
    if padded_size(known, multiple * tensor_parallel) == padded:
        return known, f"the tokenizer type {args['tokenizer_type']}"
    return None, ""


def true_size_of_release(arch: Architecture) -> tuple[int | None, str]:
    """The three files that NVIDIA released have no args; their shapes identify them."""
    sizes = {("gpt", 50304): 50257, ("bert", 29056): 28996, ("bert", 30592): 30522}
    if (arch.num_layers, arch.hidden_size) != (24, 1024):
        return None, ""
    return sizes.get((arch.model_type, arch.padded_vocab_size)), "the shape of NVIDIA's 345M release"


def args_for(
    arch: Architecture, true_size: int, padded: int, tensor_parallel: int, stages: list[int], mcore: bool
) -> dict[str, Any]:
    """Plain values, under the names that Megatron's loader and --use-checkpoint-args read. `stages`: layers of each."""
    uneven, pipeline_parallel = len(set(stages)) > 1, len(stages)
    bert = arch.model_type == "bert"
    head = arch.head_activation if bert else arch.activation
    tanh, skip = arch.activation == "gelu_tanh", arch.window_attn_skip_freq
    return {
        **{name: getattr(arch, name) for name in SAME_NAMES},
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": pipeline_parallel,
        "virtual_pipeline_model_parallel_size": None,
        "decoder_first_pipeline_num_layers": stages[0] if uneven else None,
        "decoder_last_pipeline_num_layers": stages[-1] if uneven else None,
        "data_parallel_size": 1,
        "world_size": tensor_parallel * pipeline_parallel,
        "encoder_num_layers": arch.num_layers,
        "group_query_attention": arch.num_query_groups != arch.num_attention_heads,
        "seq_length": arch.max_position_embeddings,
        "encoder_seq_length": arch.max_position_embeddings,
        **rotary_args(arch),
        "qk_layernorm": arch.qk_layernorm,
        "window_size": tuple(arch.window_size) or None,
        "window_attn_skip_freq": skip[0] if len(skip) == 1 else list(skip) or None,
        "layernorm_epsilon": arch.norm_epsilon,
        "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False,
        "squared_relu": False,
        "openai_gelu": not mcore and head == "gelu_tanh",
        "bias_gelu_fusion": tanh and (mcore or (bert and arch.head_activation == "gelu")),
        "onnx_safe": None,
        "add_bias_linear": arch.bias,
        "add_qkv_bias": arch.qkv_bias,
        "padded_vocab_size": padded,
        "orig_vocab_size": true_size,
        "true_vocab_size": true_size,
        "tokenizer_type": {size: name for name, size in TRUE_SIZES.items()}.get(true_size),
        "bert_binary_head": not arch.bert_no_binary_head,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }


def _real(args: Mapping[str, Any], name: str, default: float) -> float:
    return read_real(args, name, default, "args.")


def _size(args: Mapping[str, Any], name: str) -> int:
    return read_size(args, name, "args.")
