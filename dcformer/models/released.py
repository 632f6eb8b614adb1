"""The format of the released checkpoints (Caiyun-AI/DCFormer-2.8B, Caiyun-AI/DCPythia-6.9B): its names and ours.

Read and written are config.json and parameters; the authors' code is never run. What their config.json cannot say is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcformer.models.windows import layer_types

if TYPE_CHECKING:
    from dcformer.models.configuration import DecoderConfig

# Parameters: name there, name here.
NAMES = (
    ("tok_embeddings", "model.embed_tokens"),
    ("norm", "model.norm"),
    ("output", "lm_head"),
    ("layers", "model.layers"),
)
LAYER = (
    ("attention.wo", "self_attn.o_proj"),
    ("attention.q_norm.scale", "self_attn.q_norm.weight"),
    ("attention.k_norm.scale", "self_attn.k_norm.weight"),
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
)
MLP = {
    "dcformer": (
        ("feed_forward.w1", "mlp.gate_proj"),
        ("feed_forward.w3", "mlp.up_proj"),
        ("feed_forward.w2", "mlp.down_proj"),
        ("feed_forward.mg", "mlp.mgate"),
    ),
    "dcpythia": (("feed_forward.w1", "mlp.up_proj"), ("feed_forward.w2", "mlp.down_proj")),
}
# One matrix there, three here, stacked along its rows.
QKV = ("attention.wqkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
# There always of four channels. Axis of the channels, which in dd are joined with the heads.
DYNAMIC = (
    ("attention.dyn_w_proj.dw1", "self_attn.compose.dynamic.dw1", 2),
    ("attention.dyn_w_proj.qkw", "self_attn.compose.dynamic.qkw", 1),
    ("attention.dyn_w_proj.dd", "self_attn.compose.dynamic.dd", 2),
)
# Copies of dw1, qkw and dd merged for decoding, and static weights that are fixed to the identity.
COPIES = [r"\.dyn_w_proj\.(dw_m|qkw_m|sw)$", r"\.(pre|post)_proj\.w$"]

# config.json: key there, argument here.
_ARGUMENTS = {
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_local_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "use_qk_norm": "qk_norm",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}
_OWN_ARGUMENTS = {
    "dcformer": {"norm_eps": "rms_norm_eps"},
    "dcpythia": {
        "norm_eps": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
        "use_linear_bias": "use_linear_bias",
    },
}
# What their code takes for a key that is not there. Later code than that of the released models has another rope_base.
_DEFAULTS: dict[str, Any] = {
    "dim": 2560,
    "n_layer": 32,
    "n_head": 32,
    "n_local_heads": -1,
    "head_dim": None,
    "intermediate_size": None,
    "vocab_size": 32000,
    "block_size": 2048,
    "use_qk_norm": False,
    "tie_word_embeddings": False,  # and the output layer has weights of its own even where it is true
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "norm_eps": 1e-5,
    "rope_base": 10000,
    "window_size": 256,
    "window_type": None,
    "use_dcmha": True,
    "query_wise": False,
}
_OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "dcformer": {"mgate": False, "mgate_dim": 44},
    "dcpythia": {"rotary_pct": 0.25, "use_parallel_residual": True, "use_linear_bias": True},
}
# How their code runs, not what it computes: kept, to be written again.
_RUNNING = ("is_training", "prefill_pad", "q_chunk_size", "use_gradient_checkpointing")
_WINDOW_TYPES = {None: "LG", "LG": "LG", "LGLL": "LGLL", "LGL6": "LGL6"}
_ARCHITECTURES = {"dcformer": "DCFormer", "dcpythia": "DCPythia"}


def is_released(config: dict[str, Any]) -> bool:
    """Whether the content of a config.json is of the released format."""
    ours = {"hidden_size", "num_hidden_layers", "num_attention_heads"}
    return not ours & config.keys() and bool({"dim", "n_layer", "n_head"} & config.keys())


def read_config(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """The content of a released config.json as arguments of our configuration; what is no argument there stays as it is.

    Args:
        config: content of the file.
        model_type: "dcformer" or "dcpythia".

    Returns:
        The arguments, and as `_released` what they have no place for.

    Raises:
        ValueError: a value is unknown, or contradicts others.
    """
    arguments = _ARGUMENTS | _OWN_ARGUMENTS[model_type]
    defaults = _DEFAULTS | _OWN_DEFAULTS[model_type]
    theirs = {**defaults, **config}
    for key, kind in {"dim": int, "n_head": int, "norm_eps": float, "rope_base": float, "rotary_pct": float}.items():
        value = theirs.get(key, 1)
        if type(value) not in (int, kind) or value <= 0:
            raise ValueError(f"{key}={value!r} must be a {'whole ' if kind is int else ''}number above 0")
    ours = {key: value for key, value in theirs.items() if key not in {*defaults, *_RUNNING}}
    ours |= {argument: theirs[key] for key, argument in arguments.items()}
    ours["_released"] = {key: config[key] for key in _RUNNING if key in config}
    dim, heads = theirs["dim"], theirs["n_head"]
    if theirs["n_local_heads"] == -1:
        ours["num_key_value_heads"] = heads
    if theirs["head_dim"] is not None and theirs["head_dim"] * heads != dim:
        raise ValueError(f"head_dim={theirs['head_dim']} must be dim={dim} / n_head={heads}, or be left out")
    if theirs["intermediate_size"] is None:  # of SwiGLU 8/3 dim in steps of 256
        ours["intermediate_size"] = 4 * dim if model_type == "dcpythia" else -(-(8 * dim // 3) // 256) * 256
    ours["compose"] = {"key_wise": not theirs["query_wise"]} if theirs["use_dcmha"] else None
    ours["rope_parameters"] = {"rope_type": "default", "rope_theta": float(theirs["rope_base"])}
    if model_type == "dcpythia":
        ours["rope_parameters"]["partial_rotary_factor"] = theirs["rotary_pct"]
    else:
        ours["mgate_dim"] = theirs["mgate_dim"] if theirs["mgate"] else None
    if theirs["window_type"] not in _WINDOW_TYPES:
        raise ValueError(
            f"window_type={theirs['window_type']!r} is unknown; choose null, {', '.join(filter(None, _WINDOW_TYPES))}"
        )
    ours["window_pattern"], ours["sliding_window"] = _WINDOW_TYPES[theirs["window_type"]], theirs["window_size"]
    if theirs["window_size"] is None and theirs["window_type"] is None:
        ours["window_pattern"] = "G"
    elif theirs["window_size"] is None:
        ours["sliding_window"] = 256  # what a window_type means there
    return ours


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """What a released config.json says of the model.

    Raises:
        ValueError: the released format cannot say what `config` says.
    """
    compose, rope = config.compose or {}, dict(config.rope_parameters or {})
    layers, window = config.layer_types, config.sliding_window
    patterns = [(None, "G", None)] + [(kind, pattern, window) for kind, pattern in _WINDOW_TYPES.items() if window is not None]
    fitting = [(kind, size) for kind, pattern, size in patterns if layer_types(pattern, len(layers)) == layers]
    fixed = {"rank": 2, "groups": 1, "query_wise": True, "gates": True, "static": False, "pre": True, "post": True}
    impossible = [f"compose with {name}={compose[name]!r}" for name in fixed if compose and compose[name] != fixed[name]]
    theta, rotary_pct = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", 1)
    if rope != {"rope_type": "default"}:
        impossible.append(f"rope_parameters={config.rope_parameters}")
    if config.num_attention_heads * (config.head_dim or 0) != config.hidden_size:
        impossible.append(f"head_dim={config.head_dim}")
    if not fitting:
        impossible.append(f"window_pattern={config.window_pattern!r}")
    if config.tie_word_embeddings:
        impossible.append("tie_word_embeddings=True")
    if config.model_type == "dcformer" and rotary_pct != 1:
        impossible.append(f"partial_rotary_factor={rotary_pct}")
    if impossible:
        raise ValueError(f"the released format has no {'; no '.join(impossible)}; save with save_original_format=False")
    theirs = {key: getattr(config, argument) for key, argument in (_ARGUMENTS | _OWN_ARGUMENTS[config.model_type]).items()}
    theirs |= {"window_type": fitting[0][0], "window_size": fitting[0][1], "rope_base": theta}
    theirs |= {"use_dcmha": config.compose is not None, "query_wise": not compose.get("key_wise", True)}
    if config.model_type == "dcpythia":
        theirs["rotary_pct"] = rotary_pct
    else:
        gates = config.mgate_dim
        theirs |= {"mgate": gates is not None, "mgate_dim": gates or _OWN_DEFAULTS["dcformer"]["mgate_dim"]}
    theirs |= {"tie_word_embeddings": False, "architectures": [_ARCHITECTURES[config.model_type]]}
    return {"is_training": False, **theirs, **(config._released or {})}
