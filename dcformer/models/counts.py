"""Parameters and FLOPs of a model, reckoned from its configuration alone, with the share that composition adds.

E hidden size, F MLP width, N heads = G groups of n, K key/value heads, D head dim, R rank, C channels, I = 2 R n, V vocabulary,
T length, W window.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dcformer.models.configuration import DecoderConfig
from dcformer.models.dcformer.configuration_dcformer import DCFormerConfig
from dcformer.models.dcpythia.configuration_dcpythia import DCPythiaConfig


@dataclass(frozen=True)
class _Counts:
    composition: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def composition_share(self) -> float:
        """What composition adds, as a share of everything else: 0.02 is 2 % more than plain attention."""
        return self.composition / (self.total - self.composition)


@dataclass(frozen=True)
class Parameters(_Counts):
    """Numbers of parameters.

    Attributes:
        embeddings: input and output, once if tied.
        projections: queries, keys, values, outputs, with their biases.
        mlp: the MLPs.
        norms: all norms.
        composition: `Compose`.
    """

    embeddings: int
    projections: int
    mlp: int
    norms: int


@dataclass(frozen=True)
class Flops(_Counts):
    """FLOPs of a forward pass per token.

    Attributes:
        head: the output layer.
        projections: queries, keys, values, outputs.
        mlp: the MLPs.
        products: scores and weighted values.
        composition: making the mixing weights, and mixing.
    """

    head: float
    projections: float
    mlp: float
    products: float


def count_parameters(config: DecoderConfig) -> Parameters:
    """The parameters of the causal language model of `config`; `total` equals the sum of their sizes."""
    E, F, L, N, D = (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.head_dim,
    )
    assert D is not None and config.num_key_value_heads is not None
    pythia = isinstance(config, DCPythiaConfig)
    norm = 2 * E if pythia else E  # LayerNorm has a bias
    biased = pythia and config.use_linear_bias
    return Parameters(
        embeddings=config.vocab_size * E * (1 if config.tie_word_embeddings else 2),
        projections=L * (_projections(config) + ((N + 2 * config.num_key_value_heads) * D + E if biased else 0)),
        mlp=L * (_mlp(config) + (F + E if biased else 0)),
        norms=L * (2 * norm + (2 * D if config.qk_norm else 0)) + norm,
        composition=L * (_dynamic(config) + _static(config)),
    )


def count_flops(config: DecoderConfig, length: int) -> Flops:
    """Forward FLOPs per token, the mean over a sequence of `length` tokens processed at once.

    A multiply-add is two FLOPs. Counted are the matrix products, of attention only the pairs that a query sees (causality and
    windows), and composition: its own projections, and per pair and side 2R + 1 multiply-adds a head for each of the query-wise
    and the key-wise part, N/G for the static one, as the equations of `dcformer.Composition` read. A backend may do other
    arithmetic. Not counted are look-ups, biases, norms, rotations, activations and the softmax. A training step is three times
    as much.

    Args:
        config: the model.
        length: T, at least 1.

    Raises:
        ValueError: `length` is not positive.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    E, L, N, D = config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.head_dim
    assert D is not None
    pairs = sum(
        _visible_keys(length, config.sliding_window if kind == "sliding_attention" else None) for kind in config.layer_types
    )
    return Flops(
        head=2 * E * config.vocab_size,
        projections=2 * L * _projections(config),
        mlp=2 * L * _mlp(config),
        products=pairs * 4 * N * D,
        composition=2 * L * _dynamic(config) + pairs * _mixing(config),
    )


def _visible_keys(length: int, window: int | None) -> float:
    """The keys that a query sees, itself included, on average."""
    full = min(length, window or length)  # the first queries see 1, 2, ..., full keys, the others full
    return (full * (full + 1) / 2 + (length - full) * full) / length


def _projections(config: DecoderConfig) -> int:
    assert config.head_dim is not None and config.num_key_value_heads is not None
    return 2 * config.hidden_size * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)


def _mlp(config: DecoderConfig) -> int:
    """Weights of a layer's MLP: two matrices with GELU; three with SwiGLU, and those of its gates."""
    if isinstance(config, DCFormerConfig):
        return config.hidden_size * (3 * config.intermediate_size + (config.mgate_dim or 0))
    return config.hidden_size * 2 * config.intermediate_size


def _sides_and_parts(compose: dict) -> tuple[int, int]:
    """How many of pre and post, and of query-wise and key-wise, are there."""
    dynamic = compose["rank"] or compose["gates"]
    return compose["pre"] + compose["post"], (compose["query_wise"] + compose["key_wise"]) if dynamic else 0


def _dynamic(config: DecoderConfig) -> int:
    """Parameters of a layer's dynamic composition, which are also its multiply-adds per token."""
    if config.compose is None:
        return 0
    E, N, R, G = config.hidden_size, config.num_attention_heads, config.compose["rank"], config.compose["groups"]
    sides, parts = _sides_and_parts(config.compose)
    inner = 2 * R * N // G
    gates = E * N if config.compose["gates"] else 0
    return sides * parts * (E * G * inner + inner * 2 * R * N + gates)


def _static(config: DecoderConfig) -> int:
    """Parameters of a layer's static composition."""
    if config.compose is None or not config.compose["static"]:
        return 0
    return _sides_and_parts(config.compose)[0] * config.num_attention_heads**2 // config.compose["groups"]


def _mixing(config: DecoderConfig) -> int:
    """FLOPs of mixing one pair of query and key in a layer."""
    if config.compose is None:
        return 0
    sides, parts = _sides_and_parts(config.compose)
    per_head = 2 * config.compose["rank"] + (1 if config.compose["gates"] else 0)
    return 2 * (sides * parts * per_head * config.num_attention_heads + _static(config))
