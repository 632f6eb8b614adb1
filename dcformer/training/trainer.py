"""Trains a language model on packed blocks with the Hugging Face Trainer; resumes exactly where a killed run left off.

B rows of a micro batch, T tokens a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, TrainingArguments, set_seed
from transformers.utils import logging

from dcformer.nn import Compose
from dcformer.training.data import PreparedData
from dcformer.training.exact_trainer import ExactTrainer, collate, rows_per_step, weight_bytes
from dcformer.training.files import explained_disk_errors
from dcformer.training.metrics import MetricsCallback, read_metrics
from dcformer.training.progress import ProgressDisplay
from dcformer.training.run_folder import RunFolder

# Settings that say where and how often to save, but do not change what comes out.
_FREE_SETTINGS = ("out", "save_every", "keep_checkpoints")


@dataclass(frozen=True)
class TrainSettings:
    """How to train. One step is one update of the weights, of `batch_size * gradient_accumulation` rows (times processes).

    Attributes:
        out: folder of the run: checkpoints while it runs, the model and tokenizer when it is done, metrics.jsonl throughout.
        steps: updates of the weights.
        batch_size: B, rows a micro batch.
        gradient_accumulation: micro batches a step; the loss equals that of one large batch.
        learning_rate: the peak, reached after `warmup_steps`.
        composition_learning_rate_ratio: the share of it that composition weights (`dcformer.nn.Compose`) take. AdamW moves
            every weight by about the learning rate a step, and these start near zero, so that a large rate throws them about.
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
        keep_checkpoints: how many checkpoints stay while training runs; a finished run has none, only its model.
        eval_rows: rows of the validation split to evaluate on, the same ones each time. None: all.
        start: checkpoint whose weights training starts from: a folder or hub name. None: new weights.
        trainable: "composition" trains the weights of `dcformer.nn.Compose` alone, "all" everything.
    """

    out: str
    steps: int
    batch_size: int = 16
    gradient_accumulation: int = 1
    learning_rate: float = 1e-3
    composition_learning_rate_ratio: float = 1.0
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
    start: str | None = None
    trainable: Literal["all", "composition"] = "all"


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
    config: PretrainedConfig,
    data: PreparedData,
    settings: TrainSettings,
    *,
    wrap: Callable[[PreTrainedModel], Any] | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Trains a model of this configuration, new or from `settings.start`, or goes on with the unfinished run in `settings.out`.

    A run that was stopped, at any moment and however, ends with the loss of an undisturbed one: weights, optimizer, schedule,
    random numbers and the order of the data go on from the last checkpoint. A finished run with the same settings is not run
    again: its result is returned. Seeds the random numbers of PyTorch, NumPy and Python.

    Args:
        config: `DCFormerConfig`, or any configuration that `AutoModelForCausalLM` knows. It is not changed.
        data: from `prepare_data`.
        settings: how to train.
        wrap: what is done to the model before it is trained, such as `peft.get_peft_model` with a configuration; it is part of
            no record, so that another one wants another `out`.
        console: where progress is shown; None: nowhere.

    Raises:
        ValueError: a setting is out of range, `out` holds another run or something else, or a checkpoint is corrupt.
        FloatingPointError: the loss or the gradients are no longer finite; the message has the step. metrics.jsonl stays.
        OSError: something could not be written; the message has the folder. Earlier checkpoints stay.
    """
    _check(config, data, settings)
    with _quiet_transformers():
        folder = RunFolder(settings.out)
        args = _arguments(settings)
        if args.process_index == 0:
            with explained_disk_errors("a new run", folder.path):
                folder.open(identity(config, data, settings))
        args.distributed_state.wait_for_everyone()
        if not folder.is_finished:
            with ProgressDisplay(console if args.process_index == 0 else None, folder.path.name, settings.steps) as display:
                _run(config, data, settings, folder, args, display, wrap)
            args.distributed_state.wait_for_everyone()
        elif args.process_index == 0:
            folder.tidy()
    return TrainResult(out=settings.out, **folder.result())


def _run(
    config: PretrainedConfig,
    data: PreparedData,
    settings: TrainSettings,
    folder: RunFolder,
    args: TrainingArguments,
    display: ProgressDisplay,
    wrap: Callable[[PreTrainedModel], Any] | None,
) -> None:
    set_seed(settings.seed)
    model = _model(config, settings)
    if wrap is not None:
        model = wrap(model)
    use_cache = model.config.use_cache
    tokens_per_step = rows_per_step(args) * len(data.train[0]["input_ids"])
    metrics = MetricsCallback(folder.metrics, tokens_per_step, data.bytes_per_token, display.show)
    eval_rows = min(settings.eval_rows or len(data.validation), len(data.validation))
    trainer = ExactTrainer(
        folder,
        settings.keep_checkpoints,
        settings.composition_learning_rate_ratio,
        model=model,
        args=args,
        data_collator=collate,
        train_dataset=data.train.with_format("torch"),
        eval_dataset=data.validation.select(range(eval_rows)).with_format("torch"),
        processing_class=data.tokenizer,
        callbacks=[metrics],
    )
    checkpoint = folder.last_checkpoint()
    if args.process_index == 0:
        metrics.go_on_after(0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2]))
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if args.process_index == 0:
        lines = [line for line in read_metrics(folder.metrics) if line["split"] == "validation"]
        seconds, tokens = lines[-1]["seconds"], lines[-1]["tokens"]
        result = {
            "steps": settings.steps,
            "parameters": model.num_parameters(),
            "evaluations": [{name: value for name, value in line.items() if name != "split"} for line in lines],
            "tokens_per_second": tokens / seconds,
            "seconds": seconds,
        }
        model.config.use_cache = use_cache
        with explained_disk_errors("the trained model", folder.path, weight_bytes(model)):
            folder.finish(model, data.tokenizer, result)


def _model(config: PretrainedConfig, settings: TrainSettings) -> Any:
    config = copy.deepcopy(config)
    if settings.start is None:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            settings.start, config=config, dtype=torch.float32, output_loading_info=True
        )
        model, found = loaded
        if found["missing_keys"]:
            raise ValueError(f"start={settings.start!r} lacks weights: {', '.join(sorted(found['missing_keys']))}")
    composed = {id(p) for module in model.modules() if isinstance(module, Compose) for p in module.parameters()}
    if settings.trainable == "composition" and not composed:
        raise ValueError("trainable='composition' needs a model with composable heads; see dcformer.convert")
    for parameter in model.parameters():
        parameter.requires_grad_(settings.trainable == "all" or id(parameter) in composed)
    return model


def _arguments(settings: TrainSettings) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    eval_every = settings.eval_every or max(1, settings.steps // 10)
    return TrainingArguments(
        output_dir=settings.out,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": settings.min_learning_rate_ratio},
        warmup_steps=settings.steps // 10 if settings.warmup_steps is None else settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        bf16=on_gpu and torch.cuda.is_bf16_supported() if settings.bf16 is None else settings.bf16,
        use_cpu=not torch.accelerator.is_available(),  # else the Trainer refuses bf16 on a CPU
        activation_checkpointing=settings.gradient_checkpointing,
        torch_compile=settings.compile,
        eval_strategy="steps",
        eval_steps=eval_every,
        save_strategy="steps",
        save_steps=settings.save_every or eval_every,
        logging_steps=1,
        logging_nan_inf_filter=False,
        log_level="error",
        log_level_replica="error",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
        ddp_find_unused_parameters=False,
    )


def identity(config: PretrainedConfig, data: PreparedData, settings: TrainSettings) -> dict[str, Any]:
    """What makes a run the same run, JSON-ready: settings that change what comes out, configuration, data."""
    chosen = {name: value for name, value in asdict(settings).items() if name not in _FREE_SETTINGS}
    shape = {name: value for name, value in config.to_dict().items() if name != "transformers_version"}
    return {"settings": chosen, "config": shape, "data": data.summary["fingerprint"]}


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Errors only; the progress display and our own errors say the rest. The Trainer sets the level for the whole process."""
    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _check(config: PretrainedConfig, data: PreparedData, settings: TrainSettings) -> None:
    for name in ("steps", "batch_size", "gradient_accumulation", "eval_every", "save_every", "keep_checkpoints", "eval_rows"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    not_negative = (
        "learning_rate", "composition_learning_rate_ratio", "weight_decay", "max_grad_norm", "warmup_steps",
        "min_learning_rate_ratio",
    )  # fmt: skip
    for name in not_negative:
        value = getattr(settings, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{name}={value} must not be below 0")
    if settings.trainable not in ("all", "composition"):
        raise ValueError(f"trainable={settings.trainable!r} is unknown; choose 'all' or 'composition'")
    if settings.warmup_steps is not None and settings.warmup_steps > settings.steps:
        raise ValueError(f"warmup_steps={settings.warmup_steps} must be at most steps={settings.steps}")
    if settings.min_learning_rate_ratio > 1:
        raise ValueError(f"min_learning_rate_ratio={settings.min_learning_rate_ratio} must be at most 1")
    if config.vocab_size < len(data.tokenizer):
        raise ValueError(f"config.vocab_size={config.vocab_size} must be at least {len(data.tokenizer)}, the tokenizer's size")
