"""The Hugging Face Trainer, made exact: checkpoints complete or not there, and rows in an order that only the seed decides.

B rows of a micro batch, T tokens a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from dcformer.nn import Compose
from dcformer.training.files import explained_disk_errors
from dcformer.training.run_folder import RunFolder


class ExactTrainer(Trainer):
    """The Trainer with checkpoints that are complete or not there, and with rows in an order of our own.

    Args:
        folder: of the run.
        keep_checkpoints: how many of the newest checkpoints stay.
        composition_learning_rate_ratio: learning rate of the weights of `Compose`, as a share of all others'.
        kwargs: the Trainer's.
    """

    def __init__(self, folder: RunFolder, keep_checkpoints: int, composition_learning_rate_ratio: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.composition_learning_rate_ratio = composition_learning_rate_ratio
        self.folder, self.keep_checkpoints, self.rows = folder, keep_checkpoints, len(kwargs["train_dataset"])
        self.remove_callback(PrinterCallback)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return RunOrder(self.rows, self.args.max_steps * rows_per_step(self.args), self.args.seed)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices (embeddings among them) decay; biases, norms and other vectors do not."""
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's, with composition weights in groups of their own where they have their own learning rate."""
        if self.optimizer is not None or self.composition_learning_rate_ratio == 1:
            return super().create_optimizer(model)
        optimizer = super().create_optimizer(model)
        assert self.model is not None
        composed = [p for m in self.model.modules() if isinstance(m, Compose) for p in m.parameters()]
        chosen = {id(parameter) for parameter in composed}
        for group in list(optimizer.param_groups):
            inside = [parameter for parameter in group["params"] if id(parameter) in chosen]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
            if inside:
                lr = group["lr"] * self.composition_learning_rate_ratio
                optimizer.add_param_group({**group, "params": inside, "lr": lr})
        return optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """To the callbacks only: the Trainer's history, which every checkpoint repeats, would grow with the run."""
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.folder.partial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        needed = 3 * weight_bytes(model)  # AdamW keeps two numbers for each weight
        try:
            with explained_disk_errors(f"the checkpoint of step {step}", self.folder.path, needed):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    self.folder.publish_checkpoint(step, self.keep_checkpoints)
                self.accelerator.wait_for_everyone()
        finally:
            if self.args.should_save:
                self.folder.clean()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            Path(output_dir or self._get_output_dir(None), "training_args.bin").unlink()  # a pickle; run.json has the settings

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not isinstance(self.model, PreTrainedModel):  # of PEFT
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        # `from_pretrained` undoes the renaming of `save_pretrained`; the Trainer's own loading passes over unknown names.
        loaded = type(self.model).from_pretrained(resume_from_checkpoint, dtype=torch.float32)
        self.model.load_state_dict(loaded.state_dict())


class RunOrder(Sampler[int]):
    """The rows of the whole run: one permutation after another, drawn from the seed alone.

    To the Trainer the run is one epoch. So every batch is full, no model's random numbers change the order, and a resumed run
    skips what it has seen.
    """

    def __init__(self, rows: int, total: int, seed: int):
        self.rows, self.total, self.seed = rows, total, seed

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        for start in range(0, self.total, self.rows):
            yield from torch.randperm(self.rows, generator=generator)[: self.total - start].tolist()


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows to a batch [B, T], with `labels` of their own or the tokens themselves; the model shifts labels by itself."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": torch.stack([row.get("labels", row["input_ids"]) for row in rows])}


def rows_per_step(args: TrainingArguments) -> int:
    """Rows that one update of the weights sees, in all processes together."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
