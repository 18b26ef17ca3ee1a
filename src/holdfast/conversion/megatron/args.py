"""Megatron's `args` ↔ Architecture: what a checkpoint says about its own function, and what its shapes say.

The invariant: a setting that changes the function and is not understood is refused, never ignored.
"""

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from holdfast.conversion.model import WORD_EMBEDDINGS, Architecture, padded_size
from holdfast.conversion.tensors import Tensor
from holdfast.system.errors import HoldfastError

TRUE_SIZES = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}

# Beyond this a file is forged: padding rows are written one by one.
LARGEST = {"make_vocab_size_divisible_by": 1 << 20}


def architecture_from_args(
    args: Mapping[str, Any], tensors: Mapping[str, Tensor], family: Literal["gpt", "bert"], mcore: bool
) -> Architecture:
    """The architecture that `args` describe. Shapes are checked against it afterwards."""
    if args.get("normalization") not in (None, "LayerNorm", "RMSNorm"):
        _cannot("normalization", args.get("normalization"))
    hidden, heads = _integer(args, "hidden_size"), _integer(args, "num_attention_heads")
    swiglu, rows = args.get("swiglu") is True, tensors[WORD_EMBEDDINGS].shape[0]
    if args.get("gated_linear_unit") and not swiglu:
        _cannot("gated_linear_unit", args["gated_linear_unit"])
    if args.get("padded_vocab_size") not in (None, 0, rows):
        raise HoldfastError(f"args.padded_vocab_size is {args['padded_vocab_size']}, but the embedding has {rows} rows")
    grouped = args.get("group_query_attention") is True and args.get("num_query_groups")
    bias = args.get("add_bias_linear", True) is not False
    rope = args.get("position_embedding_type") == "rope" or args.get("use_rotary_position_embeddings") is True
    positions = args.get("position_embedding_type", "learned_absolute")
    if str(positions).rsplit(".", 1)[-1] not in ("learned_absolute", "rope"):
        _cannot("position_embedding_type", positions)
    if rope and args.get("rotary_percent", 1.0) != 1.0:
        _cannot("rotary_percent", args.get("rotary_percent"))
    # Megatron-core does not look at openai_gelu; its fused GELU is the tanh form, and BERT's head never is.
    openai = args.get("openai_gelu") is True and not mcore
    tanh = openai or args.get("bias_gelu_fusion") is True or args.get("bias_activation_fusion") is True
    first = f"{'decoder' if family == 'gpt' else 'encoder'}.layers.0."
    return Architecture(
        family=family,
        num_layers=_integer(args, "num_layers")
        if args.get("num_layers") is not None
        else _integer(args, "encoder_num_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=_integer(args, "num_query_groups") if grouped else heads,
        kv_channels=_integer(args, "kv_channels") if args.get("kv_channels") else hidden // heads,
        ffn_hidden_size=_integer(args, "ffn_hidden_size") if args.get("ffn_hidden_size") else 4 * hidden,
        max_position_embeddings=_integer(args, "max_position_embeddings"),
        padded_vocab_size=rows,
        vocab_multiple=_integer(args, "make_vocab_size_divisible_by")
        if args.get("make_vocab_size_divisible_by")
        else 128,
        norm_epsilon=_real(args, "norm_epsilon", _real(args, "layernorm_epsilon", 1e-5)),
        activation="swiglu" if swiglu else "gelu_tanh" if tanh else "gelu",
        head_activation="gelu_tanh" if openai else "gelu",
        normalization="RMSNorm" if args.get("normalization") == "RMSNorm" else "LayerNorm",
        positions="rope" if rope else "learned_absolute",
        rotary_base=_real(args, "rotary_base", 10000.0),
        tied=args.get("untie_embeddings_and_output_weights") is not True,
        bias=bias,
        qkv_bias=f"{first}self_attention.linear_qkv.bias" in tensors,
        binary_head="binary_head.weight" in tensors,
        token_types=tensors["embedding.tokentype_embeddings.weight"].shape[0] if family == "bert" else 2,
        hidden_dropout=_real(args, "hidden_dropout", 0.1),
        attention_dropout=_real(args, "attention_dropout", 0.1),
    )


def architecture_from_shapes(
    tensors: Mapping[str, Tensor], family: Literal["gpt", "bert"], heads: int | None
) -> tuple[Architecture, list[str]]:
    """The architecture of a file without `args` (all of them from before September 2020), and what had to be assumed."""
    stack = "decoder" if family == "gpt" else "encoder"
    layers = 1 + max((int(name.split(".")[2]) for name in tensors if name.startswith(f"{stack}.layers.")), default=-1)
    if "embedding.position_embeddings.weight" not in tensors or not layers:
        raise HoldfastError(
            "a checkpoint without args and without position embeddings or layers: not a model of that age"
        )
    rows, hidden = tensors[WORD_EMBEDDINGS].matrix
    first = tensors.get(f"{stack}.layers.0.mlp.linear_fc1.weight")
    if first is None:
        raise HoldfastError(f"{stack}.layers.0.mlp.linear_fc1.weight is missing")
    notes = []
    if heads is None and (layers, hidden) == (24, 1024):
        heads = 16
        notes.append("no args in the file: 16 attention heads, as the 345M release has")
    if heads is None:
        raise HoldfastError("the file has no args, and heads cannot be seen in the shapes: give --num-attention-heads")
    if heads < 1 or hidden % heads:
        raise HoldfastError(f"--num-attention-heads {heads} does not divide the hidden size {hidden}")
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh" if family == "gpt" else "gelu"
    form = "tanh" if family == "gpt" else "exact"
    notes.append(f"no args in the file: {form} GELU, LayerNorm epsilon 1e-5 and dropout 0.1, as Megatron had then")
    architecture = Architecture(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=first.shape[0],
        max_position_embeddings=tensors["embedding.position_embeddings.weight"].shape[0],
        padded_vocab_size=rows,
        activation=activation,
        binary_head="binary_head.weight" in tensors,
        token_types=tensors["embedding.tokentype_embeddings.weight"].shape[0] if family == "bert" else 2,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    return architecture, notes


def true_size_from_args(args: Mapping[str, Any], padded: int, tensor_parallel: int) -> tuple[int | None, str]:
    """The vocabulary without padding, if the checkpoint says it in so many words or by the name of a fixed tokenizer."""
    for name in ("true_vocab_size", "orig_vocab_size"):
        if type(args.get(name)) is int and 0 < args[name] <= padded:
            return args[name], f"args.{name}"
    multiple = args.get("make_vocab_size_divisible_by") or 128
    known = TRUE_SIZES.get(str(args.get("tokenizer_type")))
    if (
        known is not None
        and type(multiple) is int
        and multiple > 0
        and padded_size(known, multiple * tensor_parallel) == padded
    ):
        return known, f"the tokenizer type {args['tokenizer_type']}"
    return None, ""


def true_size_of_release(arch: Architecture) -> tuple[int | None, str]:
    """The three files that NVIDIA released have no args; their sizes give them away."""
    sizes = {("gpt", 50304): 50257, ("bert", 29056): 28996, ("bert", 30592): 30522}
    if (arch.num_layers, arch.hidden_size) != (24, 1024):
        return None, ""
    return sizes.get((arch.family, arch.padded_vocab_size)), "the shape of NVIDIA's 345M release"


def args_for(
    arch: Architecture, true_size: int, padded: int, tensor_parallel: int, stages: list[int], mcore: bool
) -> dict[str, Any]:
    """Plain values, under the names that Megatron's loader and --use-checkpoint-args look for. `stages`: layers of each."""
    uneven, pipeline_parallel = len(set(stages)) > 1, len(stages)
    swiglu, tanh = arch.activation == "swiglu", arch.activation == "gelu_tanh"
    tokenizer = {size: name for name, size in TRUE_SIZES.items()}.get(true_size)
    return {
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": pipeline_parallel,
        "virtual_pipeline_model_parallel_size": None,
        "decoder_first_pipeline_num_layers": stages[0] if uneven else None,
        "decoder_last_pipeline_num_layers": stages[-1] if uneven else None,
        "data_parallel_size": 1,
        "world_size": tensor_parallel * pipeline_parallel,
        "num_layers": arch.num_layers,
        "encoder_num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.ffn_hidden_size,
        "num_attention_heads": arch.num_attention_heads,
        "group_query_attention": arch.num_query_groups != arch.num_attention_heads,
        "num_query_groups": arch.num_query_groups,
        "kv_channels": arch.kv_channels,
        "seq_length": arch.max_position_embeddings,
        "encoder_seq_length": arch.max_position_embeddings,
        "max_position_embeddings": arch.max_position_embeddings,
        "position_embedding_type": arch.positions,
        "add_position_embedding": arch.positions == "learned_absolute",
        "use_rotary_position_embeddings": arch.positions == "rope",
        "rotary_percent": 1.0,
        "rotary_base": int(arch.rotary_base) if arch.rotary_base.is_integer() else arch.rotary_base,
        "rotary_interleaved": False,
        "normalization": arch.normalization,
        "norm_epsilon": arch.norm_epsilon,
        "layernorm_epsilon": arch.norm_epsilon,
        "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False,
        "swiglu": swiglu,
        "squared_relu": False,
        "openai_gelu": not mcore
        and (arch.head_activation if arch.family == "bert" else arch.activation) == "gelu_tanh",
        "bias_gelu_fusion": tanh and (mcore or (arch.family == "bert" and arch.head_activation == "gelu")),
        "onnx_safe": None,
        "add_bias_linear": arch.bias,
        "add_qkv_bias": arch.qkv_bias,
        "untie_embeddings_and_output_weights": not arch.tied,
        "hidden_dropout": arch.hidden_dropout,
        "attention_dropout": arch.attention_dropout,
        "make_vocab_size_divisible_by": arch.vocab_multiple,
        "padded_vocab_size": padded,
        "orig_vocab_size": true_size,
        "true_vocab_size": true_size,
        "tokenizer_type": tokenizer,
        "bert_binary_head": arch.binary_head,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }


def _real(args: Mapping[str, Any], name: str, default: float) -> float:
    value = args.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise HoldfastError(f"args.{name} is {value}, where a number is expected")
    return float(value)


def _integer(args: Mapping[str, Any], name: str) -> int:
    value = args.get(name)
    if type(value) is not int or not 0 < value < LARGEST.get(name, 1 << 40):
        raise HoldfastError(f"args.{name} is {value}, where a positive number of sane size is expected")
    return value


def _cannot(name: str, value: Any) -> NoReturn:
    raise HoldfastError(f"args.{name} = {value} changes the function in a way that cannot be converted exactly")
