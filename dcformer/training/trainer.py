"""Trains a language model on packed blocks with the Hugging Face Trainer; resumes exactly where a killed run left off.

B rows of a micro batch, T tokens a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from transformers import PretrainedConfig

from dcformer.training.data import PreparedData


@dataclass(frozen=True)
class TrainSettings:
    """How to train. One step is one update of the weights, of `batch_size * gradient_accumulation` rows (times processes).

    Attributes:
        out: folder of the run: checkpoints while it runs, the model and tokenizer when it is done, metrics.jsonl throughout.
        steps: updates of the weights.
        batch_size: B, rows a micro batch.
        gradient_accumulation: micro batches a step; the loss equals that of one large batch.
        learning_rate: the peak, reached after `warmup_steps`.
        min_learning_rate_ratio: where the cosine ends, as a share of `learning_rate`.
        warmup_steps: steps of linear warm-up. None: a tenth of `steps`.
        weight_decay: decoupled, on matrices only: not on biases, norms (no parameter below two dimensions).
        beta1: AdamW's.
        beta2: AdamW's.
        max_grad_norm: clips the norm of all gradients together.
        seed: of weights, dropout and the order of the data; the order is the same for every model.
        bf16: autocast to bfloat16. None: on a GPU that has it.
        gradient_checkpointing: recompute activations in the backward.
        compile: torch.compile.
        eval_every: steps between evaluations; the last step is always evaluated. None: a tenth of `steps`.
        save_every: steps between checkpoints. None: as `eval_every`.
        keep_checkpoints: how many checkpoints stay while training runs.
        eval_rows: rows of the validation split to evaluate on, the same ones each time. None: all.
        log_every: steps between lines of training loss in metrics.jsonl.
    """

    out: str
    steps: int
    batch_size: int = 16
    gradient_accumulation: int = 1
    learning_rate: float = 1e-3
    min_learning_rate_ratio: float = 0.1
    warmup_steps: int | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    seed: int = 0
    bf16: bool | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    eval_every: int | None = None
    save_every: int | None = None
    keep_checkpoints: int = 2
    eval_rows: int | None = None
    log_every: int = 10


class TrainResult(NamedTuple):
    """What a finished run was.

    Attributes:
        out: the folder, which holds config.json, model.safetensors, the tokenizer and metrics.jsonl.
        steps: updates of the weights.
        parameters: of the model.
        evaluations: one dict each: `step`, `tokens` (seen in training so far), `seconds` (of training so far), `loss`
            (nats a token), `perplexity`, `bits_per_byte`. The last one is of the final model.
        tokens_per_second: of training, evaluations and checkpoints not counted.
        seconds: of training, all its parts together where it was interrupted.
    """

    out: str
    steps: int
    parameters: int
    evaluations: list[dict[str, Any]]
    tokens_per_second: float
    seconds: float


def train(
    config: PretrainedConfig, data: PreparedData, settings: TrainSettings, *, console: Console | None = None
) -> TrainResult:
    """Trains a new model of this configuration, or goes on with the unfinished run in `settings.out`.

    A finished run with the same settings is not run again: its result is returned.

    Args:
        config: `DCFormerConfig`, or any configuration that `AutoModelForCausalLM` knows.
        data: from `prepare_data`.
        settings: how to train.
        console: where progress is shown; None: nowhere.

    Raises:
        ValueError: a setting is out of range, `out` holds a run with other settings or something else, or a checkpoint is
            corrupt.
        FloatingPointError: the loss is no longer finite; the message has the step.
        OSError: a checkpoint could not be written; the message has the folder. Earlier checkpoints stay.
    """
    raise NotImplementedError
